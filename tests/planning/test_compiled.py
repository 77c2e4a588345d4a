"""Whether the planner's compiled code is in the cache."""

import importlib.util
import sys
from pathlib import Path

import pytest

from torchtitan_cad.planning import warm_up
from torchtitan_cad.planning.compiled import missing_code

SOURCE = """
from torchtitan_cad.planning.jit import jit

@jit
def twice(x):
    return 2 * x
"""


def test_what_was_compiled_is_cached_and_what_was_not_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_up()
    assert missing_code() == 0
    path, name = tmp_path / "planner.py", "torchtitan_cad.planning.planners.new"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    assert missing_code() == 1
    assert module.twice(3) == 6
    assert missing_code() == 0
