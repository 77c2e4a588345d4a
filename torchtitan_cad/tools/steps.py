# SPDX-License-Identifier: BSD-3-Clause
"""Reading what a run has written about its steps, every line of which is checked before any is used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan_cad.planning.files import read_lines
from torchtitan_cad.planning.text import is_integer, parse_json, printable

MOST_STEPS = 2**53
NO_STEP = (AttributeError, KeyError, TypeError, ValueError)
"""Raised for values of other kinds, keys that lack, and by checks."""


def read_steps(
    path: Path, is_step: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """Return the object of every line of a file, the steps ascending.

    Where steps go back, a run was resumed from a checkpoint: the later lines count. A last line that is not whole is
    left out.

    Args:
        is_step: tells whether a line has what its reader needs; it may raise ``NO_STEP``.

    Raises:
        ValueError: no step is there, or a line is none; names file, line, and what to do.
    """
    steps: list[dict[str, Any]] = []
    for number, line in read_lines(path):
        try:
            step = parse_json(line)
            is_right = is_integer(step["step"], 0, MOST_STEPS) and is_step(step)
        except NO_STEP:
            is_right = False
        if not is_right:
            raise ValueError(
                f"{printable(path)}: line {number} is no step as this version writes them; name another file"
            )
        while steps and steps[-1]["step"] >= step["step"]:
            steps.pop()
        steps.append(step)
    if not steps:
        raise ValueError(
            f"{printable(path)}: no step is in it yet; name the dump folder of a job that has trained some"
        )
    return steps
