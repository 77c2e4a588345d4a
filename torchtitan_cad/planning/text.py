# SPDX-License-Identifier: BSD-3-Clause
"""Reading text that users wrote, and showing values in messages."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from reprlib import Repr
from typing import Any

_SHORT = Repr()
_SHORT.maxlevel = 3
_SHORT.maxlist = 8
_SHORT.maxtuple = 8
_SHORT.maxdict = 8
_SHORT.maxstring = _SHORT.maxother = 80


def brief(value: object) -> str:
    """Return ``repr(value)``, shortened such that a message stays one line."""
    return _SHORT.repr(value)


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Return a line per row, with aligned columns: those in ``left`` to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(w) if i in left else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def printable(text: object) -> str:
    """Return ``str(text)`` with escapes for what a terminal would obey or cannot show, in a file's name, say."""
    return "".join(
        character
        if character.isprintable()
        else character.encode("unicode_escape").decode()
        for character in str(text)
    )


def parse_json(text: str) -> Any:
    """Parse a JSON text. Raises ValueError if it is not JSON (a JSONDecodeError), or nested too deeply for Python."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(
            "nested too deeply: no file of this format needs more than five levels"
        ) from None


def is_number(value: object) -> bool:
    """Tell whether the value is a finite float, or an int that a float can hold."""
    # Compared, not converted: float() of a large integer raises.
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )


def is_integer(value: object, least: int, most: int) -> bool:
    """Tell whether the value is an int in [least, most] and not a bool."""
    return (
        isinstance(value, int)
        and not isinstance(value, bool)
        and least <= value <= most
    )
