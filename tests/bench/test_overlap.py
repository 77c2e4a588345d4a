# SPDX-License-Identifier: BSD-3-Clause
"""The benches that run ranks: overlap leaves less exposed than none, two nodes at every rate, and traced streams."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from bench import network
from bench.overlap import Options, main
from bench.record import read_records
from tests.lib.jobs.harness import tokenizer_folder
from tests.lib.network import missing
from torchtitan_cad.integration.pingpong.segment_graph import FIRST_TORCH

TRACED = TorchVersion(torch.__version__) >= FIRST_TORCH


def figures_of(options: Options, folder: Path) -> dict[str, dict[str, Any]]:
    output = folder / "overlap.json"
    main(dataclasses.replace(options, output=output))
    return {row["mode"]: row for row in read_records(output)}


@pytest.mark.matrix
def test_the_first_and_the_last_exchange_alone_stay_exposed(tmp_path):
    figures = figures_of(
        Options(shares=(0.8,), layers=3, work_ms=10.0, repeats=1, counted=True),
        tmp_path,
    )
    assert figures["single stream"]["exposed"] == pytest.approx(
        figures["single stream"]["link"], rel=0.01
    )
    for mode in ("ping-pong", *(["traced"] if TRACED else [])):
        assert figures[mode]["exposed"] == pytest.approx(2 * 0.8 * 0.01, rel=0.05), mode


@pytest.mark.matrix
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    missing() is not None, reason=f"no nodes on this machine: {missing()}"
)
def test_times_every_mode_at_every_rate(tmp_path):
    output = tmp_path / "network.json"
    options = network.Options(
        rates=(1e9,),
        modes=("stock", "cad"),
        steps=2,
        folder=tmp_path / "runs",
        output=output,
    )
    network.main(
        options,
        ["--training.seq_len=512", f"--model.hf_assets_path={tokenizer_folder()}"],
    )
    rows = json.loads(output.read_text())["rows"]
    assert [*rows[0][:2], *rows[0][3:6], *rows[1][:2]] == [
        1000.0,
        "stock",
        "",
        "",
        1,
        1000.0,
        "cad",
    ]
    # ms, predicted ms, exposed wait in percent
    assert min(rows[1][2:4]) > 0 <= rows[1][4] < 100
    assert output.with_suffix(".png").stat().st_size > 0
