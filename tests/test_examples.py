"""What examples/ shows works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def output_of(name: str) -> str:
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == {"plan_a_batch.py", "two_ranks.py"}


def test_plan_a_batch() -> None:
    printed = output_of("plan_a_batch.py")
    assert "document 0: queries 0 to" in printed
    assert "before, 1.0" in printed


@pytest.mark.matrix
def test_two_ranks() -> None:
    assert output_of("two_ranks.py").count("agree with ordinary attention") == 2
