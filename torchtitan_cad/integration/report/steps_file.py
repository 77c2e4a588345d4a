# SPDX-License-Identifier: BSD-3-Clause
"""Files with a line of JSON for every step, all whole but maybe the last: figures, and recorded documents."""

import itertools
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

STEPS_NAME = "cad_steps.jsonl"
"""Figures of a run's logged steps, which `torchtitan-cad report` reads."""
DOCUMENTS_NAME = Path("documents", "steps.jsonl")
"""Documents of a run's steps, in its dump folder, which `torchtitan-cad simulate` reads."""
DOCUMENTS_VERSION = 1
"""Version of the lines of ``DOCUMENTS_NAME``."""


@dataclass
class StepsFile:
    """Appends lines to a file, after those of earlier runs; a last line that a kill has cut is removed.

    A file that cannot be written to is no reason to stop training: it is one warning.

    Attributes:
        find_path: gives the path, at the first step. May raise OSError.
        reader: command that reads the file.
        path: of the file; None before the first step.
    """

    find_path: Callable[[], Path]
    reader: str
    path: Path | None = None
    _has_failed: bool = False

    def append(self, step: dict[str, Any]) -> None:
        """Write the line of a step after the last whole one."""
        try:
            if self.path is None:
                self.path = self.find_path()
                self.path.parent.mkdir(parents=True, exist_ok=True)
                logger.info(
                    f"CAD writes steps to {self.path}, which `torchtitan-cad {self.reader}` reads"
                )
            with self.path.open("a+b") as file:
                size = file.tell()
                file.seek(max(0, size - 1))
                if size and file.read() != b"\n":
                    file.truncate(self.path.read_bytes().rfind(b"\n") + 1)
                file.write(f"{to_json(step)}\n".encode())
        except OSError as error:
            if not self._has_failed:
                logger.warning(
                    f"CAD cannot write this step, and tries again with every other: {error}"
                )
            self._has_failed = True


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
