"""Ending a process in order when it is told to by a signal, whatever its main thread is doing.

Python runs signal handlers in the main thread, between bytecodes: not while that thread waits for a peer in C++. The
interpreter also writes the signal's number into a file descriptor at once, which a thread can read.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.util import register_after_fork
from typing import NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_EXIT_CODE = 128
_DONE = 0
"""In the pipe, where other bytes are numbers of signals."""
_POLL_S = 0.1


@contextmanager
def ending_on_signals(before_end: Callable[[str], None], limit_s: float, parent: int = 0) -> Iterator[None]:
    """Let SIGTERM and SIGINT in this context end the process, with exit code 128 + signal number.

    Before that ``before_end(name of the signal)`` runs in a thread, for at most ``limit_s``. The end of the process
    ``parent``, unless that is 0, counts as SIGTERM. Daemons of multiprocessing that are forked here end with this
    process even if it is killed. Does nothing in a thread other than the main one, which alone may change handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    thread = threading.Thread(
        target=_watch, args=(reader, before_end, limit_s, parent), name="cad-signals", daemon=True
    )
    thread.start()
    register_after_fork(thread, _detach)
    handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.write(writer, bytes([_DONE]))
        os.close(writer)
        thread.join(limit_s)  # a signal that came before is still obeyed


def end_at_once(code: int) -> NoReturn:
    """End this process with an exit code, with threads and process groups as they are.

    Ends the processes that ``multiprocessing`` ends with the interpreter, too: those that load data.
    """
    try:
        for child in multiprocessing.active_children():
            if child.daemon:
                child.terminate()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _watch(reader: int, before_end: Callable[[str], None], limit_s: float, parent: int) -> None:
    number: int | None = None
    while number not in (*SIGNALS, _DONE):
        if wait([reader], _POLL_S if parent else None):
            number = os.read(reader, 1)[0]
        elif os.getppid() != parent:
            number = signal.SIGTERM
    if number:
        thread = threading.Thread(target=before_end, args=(signal.Signals(number).name,), daemon=True)
        thread.start()
        thread.join(limit_s)
        end_at_once(_EXIT_CODE + number)
    os.close(reader)


def _detach(_: threading.Thread) -> None:
    """In a forked child: keep its signals out of the parent's pipe, and let a daemon end with its parent.

    Until a daemon ends it holds connections open whose end tells peers that the parent is gone. torch's workers look
    for their parent, but wait for ever if there is nobody to read what they have loaded.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parent = multiprocessing.parent_process()
    if parent is not None and multiprocessing.current_process().daemon:

        def follow() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=follow, name="cad-parent", daemon=True).start()
