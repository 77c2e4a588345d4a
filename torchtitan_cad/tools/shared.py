# SPDX-License-Identifier: BSD-3-Clause
"""Shared by commands: files, whose errors come before the work begins; the planner; units."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro

from torchtitan_cad.integration.report.steps_file import to_json
from torchtitan_cad.planning.files import kind_of
from torchtitan_cad.planning.text import printable
from torchtitan_cad.titan import has_recipes

JobFile = Annotated[Path, tyro.conf.Positional]
Overrides = Annotated[tuple[str, ...], tyro.conf.Positional]
"""arguments of a job, behind the command's own"""
NO_RECIPES = (
    "this command reads jobs of torchtitan 0.2.2, TOML files, alone; train a recipe with --cad.shadow, and give its "
    "dump folder to simulate --model llama-8b --ranks N --documents"
)


def check_job(path: Path) -> None:
    """Raise ValueError if there is no such file, or the installed torchtitan reads none.

    Makes torchtitan, not imported before, run on CPU without a GPU.
    """
    if has_recipes():
        raise ValueError(
            f"{path}: jobs of the installed torchtitan are recipes, and {NO_RECIPES}"
        )
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu

    enable_cpu()


def check_output(option: str, path: Path | None) -> None:
    """Open a file to write, if one is named, and leave it as it is.

    Raises ValueError naming option, path and remedy.
    """
    if path is None:
        return
    try:
        # where links lead to
        place = Path(os.path.realpath(path))
        is_new = not place.exists()
        # opening a pipe waits for who reads it
        kind = None if is_new else kind_of(place.stat().st_mode)
        if kind:
            raise ValueError(f"this is {kind}")
        with place.open("ab"):
            pass
        if is_new:
            place.unlink()
    except (OSError, ValueError) as error:  # ValueError also for a null character
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"{option} {path}: {reason}; name a file that can be written"
        ) from None


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a file, which has been checked, and say so."""
    path.write_text(to_json(document, indent=2) + "\n")
    say_written(path)


def say_written(path: Path) -> None:
    """Print that a file is written."""
    print(f"wrote {printable(path)}")


def check_folder(option: str, path: Path) -> None:
    """Make the folder; raise ValueError for a path that cannot be one."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError for a null character
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"{option} {path}: {reason}; name a folder that can be written to"
        ) from error


def load_planner(placement: bool = False) -> None:
    """Load the planner's compiled code, and placement's; if that has to be waited for, stderr says why."""
    from torchtitan_cad.planning import warm_up
    from torchtitan_cad.planning.placement.place import warm_up_placement

    load = warm_up_placement if placement else warm_up
    load(lambda line: print(line, file=sys.stderr, flush=True))


def byte_unit(largest: float) -> tuple[float, str]:
    """Return (bytes of a unit, its name) in which ``largest`` is at least 1: GB, MB, kB or B."""
    for scale, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest >= scale:
            return scale, name
    return 1.0, "B"
