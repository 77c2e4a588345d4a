"""The benchmark of overlap runs in every mode, and overlap leaves less exposed than none."""

import json
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from bench.overlap import Options, main
from torchtitan_cad.integration.pingpong.turn import FIRST_TORCH


@pytest.mark.matrix
def test_every_mode_is_measured(tmp_path: Path) -> None:
    output = tmp_path / "overlap.json"
    main(Options(shares=(0.8,), layers=2, work_ms=10.0, repeats=1, output=output))
    figures = {row["mode"]: row for row in json.loads(output.read_text())["figures"]}
    traced = ["traced signal only", "traced"] if TorchVersion(torch.__version__) >= FIRST_TORCH else []
    rows = ["single stream", "ping-pong", *traced[1:]]
    assert list(figures) == ["signal only", *rows[:2], *traced, "no tp", "tp exposed", "tp in turns"]
    for exposed, hidden in (*((rows[0], mode) for mode in rows[1:]), ("tp exposed", "tp in turns")):
        assert figures[hidden]["link"] == pytest.approx(figures[exposed]["link"])
        assert figures[hidden]["exposed"] < figures[exposed]["exposed"]
