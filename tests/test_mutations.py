"""Planted faults fit the package, the matrix takes no longer than it may, and budgets of lines are kept."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.budgets import problems
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


def test_what_exceeds_its_budget_is_said(tmp_path: Path) -> None:
    package, beside = tmp_path / "package", tmp_path / "beside"
    room = package / "room"
    room.mkdir(parents=True)
    beside.mkdir()
    (beside / "script.py").write_text("pass\n" * 4)
    (room / "__init__.py").touch()
    body = "\n".join("    pass" for _ in range(9))
    (room / "long.py").write_text(f"def plain():\n{body}\n\n\n@jit\ndef compiled():\n{body}\n")
    budgets = tmp_path / "budgets.toml"

    def found(lines: int, file: int, function: int, more: str = "") -> list[str]:
        budgets.write_text(f"[rooms]\nroom = {lines}\n[most]\nfile = {file}\nfunction = {function}\nbeside = 3\n{more}")
        return list(problems(package, budgets))

    assert found(23, 23, 10) == []
    assert found(22, 23, 10) == ["room has 23 lines, 22 are its budget: take lines out of this room"]
    assert found(23, 22, 10) == ["room/long.py has 23 lines, at most 22 are allowed"]
    assert found(23, 23, 9) == ["room/long.py:plain has 10 lines, at most 9 are allowed"]
    assert found(23, 22, 9, '[larger]\n"room/long.py" = 23\n"room/long.py:plain" = 10\n') == []
    assert found(23, 23, 10, "[folders]\nbeside = 3\n") == [
        "beside has 4 lines, 3 are its budget: take lines out of this folder",
        "beside/script.py has 4 lines, at most 3 are allowed",
    ]
    budgets.write_text("[rooms]\n[most]\nfile = 30\nfunction = 30\n")
    assert list(problems(package, budgets)) == ["room has 23 lines, 0 are its budget: take lines out of this room"]
