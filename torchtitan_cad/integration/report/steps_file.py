# SPDX-License-Identifier: BSD-3-Clause
"""The figures of a run's logged steps, cad_steps.jsonl, which `torchtitan-cad report` reads."""

import contextlib
import itertools
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STEPS_NAME = "cad_steps.jsonl"


class StepsFile:
    """Appends the figures of every logged step to the run's file, which has whole lines at any moment.

    It is made in the run's ``folder``, or if an earlier run has left its figures there, in ``folder-2`` (or -3, ...);
    ``path`` says where. Raises OSError if that cannot be written to.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        for number in itertools.count(1):
            self.path = Path(f"{os.fspath(folder)}-{number}" if number > 1 else folder, STEPS_NAME)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                self.path.touch(exist_ok=False)
                break

    def append(self, figures: Mapping[str, Any]) -> None:
        """Write a line. Raises OSError if it cannot be written; what was written before stays whole."""
        line = f"{to_json(figures)}\n".encode()
        with self.path.open("ab", buffering=0) as file:
            begin = file.tell()
            try:
                if file.write(line) < len(line):
                    raise OSError(f"{self.path}: the disk has no room for the figures of step {figures['step']}")
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(begin)
                raise


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
