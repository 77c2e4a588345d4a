# SPDX-License-Identifier: BSD-3-Clause
"""A machine compiles the planner once, and nothing is compiled after that."""

import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import filelock
import pytest
from hypothesis import given

from tests.lib.waiting import eventually
from tests.planning.test_properties import problems
from torchtitan_cad.planning import (
    AttentionShape,
    PlannerConfig,
    TokenLayout,
    compile_once,
    jit,
    make_plan,
    place_and_plan,
    warm_up,
)
from torchtitan_cad.planning import plan as plans
from torchtitan_cad.planning.placement.place import warm_up_placement


@pytest.mark.matrix
def test_nothing_compiles_after_warm_up():
    warm_up()
    assert compile_once.is_compiled()
    # Placement's are loaded where they are first used.
    assert {len(entry.signatures) for entry in jit.entry_points()} <= {0, 1}
    place_and_plan(LAYOUT, SHAPE)
    before = [list(entry.signatures) for entry in jit.entry_points()]

    @given(problem=problems())
    def plan(problem):
        layout, config = problem
        make_plan(layout, SHAPE, config).exchange(0)
        place_and_plan(layout, SHAPE, config)

    plan()
    assert [list(entry.signatures) for entry in jit.entry_points()] == before


LAYOUT = TokenLayout.from_segments(
    [[(0, 0, 5000)], [(0, 5000, 1000), (1, 0, 300), (2, 0, 3700)], [(3, 0, 2048)], []]
)
SHAPE = AttentionShape(8, 2, 64, 2)


def fingerprints():
    plans = [
        make_plan(LAYOUT, SHAPE, PlannerConfig(split_kv=split_kv))
        for split_kv in (True, False)
    ]
    assert all(plan.moves_rows for plan in plans)
    return [plan.fingerprint() for plan in plans]


PLAN_IN_PYTHON = """
import sys

error = {error}

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name == "numba":
            raise error("newer numpy")

if error:
    sys.meta_path.insert(0, Refused())
from tests.planning.test_compilation import fingerprints, jit
print(*fingerprints(), jit.is_plain_python())
"""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("SystemError", "numba cannot be imported (SystemError: newer numpy)"),
        ("None", "NUMBA_DISABLE_JIT is set"),
    ],
)
def test_other_processes_make_the_same_plans_without_numba(error, reason):
    environment = {"NUMBA_DISABLE_JIT": "1"} if error == "None" else {}
    slow = subprocess.run(
        [sys.executable, "-c", PLAN_IN_PYTHON.format(error=error)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment, "PYTHONHASHSEED": "4711"},
    )
    assert slow.returncode == 0, slow.stderr
    assert slow.stdout.split() == [*fingerprints(), "True"]
    (warning,) = slow.stderr.splitlines()
    assert warning == f"planning is slow: Python runs it, as {reason}"


def nothing(): ...


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache folder with nothing in it, and short waits."""
    monkeypatch.setattr(compile_once, "_cache_folder", lambda: tmp_path)
    monkeypatch.setattr(compile_once, "entry_points", list)
    monkeypatch.setattr(compile_once, "PATIENCE_S", 0.05)
    return tmp_path


def test_a_job_is_told_of_compiling(folder, monkeypatch):
    monkeypatch.setattr(plans, "_loaded", False)
    lines = []
    warm_up_placement(lines.append)
    assert [line.split()[0] for line in lines] == ["compiling", "compiled"]
    assert compile_once.is_compiled()


def test_one_compiles_while_others_wait(folder):
    lines = []
    ran = []

    def compile_all():
        ran.append(1)
        eventually(lambda: len(lines) >= 4)  # the others have said that they wait

    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(compile_once.compile_once, compile_all, lines.append)
    assert ran == [1]
    said = Counter(line.split()[0] for line in lines)
    assert said == {"compiling": 1, "compiled": 1, "waiting": 3}
    compile_once.compile_once(compile_all, lines.append)
    assert ran == [1]
    assert len(lines) == 5


@pytest.mark.parametrize("trouble", ["no folder", "not a folder", "locked for long"])
def test_a_process_compiles_for_itself_where_nothing_can_be_kept(
    folder, monkeypatch, trouble
):
    paths = {"no folder": None, "not a folder": folder / "planner.lock"}
    path = paths.get(trouble, folder)
    monkeypatch.setattr(compile_once, "_cache_folder", lambda: path)
    monkeypatch.setattr(compile_once, "LOCK_S", 0.2)
    lines = []
    with filelock.FileLock(folder / "planner.lock"):
        compile_once.compile_once(nothing, lines.append)
    where = "in every process" if path is None else "in this process"
    assert lines[-1].startswith(f"compiling the planner {where}")
    assert not compile_once.is_compiled()


def test_code_of_older_sources_is_forgotten(folder, monkeypatch):
    """numba itself looks at the file of the entry point only, not at those of the functions compiled into it."""
    source = folder / "callee.py"
    source.write_text("1")
    times = source.stat()
    stats = SimpleNamespace(cache_path=str(folder))
    entry = SimpleNamespace(py_func=make_plan, stats=stats)
    monkeypatch.setattr(compile_once, "entry_points", lambda: [entry])
    monkeypatch.setattr(compile_once, "_SOURCES", folder)
    index = folder / "plan.make_plan-190.py311.nbi"
    was_there = []

    def compile_all():
        was_there.append(index.exists())
        index.touch()

    for _ in range(2):
        compile_once.compile_once(compile_all, [].append)
        assert compile_once.is_compiled()
        assert index.exists()
    source.write_text("2")  # of the same size, and installed with the same time
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert not compile_once.is_compiled()
    compile_once.compile_once(compile_all, [].append)
    assert was_there == [False, False]
    assert compile_once.is_compiled()
