"""Ends a job that fails with one line that says why, in place of tracebacks of all ranks."""

import json
import logging
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from logging.handlers import MemoryHandler
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from torchtitan_cad.runtime.errors import PeerError, first_sentence

TRACEBACK_OPTION = "--cad.traceback"

_HELD_RECORDS, _HELD_S = 10_000, 30.0
_OTHER_NODES_WAIT_S = 3.0
_OTHER_RANKS_WAIT_S = 6.0
_INTERRUPTED = 130
_SETUP_ERRORS = (ValueError, OSError, NotImplementedError, AssertionError, ImportError, RecursionError)


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the message names the folder, the reason and the remedy."""

    def __init__(self, folder: str, error: CheckpointException) -> None:
        rank, (cause, _) = min(error.failures.items())
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else first_sentence(cause)
        # A writer's own complaint often hides that the disk is full.
        free = f", {shutil.disk_usage(folder).free / 1e6:,.0f} MB are free there" if os.path.isdir(folder) else ""
        super().__init__(
            f"a checkpoint in {folder} could not be written or read by rank {rank}{free}: {reason}; make room, or set "
            "checkpoint.folder or job.dump_folder to another disk, and start again: the job resumes from the last "
            "checkpoint that is complete"
        )


@dataclass
class Progress:
    """Stage that the job has reached."""

    building: bool = True
    """The config is being read or the trainer built: what is wrong now is most likely the user's input."""
    traceback: bool = False
    """The config asks for stacks."""


class HeldLog:
    """Holds back what a rank logs while the job is built, unless it is the first one of its node.

    All ranks log the same then, and an error's one line would stand below as many copies as there are ranks. What is
    held comes with ``release``, with an error, with a traceback, and after 30 s: it shows where a rank hangs. It does
    not come where one line says why the job has ended.
    """

    def __init__(self) -> None:
        self._held: tuple[logging.Handler, MemoryHandler] | None = None

    def hold(self) -> None:
        """Hold what the root logger's first handler, which is there, would get."""
        if os.environ.get("LOCAL_RANK", "0") == "0":
            return
        root = logging.getLogger()
        handler = root.handlers[0]
        self._held = handler, MemoryHandler(_HELD_RECORDS, flushLevel=logging.ERROR, target=handler)
        root.handlers[0] = self._held[1]
        timer = threading.Timer(_HELD_S, self.release)
        timer.daemon = True
        timer.start()

    def release(self) -> None:
        """Log what is held, and from now on at once."""
        if self._held is not None:
            (handler, memory), root = self._held, logging.getLogger()
            root.handlers = [handler if other is memory else other for other in root.handlers]
            memory.close()


@contextmanager
def one_line_errors(args: Sequence[str]) -> Iterator[Progress]:
    """End the process with one line on stderr where an error explains itself; other errors pass.

    The exit code is 2 if the job has not begun to train, 1 afterwards. ``--cad.traceback`` among ``args`` lets every
    error pass.
    """
    progress = Progress()
    try:
        yield progress
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except Exception as error:
        text = explain(error, progress)
        if text is None or progress.traceback or TRACEBACK_OPTION in args:
            raise
        if not isinstance(error, PeerError):  # which every rank has reasons of its own for
            _leave_it_to_rank_0()
        report(error, text)
        tell_launcher(text)
        sys.exit(2 if progress.building else 1)


def report(error: BaseException, text: str) -> None:
    """Print the line of an error; only once, however far the error travels."""
    if not getattr(error, "cad_reported", False):
        print(f"error: {text}", file=sys.stderr, flush=True)
        error.cad_reported = True  # type: ignore[attr-defined]


def explain(error: BaseException, progress: Progress) -> str | None:
    """Say in one line what went wrong and what to do; None if the error looks like a bug, which needs its stack."""
    if isinstance(error, PeerError | CheckpointError):
        return first_sentence(error)
    raised_here = _raised_by_this_package(error)
    if isinstance(error, ValueError) and (progress.building or raised_here):
        return first_sentence(error)
    if isinstance(error, OSError) or (progress.building and isinstance(error, _SETUP_ERRORS)):
        return f"{type(error).__name__}: {first_sentence(error)}; {TRACEBACK_OPTION} shows where"
    return None


def _raised_by_this_package(error: BaseException) -> bool:
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].startswith("torchtitan_cad")


def _leave_it_to_rank_0() -> None:
    """Let rank 0 say at once what all ranks have met, most likely, and end: then its launcher ends the others.

    Whoever still lives after a while may be the only one that met the error.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(_OTHER_NODES_WAIT_S if os.environ.get("LOCAL_RANK") == "0" else _OTHER_RANKS_WAIT_S)


def tell_launcher(text: str) -> None:
    """Leave ``text`` where torchrun reads what a failed rank says, by default a traceback."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        details = {"py_callstack": text, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": details}}))
