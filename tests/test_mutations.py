"""The planted faults of ``tests/mutations.py`` fit the package; finding them takes longer: ``make mutations``."""

import pytest

from tests.mutations import FAULTS, PACKAGE, REPOSITORY, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_what_a_fault_replaces_is_there(fault: Fault) -> None:
    text = (REPOSITORY / PACKAGE / fault.file).read_text()
    assert text.count(fault.old) == 1
    compile(text.replace(fault.old, fault.new), fault.file, "exec")
    assert all((REPOSITORY / "tests" / test).exists() for test in fault.tests)
