# SPDX-License-Identifier: BSD-3-Clause
"""The ``torchtitan-cad`` command line: a thin shell over the other rooms.

Every subcommand is one module of this package with a function ``run`` whose signature is its command line (tyro) and
whose docstring is its help. To add one, write the module and name it in COMMANDS; its imports stay inside ``run`` where
they are slow. A user's mistake is a ValueError or OSError and becomes a one-line message and exit code 2.
"""

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib import import_module
from typing import Any
from unittest.mock import patch

from torchtitan_cad import __version__
from torchtitan_cad.planning.text import printable
from torchtitan_cad.tools.shared import NO_RECIPES
from torchtitan_cad.tyro_errors import one_line_instead

COMMANDS = (
    "plan",
    "prepare",
    "report",
    "doctor",
    "compare",
    "simulate",
    "serve",
)
"""Subcommands: each is a module of this package."""

USER_ERROR = 2
INTERRUPTED = 130

LEAST_COLUMNS = 20
"""of a terminal: in a narrower one tyro wraps help for ever"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code. ``argv`` defaults to the process's arguments."""
    try:
        code = _main(sys.argv[1:] if argv is None else argv)
        # what cannot be written is known here, not at the interpreter's end
        print(end="", flush=True)
    except BrokenPipeError:  # whoever reads has enough, as `head` does
        _drop_output()
        return 0
    except (ValueError, OSError) as error:
        _drop_output()
        return _fail(str(error))
    except RecursionError:
        _drop_output()
        return _fail(
            "a file is nested too deeply: write it with fewer brackets within brackets"
        )
    except MemoryError:
        _drop_output()
        return _fail(
            "out of memory: name smaller files, or set fewer ranks, tokens or steps"
        )
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _main(argv: Sequence[str]) -> int:
    import tyro  # only here: bench/gpu calls what is below the command line where tyro is missing

    if list(argv) == ["--version"]:
        print(f"torchtitan-cad {__version__}")
        return 0
    if argv and argv[0] in ("doctor", "compare", "simulate"):
        if any(arg.split("=")[0] == "--module" for arg in argv):
            raise ValueError(f"--module: {NO_RECIPES}")
        argv = separate_overrides(argv)
    app = tyro.extras.SubcommandApp()
    for name in COMMANDS:
        app.command(name=name)(
            _deferred(import_module(f"torchtitan_cad.tools.{name}").run)
        )
    columns = max(shutil.get_terminal_size().columns, LEAST_COLUMNS)
    try:
        with one_line_instead(), patch.dict(os.environ, COLUMNS=str(columns)):
            command: Callable[[], int | None] = app.cli(
                prog="torchtitan-cad",
                description=f"Core attention disaggregation for torchtitan, version {__version__} (--version).",
                args=argv,
                sort_subcommands=False,
                # options in a dataclass are options of the command
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit:  # of --help
        return 0
    return command() or 0


def separate_overrides(args: Sequence[str]) -> list[str]:
    """Move the job's arguments, options with a dot such as --training.steps, behind the command's own.

    Args:
        args: the subcommand and what follows it.

    Returns:
        The subcommand, its own options, "--", the job, its arguments: positional arguments must stand together.
    """
    command_args: list[str] = []
    job_args: list[str] = []
    group = command_args
    for arg in args:
        if arg.startswith("--"):
            group = job_args if "." in arg.split("=")[0] else command_args
        group.append(arg)
    if "--" in args or not job_args:
        return list(args)
    jobs = [arg for arg in command_args if arg.endswith(".toml")][:1]
    return [arg for arg in command_args if arg not in jobs] + ["--", *jobs, *job_args]


def _deferred(run: Callable[..., int | None]) -> Callable[..., Any]:
    """Return a function of the same signature and help that returns the call instead of making it."""

    @wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        return partial(run, *args, **kwargs)

    return call


def _fail(message: str) -> int:
    print(
        f"torchtitan-cad: error: {printable(' '.join(message.split()))}",
        file=sys.stderr,
    )
    return USER_ERROR


def _drop_output() -> None:
    """Discard what the interpreter would flush at its end, where standard output is a closed pipe or a full disk."""
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
