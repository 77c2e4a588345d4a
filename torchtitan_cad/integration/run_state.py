# SPDX-License-Identifier: BSD-3-Clause
"""What a process knows of its failure, wherever the error that ends it is caught."""

from contextlib import ExitStack
from dataclasses import dataclass, field


@dataclass
class RunState:
    """State of the one training job of a process.

    Attributes:
        own_error: was raised while this rank alone loaded or planned, so that no peer can have caused it.
        reported_error: its line has been printed.
        has_failed: True once training has raised an error.
        signals: ends the watch for signals, which lasts until the job is closed.
    """

    own_error: BaseException | None = None
    reported_error: BaseException | None = None
    has_failed: bool = False
    signals: ExitStack = field(default_factory=ExitStack)


_state = RunState()


def run_state() -> RunState:
    """Return the state of this process's job."""
    return _state


def begin_run() -> RunState:
    """Return a new state, for a job that begins."""
    global _state
    _state = RunState()
    return _state
