# SPDX-License-Identifier: BSD-3-Clause
"""Parts of bench.gpu that go wrong in every way, for tests."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench.gpu.parts import Emit, Skip


def good(device: str, emit: Emit, *arguments: str) -> None:
    emit("figure", 1)
    emit("figure", [device, *arguments])


def bad(device: str, emit: Emit) -> None:
    emit("figure", 1)
    raise RuntimeError("it went wrong")


def crash(device: str, emit: Emit) -> None:
    emit("figure", 1)
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(device: str, emit: Emit, pid_file: str) -> None:
    """With a process of its own that would outlive it."""
    emit("figure", 1)
    emit("running", "tests/test_of_something.py::test_that_hangs")
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(pid_file).write_text(str(sleeper.pid))
    time.sleep(600)


class InterpreterError(Exception):
    """As Triton's."""


def interpreted(device: str, emit: Emit, message: str) -> None:
    raise InterpreterError(message)


def unable(device: str, emit: Emit) -> None:
    raise Skip("there is no such thing here")


def posts_too_early(device: str, emit: Emit) -> None:
    """The litmus test of ``bench.gpu.ordering`` with the word of a round before its rows."""
    from bench.gpu import ordering

    class Reversed(ordering.Litmus):
        def send(self, number):
            self.post(number)
            time.sleep(0.3)  # in which the test looks
            self.put(number)

    ordering.measure(device, emit, Reversed)
