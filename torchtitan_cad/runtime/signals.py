# SPDX-License-Identifier: BSD-3-Clause
"""Ending a process on a signal, even while its main thread waits in C++.

Python runs signal handlers in the main thread between bytecodes, so not while that thread waits for a peer in C++. But
the interpreter also writes the signal's number into a file descriptor at once, and a thread can read it.
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.util import register_after_fork
from typing import NoReturn

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_OF_NOBODY = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)
"""Handlers that a process begins with."""
_EXIT_CODE = 128
_DONE = 0
"""byte in the pipe that ends the watching thread; other bytes are numbers of signals"""
_POLL_S = 0.5


@contextmanager
def ending_on_signals(
    before_end: Callable[[str], None], limit_s: float, parent: int = 0
) -> Iterator[None]:
    """End the process on SIGTERM and SIGINT in this context, with exit code 128 + signal number.

    First, ``before_end(name of the signal)`` runs in a thread for at most ``limit_s``. If ``parent`` is not 0, the end
    of that process counts as SIGTERM. Daemons of multiprocessing that are forked in this context end with this process
    even if it is killed. The context does nothing outside the main thread, as other threads cannot set handlers.

    A signal that has a handler of the program's own, such as one for preemption, is left to that handler.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    numbers = [number for number in SIGNALS if signal.getsignal(number) in _OF_NOBODY]
    for number in set(SIGNALS).difference(numbers):
        logger.info(
            f"{number.name} is left to the handler that it had before training, and does not end this process"
        )
    thread = threading.Thread(
        target=_watch,
        args=(reader, numbers, before_end, limit_s, parent),
        name="cad-signals",
        daemon=True,
    )
    thread.start()
    register_after_fork(thread, lambda _: _detach(numbers))
    handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.write(writer, bytes([_DONE]))
        os.close(writer)
        thread.join(limit_s)  # an earlier signal still ends the process


def end_at_once(code: int) -> NoReturn:
    """End this process with an exit code, without waiting for threads or process groups.

    Also ends the daemons of ``multiprocessing``, such as data-loading workers.
    """
    try:
        for child in multiprocessing.active_children():
            if child.daemon:
                child.terminate()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _watch(
    reader: int,
    numbers: Sequence[int],
    before_end: Callable[[str], None],
    limit_s: float,
    parent: int,
) -> None:
    number: int | None = None
    while number not in (*numbers, _DONE):
        if wait([reader], _POLL_S if parent else None):
            number = os.read(reader, 1)[0]
        elif os.getppid() != parent:
            number = signal.SIGTERM
            break
    if number:
        thread = threading.Thread(
            target=before_end, args=(signal.Signals(number).name,), daemon=True
        )
        thread.start()
        thread.join(limit_s)
        end_at_once(_EXIT_CODE + number)
    os.close(reader)


def _detach(numbers: Sequence[int]) -> None:
    """Detach a forked child from the parent's pipe and handlers, and end a daemon with its parent.

    A daemon holds the parent's connections open, so peers notice the parent's end only after the daemon's end. torch's
    workers check for their parent, but wait forever if nobody reads the loaded data.
    """
    signal.set_wakeup_fd(-1)
    for number in numbers:
        signal.signal(
            number,
            signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL,
        )
    parent = multiprocessing.parent_process()
    if parent is not None and multiprocessing.current_process().daemon:

        def follow() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=follow, name="cad-parent", daemon=True).start()
