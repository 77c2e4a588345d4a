# SPDX-License-Identifier: BSD-3-Clause
"""Reading what a run has written about its steps, every line of which is checked before any is used."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchtitan_cad.planning.files import read_lines
from torchtitan_cad.planning.text import brief, is_integer, parse_json, printable

MOST_STEPS = 2**53

Key = tuple[Callable[[Any], bool], str]
"""Tells whether the value of a key can be; what it must be, in words."""


def integer(least: int, most: int = MOST_STEPS) -> Key:
    """Return the ``Key`` of an integer in [least, most]."""
    return (
        lambda value: is_integer(value, least, most),
        f"an integer, {least} to {most}",
    )


def read_steps(path: Path, keys: Mapping[str, Key]) -> list[dict[str, Any]]:
    """Return the object of every line of a file, the steps ascending.

    Where steps go back, a run was resumed from a checkpoint: the later lines count. A last line that is not whole is
    left out.

    Args:
        keys: those that every line is to have, "step" among them.

    Raises:
        ValueError: no step is there, or a line lacks a key or has another value; names file, line, key and value.
    """
    steps: list[dict[str, Any]] = []
    for number, line in read_lines(path):
        try:
            step = parse_json(line)
            _check(step, keys)
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


def _check(step: Any, keys: Mapping[str, Key]) -> None:
    if not isinstance(step, dict):
        raise ValueError(f"{brief(step)}: must be an object with the key step")
    for key, (is_right, words) in keys.items():
        value = step.get(key)
        if not is_right(value):
            raise ValueError(f"{key} = {brief(value)}: must be {words}")
