# SPDX-License-Identifier: BSD-3-Clause
"""Which tests and parameters run where: the short set, the matrix only (see CONTRIBUTING.md), with Triton."""

import importlib.util
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs the package triton"
)
matrix = pytest.mark.matrix
slow = pytest.mark.slow
"""For what the short set leaves out, and for what takes longer than a minute."""

CONFIGS = Path(__file__).resolve().parents[2] / "train_configs"


def params(values: Iterable[Any], short: Collection[Any]) -> list[Any]:
    """The values as parameters; those that are not in ``short`` belong to the matrix."""
    return [
        pytest.param(value, marks=() if value in short else matrix) for value in values
    ]


def seeds(short: int, whole: int) -> list[Any]:
    """0, 1, ... up to ``whole``, of which the first ``short`` belong to the short set."""
    return params(range(whole), range(short))
