# SPDX-License-Identifier: BSD-3-Clause
"""Shared by commands: files, whose errors come before the work begins; the planner; units."""

import json
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import tyro

from torchtitan_cad.planning.files import kind_of
from torchtitan_cad.planning.text import printable
from torchtitan_cad.titan import has_recipes

JobFile = Annotated[Path, tyro.conf.Positional]
Overrides = Annotated[tuple[str, ...], tyro.conf.Positional]
"""arguments of a job, behind the command's own"""
PICTURES = (".png", ".pdf", ".svg")
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


def check_outputs(
    outputs: Mapping[str, Path | None], *inputs: str | Path | None
) -> None:
    """Open what a command will write, before its work, and leave it as it is.

    Args:
        outputs: by option, the files to write; None for none.
        inputs: files that the command reads; None for none.

    Raises:
        ValueError: a file cannot be written, is read too, or is written by two options; names option, path and remedy.
    """
    taken = {
        _place(path): "the command reads this file"
        for path in inputs
        if path is not None
    }
    for option, path in outputs.items():
        if path is None:
            continue
        check_output(option, path)
        if reason := taken.get(_place(path)):
            raise ValueError(f"{option} {path}: {reason}, too; name another one")
        taken[_place(path)] = f"{option} writes this file"


def check_output(option: str, path: Path) -> None:
    """Open a file to write, and leave it as it is. Raises ValueError naming option, path and remedy."""
    if os.path.isdir(path):
        raise ValueError(
            f"{option} {path}: this is a folder; name a file, such as {path / 'output'}"
        )
    if not os.path.isdir(path.absolute().parent):
        raise ValueError(
            f"{option} {path}: there is no folder {path.parent}; make it first"
        )
    try:
        place = os.path.realpath(path)
        is_new = not os.path.lexists(place)
        # opening a pipe waits for who reads it
        kind = None if is_new else kind_of(os.stat(place).st_mode)
        if kind:
            raise ValueError(f"this is {kind}")
        with open(place, "ab"):
            pass
        if is_new:
            os.unlink(place)
    except (OSError, ValueError) as error:  # ValueError also for a null character
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"{option} {path}: {reason}; name a file that can be written"
        ) from None


def _place(path: str | Path) -> tuple[int, int] | str:
    """Return what two names of one file have in common."""
    try:
        found = os.stat(path)
        return found.st_dev, found.st_ino
    except (OSError, ValueError):
        return os.path.realpath(path) if "\0" not in str(path) else str(path)


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a file, which has been checked, and say so."""
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
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


def check_picture(option: str, path: Path) -> None:
    """Raise ValueError for a name that no picture can have, or without matplotlib."""
    if path.suffix.lower() not in PICTURES:
        raise ValueError(
            f"{option} {path}: name a file that ends in {', '.join(PICTURES[:-1])} or {PICTURES[-1]}"
        )
    if find_spec("matplotlib") is None:
        raise ValueError(
            f"{option} {path}: matplotlib is not installed; `pip install matplotlib`, or leave it out"
        )


def load_planner(placement: bool = False) -> None:
    """Load the planner's compiled code, and placement's; if that has to be waited for, stderr says why."""
    from torchtitan_cad.planning import warm_up
    from torchtitan_cad.planning.placement.place import warm_up_placement

    load = warm_up_placement if placement else warm_up
    load(lambda line: print(line, file=sys.stderr, flush=True))


def byte_unit(largest: float) -> tuple[float, str]:
    """Return (bytes of a unit, its name) in which ``largest`` is at least 1: GB, MB, kB or B."""
    units = {1e9: "GB", 1e6: "MB", 1e3: "kB"}
    return next(
        ((scale, name) for scale, name in units.items() if largest >= scale), (1.0, "B")
    )
