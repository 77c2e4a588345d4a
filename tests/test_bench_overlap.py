"""The benchmark of overlap runs in every mode, and overlap leaves less exposed than none."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from bench.overlap import Options, main
from bench.record import read_records
from torchtitan_cad.integration.pingpong.turn import FIRST_TORCH

TRACED = TorchVersion(torch.__version__) >= FIRST_TORCH


def figures_of(options: Options, folder: Path) -> dict[str, dict[str, Any]]:
    output = folder / "overlap.json"
    main(dataclasses.replace(options, output=output))
    return {row["mode"]: row for row in read_records(output)}


def test_the_first_and_the_last_exchange_alone_stay_exposed(tmp_path: Path) -> None:
    figures = figures_of(Options(shares=(0.8,), layers=3, work_ms=10.0, repeats=1, counted=True), tmp_path)
    assert figures["single stream"]["exposed"] == pytest.approx(figures["single stream"]["link"], rel=0.01)
    for mode in ("ping-pong", *(["traced"] if TRACED else [])):
        assert figures[mode]["exposed"] == pytest.approx(2 * 0.8 * 0.01, rel=0.05), mode


@pytest.mark.matrix
def test_every_mode_is_measured(tmp_path: Path) -> None:
    figures = figures_of(Options(shares=(0.8,), layers=2, work_ms=10.0, repeats=1), tmp_path)
    traced = ["traced signal only", "traced"] if TRACED else []
    rows = ["single stream", "ping-pong", *traced[1:]]
    assert list(figures) == ["signal only", *rows[:2], *traced, "no tp", "tp exposed", "tp in turns"]
    for exposed, hidden in (*((rows[0], mode) for mode in rows[1:]), ("tp exposed", "tp in turns")):
        assert figures[hidden]["link"] == pytest.approx(figures[exposed]["link"])
        assert figures[hidden]["exposed"] < figures[exposed]["exposed"]
