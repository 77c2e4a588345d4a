# SPDX-License-Identifier: BSD-3-Clause
"""Files with a line of JSON for every step, all whole but maybe the last: figures, and recorded documents."""

import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

STEPS_NAME = "cad_steps.jsonl"
"""Figures of a run's logged steps, which `torchtitan-cad report` reads."""
DOCUMENTS_NAME = Path("documents", "steps.jsonl")
"""Documents of a run's steps, in its dump folder, which `torchtitan-cad simulate` reads."""
DOCUMENTS_VERSION = 1
"""Version of the lines of ``DOCUMENTS_NAME``."""


class StepsFile:
    """Appends lines to a file, after those of earlier runs; a last line that a kill has cut is removed.

    A file that cannot be written to is no reason to stop training: it is one warning.

    Args:
        find_path: gives the path, at the first step. May raise OSError.
        reader: command that reads the file.
    """

    def __init__(self, find_path: Callable[[], Path], reader: str) -> None:
        self.path: Path | None = None
        self._find_path = find_path
        self._reader = reader
        self._has_failed = False

    def append(self, step: dict[str, Any]) -> None:
        """Write the line of a step."""
        try:
            if self.path is None:
                self.path = self._find_path()
                self.path.parent.mkdir(parents=True, exist_ok=True)
                logger.info(
                    f"CAD writes steps to {self.path}, which `torchtitan-cad {self._reader}` reads"
                )
            _append_line(self.path, to_json(step))
        except OSError as error:
            if not self._has_failed:
                logger.warning(
                    f"CAD cannot write this step, and tries again with every other: {error}"
                )
            self._has_failed = True


def _append_line(path: Path, text: str) -> None:
    """Write a line after the last whole one."""
    with path.open("a+b") as file:
        size = file.tell()
        file.seek(max(0, size - 1))
        if size and file.read() != b"\n":
            file.truncate(path.read_bytes().rfind(b"\n") + 1)
        file.write(f"{text}\n".encode())


def new_path(folder: str) -> Path:
    """Return where the figures of a run go: to its ``folder``, or to ``folder-2`` (or -3, ...) if an earlier run has
    left its figures there."""
    names = itertools.chain(
        [folder], (f"{folder}-{number}" for number in itertools.count(2))
    )
    paths = (Path(name, STEPS_NAME) for name in names)
    return next(path for path in paths if not path.exists())


def to_json(value: Any, indent: int | None = None) -> str:
    """Write JSON, in which null stands for nan and infinity (a loss, say, of a run that diverged)."""
    plain = json.loads(json.dumps(value), parse_constant=lambda name: None)
    return json.dumps(plain, indent=indent)
