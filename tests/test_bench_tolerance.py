"""``bench/tolerance.py``: by its own times "auto" is never slower than the default."""

import json
from pathlib import Path

import pytest

from bench import tolerance as bench
from bench.workloads import workload_layout


@pytest.mark.parametrize("nano_batches", [1, 2])
def test_auto_is_never_slower(nano_batches: int) -> None:
    layouts = [workload_layout("lognormal", 8, seed) for seed in (11, 12)]
    cases = [bench.measure(8, "lognormal", link, nano_batches, layouts) for link in (1e9, 50e9, 1e15)]
    assert all(case["gain"] >= 0 for case in cases)
    assert cases[0]["bytes_saved"] > 0
    assert cases[0]["fixed_seconds"] > cases[2]["fixed_seconds"]
    assert cases[2]["tolerances"] == [0, 0]


def test_results_are_written_and_printed(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(bench, "RANKS", (4,))
    monkeypatch.setattr(bench, "WORKLOADS", ("uniform",))
    bench.main(tmp_path / "out.json", seeds=1)
    document = json.loads((tmp_path / "out.json").read_text())
    assert len(document["rows"]) == 2 * len(bench.LINKS)
    assert len(document["rows"][0]) == len(document["columns"])
    assert capsys.readouterr().out.count("| 4 | uniform |") == 2 * len(bench.LINKS)
