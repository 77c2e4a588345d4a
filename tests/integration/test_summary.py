"""The run summary: files, values, text."""

import json

import numpy as np
import pytest
import torch

from torchtitan_cad.integration.summary import imbalance, summarize, write_summary

HISTORY = [
    {
        "step": 1,
        "loads_before": [1, 1, 1, 5],
        "loads_after": np.array([2.0, 2.0, 2.0, 2.0]),
        "bytes_per_rank_mean": 3.0e6,
        "bytes_per_rank_max": np.float64(6.0e6),
        "tasks_moved": 3,
        "plan_seconds": 0.002,
        "exchange_seconds": 0.1,
        "loss": torch.tensor(8.0),
        "note": "kept",
    },
    {
        "step": 2,
        "loads_before": [2, 2, 2, 2],
        "loads_after": torch.tensor([2.0, 2.0, 1.8, 2.2]),
        "bytes_per_rank_mean": 1.0e6,
        "bytes_per_rank_max": 2.0e6,
        "tasks_moved": 2,
        "plan_seconds": 0.004,
        "exchange_seconds": 0.3,
        "loss": 7.5,
    },
]


def test_files(tmp_path):
    folder = tmp_path / "new" / "folder"
    write_summary(folder, HISTORY)
    assert (folder / "imbalance.png").read_bytes().startswith(b"\x89PNG")
    data = json.loads((folder / "cad_summary.json").read_text())
    assert [step["step"] for step in data["steps"]] == [1, 2]
    assert data["steps"][0]["note"] == "kept"
    assert data["steps"][1]["loads_after"] == pytest.approx([2.0, 2.0, 1.8, 2.2])
    assert data["summary"] == pytest.approx(
        {
            "steps": 2,
            "ranks": 4,
            "imbalance_before": (2.5 + 1.0) / 2,
            "imbalance_after": (1.0 + 1.1) / 2,
            "imbalance_before_worst": 2.5,
            "imbalance_after_worst": 1.1,
            "bytes_per_rank_mean": 2.0e6,
            "bytes_per_rank_max": 4.0e6,
            "tasks_moved": 2.5,
            "plan_seconds": 0.003,
            "exchange_seconds": 0.2,
            "loss_first": 8.0,
            "loss_last": 7.5,
        }
    )


def test_text(tmp_path):
    text = write_summary(tmp_path, HISTORY)
    for expected in (
        "2 steps on 4 ranks",
        "1.75 -> 1.05  (worst step 2.50 -> 1.10)",
        "2 MB, busiest rank 4 MB",
        "2.5",
        "3.0 ms",
        "200.0 ms",
        "8.000 -> 7.500",
    ):
        assert expected in text


def test_only_loads(tmp_path):
    text = write_summary(tmp_path, [{"step": 5, "loads_before": [3, 1], "loads_after": [2, 2]}])
    assert text.count("\n") == 1
    assert json.loads((tmp_path / "cad_summary.json").read_text())["summary"]["loss_first"] is None


def test_diverged_loss_is_valid_json(tmp_path):
    write_summary(tmp_path, [{**HISTORY[0], "loss": float("nan")}])

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    data = json.loads((tmp_path / "cad_summary.json").read_text(), parse_constant=refuse)
    assert data["steps"][0]["loss"] is None


def test_many_ranks_and_steps(tmp_path):
    rng = np.random.default_rng(0)
    history = [{"step": i, "loads_before": rng.random(300), "loads_after": np.ones(300)} for i in range(100)]
    write_summary(tmp_path, history)
    assert (tmp_path / "imbalance.png").stat().st_size > 10_000


def test_no_work():
    steps = [
        {"loads_before": [0, 0, 0]},
        {"loads_before": [1, 2, 3]},
        {"loads_before": [1, 2, 3], "imbalance_before": 2},
    ]
    assert imbalance(steps, "before").tolist() == [1.0, 1.5, 2.0]


def test_errors(tmp_path):
    with pytest.raises(ValueError, match="history is empty"):
        write_summary(tmp_path, [])
    with pytest.raises(ValueError, match="loads_before must have one entry a rank"):
        summarize([{**HISTORY[0]}, {**HISTORY[1], "loads_before": [1, 2]}])
    with pytest.raises(ValueError, match="for 4 ranks and loads_after for 2"):
        summarize([{**HISTORY[0], "loads_after": [1, 2]}])


def test_a_slow_first_plan_does_not_count():
    steps = [{**HISTORY[0], "plan_seconds": seconds} for seconds in (10.0, 0.003, 0.001)]
    assert summarize(steps)["plan_seconds"] == 0.003
