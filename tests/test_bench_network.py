"""The bench of two nodes: every mode trains at every rate, and stock is the measure."""

import json
from pathlib import Path

import pytest

from bench import network
from tests.integration.harness import tokenizer_folder
from tests.nodes.network import missing


@pytest.mark.matrix
@pytest.mark.timeout(300)
@pytest.mark.skipif(missing() is not None, reason=f"no nodes on this machine: {missing()}")
def test_times_every_mode_at_every_rate(tmp_path: Path) -> None:
    output = tmp_path / "network.json"
    options = network.Options(
        rates=(1e9,), modes=("stock", "cad"), steps=2, rounds=1, folder=tmp_path / "runs", output=output
    )
    network.main(options, ["--training.seq_len=512", f"--model.hf_assets_path={tokenizer_folder()}"])
    rows = json.loads(output.read_text())["rows"]
    assert [row[:2] for row in rows] == [[1000.0, "stock"], [1000.0, "cad"]]
    assert rows[0][4] == 1
    assert rows[0][3] == pytest.approx(rows[0][2])  # stock on the fastest link is the measure of predictions
    assert all(milliseconds > 0 < predicted for _, _, milliseconds, predicted, _ in rows)


def test_refuses_modes_without_stock() -> None:
    if missing() is not None:
        pytest.skip(f"no nodes on this machine: {missing()}")
    with pytest.raises(ValueError, match="stock among them"):
        network.main(network.Options(modes=("cad",)))
