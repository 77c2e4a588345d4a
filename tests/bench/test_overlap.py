# SPDX-License-Identifier: BSD-3-Clause
"""The benches that run ranks: overlap leaves less exposed than none, two nodes at every rate, and traced streams."""

import json

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


@pytest.mark.matrix
def test_the_first_and_the_last_exchange_alone_stay_exposed(tmp_path):
    output = tmp_path / "overlap.json"
    main(
        Options(
            shares=(0.8,),
            layers=3,
            work_ms=10.0,
            repeats=1,
            counted=True,
            output=output,
        )
    )
    rows = {row["mode"]: row for row in read_records(output)}
    single = rows["single stream"]
    assert single["exposed"] == pytest.approx(single["link"], rel=0.01)
    for mode in ("ping-pong", "traced") if TRACED else ("ping-pong",):
        exposed = rows[mode]["exposed"]
        assert exposed == pytest.approx(2 * 0.8 * 0.01, rel=0.05), mode


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
    assets = f"--model.hf_assets_path={tokenizer_folder()}"
    network.main(options, ["--training.seq_len=512", assets])
    stock, cad = json.loads(output.read_text())["rows"]
    assert stock[:2] == [1000.0, "stock"]
    assert stock[3:6] == ["", "", 1]
    assert cad[:2] == [1000.0, "cad"]
    milliseconds, predicted, exposed_percent = cad[2:5]
    assert min(milliseconds, predicted) > 0 <= exposed_percent < 100
    assert output.with_suffix(".png").stat().st_size > 0
