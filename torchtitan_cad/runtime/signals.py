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
from multiprocessing.util import register_after_fork
from typing import NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_EXIT_CODE = 128
_END = b"\0"
"""In the pipe, where other bytes are numbers of signals. Closing it ends nothing: a child may hold it open."""

_pipe: tuple[int, int] | None = None
"""Both ends, while this process is in ``ending_on_signals``."""


@contextmanager
def ending_on_signals(last_words: Callable[[str], None], limit_s: float) -> Iterator[None]:
    """Let SIGTERM and SIGINT in this context end the process, with exit code 128 + signal number.

    Before that ``last_words(name of the signal)`` runs in a thread, for at most ``limit_s``. Daemons of multiprocessing
    that are forked here end with this process even if it is killed. Does nothing in a thread other than the main one,
    which alone may change what signals do.
    """
    global _pipe
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = _pipe = os.pipe()
    os.set_blocking(writer, False)
    thread = threading.Thread(target=_watch, args=(reader, last_words, limit_s), name="cad-signals", daemon=True)
    thread.start()
    register_after_fork(thread, _follow_parent)
    handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if _pipe is not None:  # it is None in a forked child
            _pipe = None
            os.write(writer, _END)
            os.close(writer)
            thread.join(limit_s)  # a signal that came before has the last word


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


def _watch(reader: int, last_words: Callable[[str], None], limit_s: float) -> None:
    while number := os.read(reader, 1)[0]:
        if number in SIGNALS:
            words = threading.Thread(target=last_words, args=(signal.Signals(number).name,), daemon=True)
            words.start()
            words.join(limit_s)
            end_at_once(_EXIT_CODE + number)
    os.close(reader)


def _follow_parent(_: threading.Thread) -> None:
    """End with the parent: until then a child holds connections open that tell its peers that it is gone.

    torch's workers look for it, but wait for ever if there is nobody to read what they have loaded.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and multiprocessing.current_process().daemon:

        def follow() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=follow, name="cad-parent", daemon=True).start()


def _hold_in_fork() -> None:
    """Signals to a child that has not got its own handlers yet must wait for them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _restore_in_child() -> None:
    """Keep a forked process from writing its signals into its parent's pipe, and from holding that open."""
    global _pipe
    if _pipe is not None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for end in _pipe:
            os.close(end)
        _pipe = None
    _release()


os.register_at_fork(before=_hold_in_fork, after_in_parent=_release, after_in_child=_restore_in_child)
