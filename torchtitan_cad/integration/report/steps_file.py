# SPDX-License-Identifier: BSD-3-Clause
"""Files with a line of JSON for every step, which have whole lines at any moment: figures, and recorded documents."""

import contextlib
import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

STEPS_NAME = "cad_steps.jsonl"
"""Figures of a run's logged steps, which `torchtitan-cad report` reads."""
DOCUMENTS_NAME = Path("documents", "steps.jsonl")
"""Documents of a run's steps, in its dump folder, which `torchtitan-cad simulate` reads."""
DOCUMENTS_VERSION = 1
"""Version of the lines of ``DOCUMENTS_NAME``."""


class LinesFile:
    """Appends lines to a file, after those of earlier runs; a last line that a kill has cut is removed.

    Raises OSError if the file, or its folder, cannot be written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            if size and file.read() != b"\n":
                file.truncate(path.read_bytes().rfind(b"\n") + 1)

    def append(self, text: str) -> None:
        """Write a line. Raises OSError if it cannot be written; what was written before stays whole."""
        line = f"{text}\n".encode()
        with self.path.open("ab", buffering=0) as file:
            begin = file.tell()
            try:
                if file.write(line) < len(line):
                    raise OSError(f"{self.path}: the disk has no room for another line")
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(begin)
                raise


def new_steps_file(folder: str | os.PathLike[str]) -> LinesFile:
    """Make the file for the figures of a run in its ``folder``, or in ``folder-2`` (or -3, ...) if an earlier run has
    left its figures there.

    Raises OSError if that cannot be written to.
    """
    for number in itertools.count(1):
        path = Path(
            f"{os.fspath(folder)}-{number}" if number > 1 else folder, STEPS_NAME
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.touch(exist_ok=False)
            break
    return LinesFile(path)


def to_json(value: Any, indent: int | None = None) -> str:
    """Write JSON, in which null stands for nan and infinity (a loss, say, of a run that diverged)."""
    return json.dumps(_without_nan(value), indent=indent, allow_nan=False)


def _without_nan(value: Any) -> Any:
    match value:
        case dict():
            return {key: _without_nan(item) for key, item in value.items()}
        case list() | tuple():
            return [_without_nan(item) for item in value]
        case float() if not math.isfinite(value):
            return None
        case _:
            return value
