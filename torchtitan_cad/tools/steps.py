# SPDX-License-Identifier: BSD-3-Clause
"""Reading what a run has written about its steps, every line of which is checked before any is used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan_cad.planning.files import read_lines
from torchtitan_cad.planning.text import brief, is_integer, parse_json, printable

MOST_STEPS = 2**53


def read_steps(
    path: Path, check: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """Return the object of every line of a file, the steps ascending.

    Where steps go back, a run was resumed from a checkpoint: the later lines count. A last line that is not whole is
    left out.

    Args:
        check: raises ValueError for an object that lacks what its reader needs, see ``require``.

    Raises:
        ValueError: no step is there, or a line is none; names file, line, key and value.
    """
    steps: list[dict[str, Any]] = []
    for number, line in read_lines(path):
        try:
            step = parse_json(line)
            if not isinstance(step, dict):
                raise ValueError(f"{brief(step)}: must be an object with the key step")
            require(step, "step", is_step_number, "an integer, 0 or more")
            check(step)
        except ValueError as error:
            raise ValueError(
                f"{printable(path)}: line {number} is no step: {error}"
            ) from None
        while steps and steps[-1]["step"] >= step["step"]:
            steps.pop()
        steps.append(step)
    if not steps:
        raise ValueError(
            f"{printable(path)}: no step is in it yet; name the dump folder of a job that has trained some"
        )
    return steps


def require(
    step: dict[str, Any], key: str, is_right: Callable[[Any], bool], words: str
) -> None:
    """Raise ValueError, with ``words`` for what it must be, if the value of a key, or None, is not right."""
    value = step.get(key)
    if not is_right(value):
        raise ValueError(f"{key} = {brief(value)}: must be {words}")


def is_step_number(value: Any) -> bool:
    """Tell whether a step can have this number."""
    return is_integer(value, 0, MOST_STEPS)
