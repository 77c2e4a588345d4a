# SPDX-License-Identifier: BSD-3-Clause
"""Planted faults fit the package, the matrix takes no longer than it may, and budgets of lines are kept."""

from pathlib import Path

import pytest

from tests.budgets import problems
from tests.conftest import Budget
from tests.mutations import FAULTS, PACKAGE, REPOSITORY, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_what_a_fault_replaces_is_there(fault: Fault) -> None:
    text = (REPOSITORY / PACKAGE / fault.file).read_text()
    assert text.count(fault.old) == 1
    compile(text.replace(fault.old, fault.new), fault.file, "exec")
    assert all((REPOSITORY / "tests" / test).exists() for test in fault.tests)


def test_what_does_not_fit_into_the_minutes_is_skipped_and_says_so() -> None:
    with pytest.raises(pytest.skip.Exception, match=r"the budget of 0 minutes \(--minutes\) is spent"):
        Budget(0).pytest_runtest_setup()
    Budget(1).pytest_runtest_setup()


def test_what_exceeds_its_budget_is_said(tmp_path: Path) -> None:
    package, budgets = tmp_path / "package", tmp_path / "budgets.toml"
    for path, text in ((package / "room" / "__init__.py", ""), (tmp_path / "beside" / "script.py", "pass\n" * 4)):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    body = "    pass\n" * 9
    (package / "room" / "long.py").write_text(f"def plain():\n{body}\n\n@jit\ndef compiled():\n{body}")

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
