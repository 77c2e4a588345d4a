"""Planted faults (tests/mutations.py) fit the package, and the matrix takes no longer than it may (conftest.py)."""

import subprocess
import sys

import pytest

from tests.mutations import FAULTS, PACKAGE, REPOSITORY, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_what_a_fault_replaces_is_there(fault: Fault) -> None:
    text = (REPOSITORY / PACKAGE / fault.file).read_text()
    assert text.count(fault.old) == 1
    compile(text.replace(fault.old, fault.new), fault.file, "exec")
    assert all((REPOSITORY / "tests" / test).exists() for test in fault.tests)


def test_what_does_not_fit_into_the_minutes_is_skipped_and_says_so() -> None:
    options = ["-p", "no:cacheprovider", "--minutes=0", "tests/planning/test_exchange.py"]
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert "the budget of 0 minutes (--minutes) is spent" in done.stdout
    assert " skipped" in done.stdout.splitlines()[-1]
    assert "passed" not in done.stdout.splitlines()[-1]
