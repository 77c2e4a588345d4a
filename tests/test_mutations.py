# SPDX-License-Identifier: BSD-3-Clause
"""Planted faults fit the package, and the matrix takes no longer than it may."""

import pytest

from tests.conftest import Budget
from tests.mutations import FAULTS, PACKAGE, REPOSITORY


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_what_a_fault_replaces_is_there(fault):
    text = (REPOSITORY / PACKAGE / fault.file).read_text()
    assert text.count(fault.old) == 1
    compile(text.replace(fault.old, fault.new), fault.file, "exec")
    assert all((REPOSITORY / "tests" / test).exists() for test in fault.tests)


def test_what_does_not_fit_into_the_minutes_is_skipped_and_says_so():
    with pytest.raises(
        pytest.skip.Exception, match=r"the budget of 0 minutes \(--minutes\) is spent"
    ):
        Budget(0).pytest_runtest_setup()
    Budget(1).pytest_runtest_setup()
