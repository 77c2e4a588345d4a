"""The ``torchtitan-cad`` command line: a thin shell over the other rooms.

Every subcommand is one module of this package with a function ``run`` whose signature is its command line (tyro) and
whose docstring is its help. To add one, write the module and name it in COMMANDS; its imports stay inside ``run`` where
they are slow. A user's mistake is a ValueError or OSError and becomes a one-line message and exit code 2.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import tyro

from .doctor_command import separate_overrides

COMMANDS = {
    "plan": "plan_command",
    "profile": "profile_command",
    "prepare": "prepare_command",
    "doctor": "doctor_command",
}
"""Subcommand to module of this package."""

USER_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code. ``argv`` defaults to the process's arguments."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["doctor"]:
        argv = separate_overrides(argv)
    app = tyro.extras.SubcommandApp()
    for name, module in COMMANDS.items():
        run: Callable[..., Any] = import_module(f"{__name__}.{module}").run
        app.command(name=name)(run)
    try:
        code = app.cli(prog="torchtitan-cad", args=argv, sort_subcommands=False)
    except (ValueError, OSError) as error:
        print(f"torchtitan-cad: error: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_ERROR
    return code or 0
