# SPDX-License-Identifier: BSD-3-Clause
"""Parts of bench.gpu that go wrong in every way, for tests."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench.gpu.parts import Skip


def good(device, emit, *arguments):
    emit("figure", 1)
    emit("figure", [device, *arguments])


def bad(device, emit):
    emit("figure", 1)
    raise RuntimeError("it went wrong")


def crash(device, emit):
    emit("figure", 1)
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(device, emit, pid_file):
    """With a process of its own that would outlive it."""
    emit("figure", 1)
    emit("running", "tests/test_of_something.py::test_that_hangs")
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(pid_file).write_text(str(sleeper.pid))
    time.sleep(600)


class InterpreterError(Exception):
    """As Triton's."""


def interpreted(device, emit, message):
    raise InterpreterError(message)


def unable(device, emit):
    raise Skip("there is no such thing here")


def posts_too_early(device, emit):
    """The litmus test of ``bench.gpu.ordering`` with the word of a round before its rows."""
    from bench.gpu import ordering

    class Reversed(ordering.Litmus):
        def send(self, number):
            self.post(number)
            time.sleep(0.3)  # in which the test looks
            self.put(number)

    ordering.measure(device, emit, Reversed)
