"""The benchmark of overlap runs in every mode, and overlap leaves less exposed than none."""

import json
from pathlib import Path

import pytest

from bench.overlap import Options, main


@pytest.mark.matrix
def test_every_mode_is_measured(tmp_path: Path) -> None:
    output = tmp_path / "overlap.json"
    main(Options(shares=(0.8,), layers=2, work_ms=10.0, repeats=1, output=output))
    figures = {row["mode"]: row for row in json.loads(output.read_text())["figures"]}
    assert list(figures) == ["signal only", "single stream", "ping-pong", "no tp", "tp exposed", "tp in turns"]
    for exposed, hidden in (("single stream", "ping-pong"), ("tp exposed", "tp in turns")):
        assert figures[hidden]["link"] == pytest.approx(figures[exposed]["link"])
        assert figures[hidden]["exposed"] < figures[exposed]["exposed"]
