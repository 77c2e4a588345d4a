# SPDX-License-Identifier: BSD-3-Clause
"""Ends a job that fails with one line that says why, in place of tracebacks of all ranks."""

import json
import logging
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from torch.distributed.checkpoint.api import CheckpointException

from torchtitan_cad.integration.run_state import run_state
from torchtitan_cad.runtime.errors import PeerError, first_sentence

TRACEBACK_OPTION = "--traceback"
"""Option of `torchtitan_cad.train` that shows the stacks of errors."""

_OTHER_RANKS_WAIT_S = 6.0
_INTERRUPTED = 130
_SETUP_ERRORS = (
    ValueError,
    OSError,
    NotImplementedError,
    AssertionError,
    ImportError,
    RecursionError,
)


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the message names the folder, the reason and the remedy."""

    def __init__(self, folder: str, error: CheckpointException) -> None:
        rank, (cause, _) = min(error.failures.items())
        room = ""
        if os.path.isdir(folder):
            room = f", where {shutil.disk_usage(folder).free / 1e6:,.0f} MB are free,"
        remedy = (
            "make room, or set checkpoint.folder or job.dump_folder to another disk, and start again: the job resumes "
            "from the last checkpoint that is complete"
        )
        reason = getattr(cause, "strerror", None) or first_sentence(cause)
        if reason.startswith(("Missing key", "Size mismatch")):
            remedy = "start the job with the model and options that it was saved with, or set another checkpoint.folder"
        super().__init__(
            f"a checkpoint in {folder}{room} could not be written or read by rank {rank}: {reason}; {remedy}"
        )


@contextmanager
def one_line_errors(args: Sequence[str]) -> Iterator[SimpleNamespace]:
    """End the process with one line on stderr where an error explains itself; other errors pass.

    The exit code is 2 while the config is read or the trainer built, 1 once what is yielded is no longer ``building``.
    ``--traceback`` among ``args`` lets every error pass.
    """
    progress = SimpleNamespace(building=True)
    try:
        yield progress
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except Exception as error:
        text = explain(error, progress.building)
        if text is None or TRACEBACK_OPTION in args:
            raise
        if not isinstance(error, PeerError) and not is_first_of_node():
            # Most likely all ranks have met the same error: the first of the node says so, and its launcher then ends
            # the others. Whoever still lives after a while may be the only one that met it.
            time.sleep(_OTHER_RANKS_WAIT_S)
        report(error, text)
        tell_launcher(text)
        sys.exit(2 if progress.building else 1)


def report(error: BaseException, text: str) -> None:
    """Print the line of an error; only once, however far the error travels."""
    state = run_state()
    if state.reported_error is not error:
        print(f"error: {text}", file=sys.stderr, flush=True)
        state.reported_error = error


def explain(error: BaseException, building: bool) -> str | None:
    """Say in one line what went wrong and what to do; None if the error looks like a bug, which needs its stack.

    While ``building``, what is wrong is most likely the user's input.
    """
    if isinstance(error, PeerError | CheckpointError):
        return first_sentence(error)
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    raised_here = frame.f_globals.get("__name__", "").startswith("torchtitan_cad")
    if isinstance(error, ValueError) and (building or raised_here):
        return first_sentence(error)
    if isinstance(error, OSError) or (building and isinstance(error, _SETUP_ERRORS)):
        said = (
            first_sentence(error)
            or f"line {frame.f_lineno} of {frame.f_globals.get('__name__')}"
        )
        return f"{type(error).__name__}: {said}; {TRACEBACK_OPTION} shows where"
    return None


def is_first_of_node() -> bool:
    """Return whether this process is the first that its launcher has started."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def first_of_node_logs(init_logger: Callable[[], None]) -> Callable[[], None]:
    """Return ``init_logger`` for a node whose other ranks log warnings alone.

    What all ranks say alike would else follow an error's one line.
    """

    def init() -> None:
        init_logger()
        if not is_first_of_node():
            logging.getLogger().setLevel(logging.WARNING)

    return init


def tell_launcher(text: str) -> None:
    """Leave ``text`` where torchrun reads why a rank failed, in place of the stack of some 70 lines of torchtitan."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        details = {"py_callstack": text, "timestamp": str(int(time.time()))}
        Path(path).write_text(
            json.dumps({"message": {"message": text, "extraInfo": details}})
        )
