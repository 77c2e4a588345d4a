"""The benchmark of traced streams trains both ways alike."""

import json
from pathlib import Path

import pytest

from bench.streams import Options, main
from tests.integration.compositions import TOLERANCE, needs_traced
from tests.integration.harness import tokenizer_folder

JOB = Path(__file__).parents[1] / "train_configs" / "llama3_debug_cpu.toml"


@needs_traced
@pytest.mark.slow
def test_both_ways_are_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = (f"--model.hf_assets_path={tokenizer_folder()}", "--training.seq_len=1024")
    output = tmp_path / "streams.json"
    main(Options(JOB, steps=4, rounds=1, folder=tmp_path, output=output), overrides)
    figures = json.loads(output.read_text())["figures"]
    assert figures["traced_over_opaque"] > 0
    assert figures["largest_relative_loss_difference"] < TOLERANCE
    assert "traced over opaque" in capsys.readouterr().out
    for mode, streams in (("off1", "opaque"), ("on1", "traced")):
        assert f"Streams of nano-batches: {streams}" in (tmp_path / mode / "log.txt").read_text()
