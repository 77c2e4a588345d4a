# SPDX-License-Identifier: BSD-3-Clause
"""Jobs with compile, again and again with the caches that other jobs have left: the same losses and gradients.

Users' jobs share a folder of compiled graphs, which torch finds by keys that do not hold all that graphs hold.
"""

from pathlib import Path

import pytest

from tests.integration import compositions as c
from tests.integration.harness import RunResult, run


def train(folder: Path, nranks: int, *args: str) -> RunResult:
    """A run with the caches of ``folder``."""
    return run([*c.COMMON, *args], nranks, env={"TORCHINDUCTOR_CACHE_DIR": str(folder)}, timeout_s=300)


def assert_same(result: RunResult, expected: RunResult) -> None:
    """Losses and gradient norms are equal to the bit."""
    assert (result.losses, result.grad_norms) == (expected.losses, expected.grad_norms)


LOSS = (*c.COMPILE, "--compile.components=loss", "--training.steps=1")


def test_a_warm_cache_changes_no_loss(tmp_path: Path) -> None:
    """Ranks of one group of tensor parallelism compile graphs with different parts of the vocabulary."""
    job = (*c.CAD, *c.TP2, *LOSS)
    cold, warm = train(tmp_path, 2, *job), train(tmp_path, 2, *job)
    assert_same(warm, cold)
