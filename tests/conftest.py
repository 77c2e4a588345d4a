# SPDX-License-Identifier: BSD-3-Clause
"""Shared by all tests: how many examples are drawn, the time that a run may take, and refusals of commands."""

import inspect
import time
from collections.abc import Callable
from datetime import date
from multiprocessing import forkserver
from threading import Thread

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.lib.cpp import build, find_compiler
from tests.lib.ledger import SOURCE
from tests.lib.refusals import PROSE

# Times of examples say nothing here: the first one may compile, and other processes run beside.
COMMON = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
    "print_blob": True,
}
settings.register_profile("short", max_examples=50, derandomize=True, **COMMON)
settings.register_profile("quick", max_examples=10, derandomize=True, **COMMON)
settings.register_profile("all", max_examples=300, **COMMON)
settings.load_profile("short")  # unless pytest is given --hypothesis-profile


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--minutes",
        type=float,
        help="skip the tests that would begin later than this; as a start, another file every day",
    )
    parser.addoption(
        "--write-errors",
        action="store_true",
        help="write tests/golden/errors.txt again; without -n",
    )


def pytest_configure(config: pytest.Config) -> None:
    # of the processes of pytest-xdist, each has a core
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)
    PROSE.is_written = config.getoption("--write-errors")
    PROSE.read()
    minutes = config.getoption("--minutes")
    if minutes is not None:
        config.pluginmanager.register(Budget(minutes))


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave only tests that meet errors, if these are to be written."""
    if PROSE.is_written:
        items[:] = [
            item for item in items if "refus" in inspect.getsource(item.function)
        ]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the servers of ranks, which import what they need while other tests run, and a compiler likewise."""
    if session.config.option.collectonly:
        return
    if PROSE.is_written:
        files = {item.location[0] for item in session.items}
        PROSE.forget({file.removeprefix("tests/") for file in files})
    if (
        any("test_stream_order.py" in item.nodeid for item in session.items)
        and find_compiler()
    ):
        Thread(target=build, args=(SOURCE,), daemon=True).start()
    if any("test_cad.py" in item.nodeid for item in session.items):
        from tests.lib.jobs.harness import start_server

        start_server()
        forkserver.ensure_running()


def pytest_sessionfinish() -> None:
    if PROSE.is_written:
        PROSE.write()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    PROSE.begin(item)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs ``torchtitan-cad`` with arguments that it must refuse, and returns the one line that says why."""
    from torchtitan_cad.tools.main import USER_ERROR, main

    def run(*argv):
        assert main(list(argv)) == USER_ERROR
        captured = capsys.readouterr()
        (line,) = captured.err.splitlines()
        assert captured.out == ""
        assert line.startswith("torchtitan-cad: error: ")
        PROSE.told(line)
        return line

    return run


class Budget:
    """Skips what would begin later than ``minutes`` from now.

    The order of files rotates by the day: what does not fit into one day's budget does on another.
    """

    def __init__(self, minutes: float) -> None:
        self.minutes, self.end = minutes, time.monotonic() + 60 * minutes

    @pytest.hookimpl(trylast=True)  # of what -m has left
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        files = list(dict.fromkeys(item.path for item in items))
        day = date.today().toordinal()
        items.sort(key=lambda item: (files.index(item.path) - day) % len(files))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if time.monotonic() > self.end:
            pytest.skip(f"the budget of {self.minutes:g} minutes (--minutes) is spent")
