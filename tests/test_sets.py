"""The time that the matrix may take."""

import subprocess
import sys

from tests.mutations import REPOSITORY


def test_what_does_not_fit_into_the_minutes_is_skipped_and_says_so() -> None:
    options = ["-p", "no:cacheprovider", "--minutes=0", "tests/planning/test_messages.py"]
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert "the budget of 0 minutes (--minutes) is spent" in done.stdout
    assert " skipped" in done.stdout.splitlines()[-1]
    assert "passed" not in done.stdout.splitlines()[-1]
