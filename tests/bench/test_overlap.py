# SPDX-License-Identifier: BSD-3-Clause
"""The bench of overlap: it leaves less exposed than none, also of traced streams."""

import pytest
import torch
from torch.torch_version import TorchVersion

from bench.overlap import Options, main
from bench.record import read_records
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
