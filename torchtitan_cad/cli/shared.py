# SPDX-License-Identifier: BSD-3-Clause
"""Shared by commands: files, whose errors come before the work begins; the planner; units."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchtitan_cad.planning.text import parse_json

PICTURES = (".png", ".pdf", ".svg")

MAX_BYTES = 2**26
"""bytes: most of a file that is read, some million segments; a device without an end is not read to its end."""


def read_json(path: Path) -> Any:
    """Return what the JSON file holds. Raises ValueError for none or a large one, OSError if it cannot be read."""
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"{path} has more than {MAX_BYTES // 2**20} MiB: name a smaller file")
    try:
        return parse_json(content.decode())
    except ValueError as error:  # also UnicodeDecodeError
        raise ValueError(f"{path} is not JSON: {error}") from error


def check_job(path: Path) -> None:
    """Raise ValueError if there is no such file; make torchtitan, not imported before, run on CPU without a GPU."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    from torchtitan_cad.integration.titan022.cpu import enable_cpu

    enable_cpu()


def check_output(option: str, path: Path) -> None:
    """Raise ValueError for a path that no file can be written to."""
    if path.is_dir():
        raise ValueError(f"{option} {path}: this is a folder; name a file, such as {path / 'output'}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}; make it first")


def check_folder(option: str, path: Path) -> None:
    """Make the folder; raise ValueError for a path that cannot be one."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError for a null character
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{option} {path}: {reason}; name a folder that can be written to") from error


def check_picture(option: str, path: Path) -> None:
    """Raise ValueError for a path that no picture can be written to, or without matplotlib."""
    check_output(option, path)
    if path.suffix.lower() not in PICTURES or (path.exists() and not path.is_file()):
        raise ValueError(f"{option} {path}: name a file that ends in {', '.join(PICTURES[:-1])} or {PICTURES[-1]}")
    if find_spec("matplotlib") is None:
        raise ValueError(f"{option} {path}: matplotlib is not installed; `pip install matplotlib`, or leave it out")


def load_planner(placement: bool = False) -> None:
    """Load the planner's compiled code, and placement's; if that has to be waited for, stderr says why."""
    from torchtitan_cad.planning import warm_up
    from torchtitan_cad.planning.placement.place import warm_up_placement

    load = warm_up_placement if placement else warm_up
    load(lambda line: print(line, file=sys.stderr, flush=True))


def byte_unit(largest: float) -> tuple[float, str]:
    """Return (bytes of a unit, its name) in which ``largest`` is at least 1: GB, MB, kB or B."""
    units = {1e9: "GB", 1e6: "MB", 1e3: "kB"}
    return next(((scale, name) for scale, name in units.items() if largest >= scale), (1.0, "B"))
