# SPDX-License-Identifier: BSD-3-Clause
"""A machine compiles the planner once, and nothing is compiled after that."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import filelock
import pytest

from tests.lib.costs import concave_cost
from tests.lib.layouts import FAMILIES, LLAMA, Case
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

OPTIONS = (
    {},
    {"planner": "greedy"},
    {"split_kv": False},
    {"rank_speeds": (1.0, 0.5, 0.9, 1.0, 1.0, 1.0)},
    {"ranks_per_node": 2},
)


@pytest.mark.matrix
def test_nothing_compiles_after_warm_up():
    warm_up()
    assert compile_once.is_compiled()
    # Placement's and the greedy planner's are loaded where they are first used.
    assert {len(entry.signatures) for entry in jit.entry_points()} <= {0, 1}
    place_and_plan(Case("spanning", 6, 2000, 128, 0.02, 128, 0).layout(), LLAMA)
    make_plan(
        Case("spanning", 6, 2000, 128, 0.02, 128, 0).layout(),
        LLAMA,
        PlannerConfig(planner="greedy"),
    )
    before = [list(entry.signatures) for entry in jit.entry_points()]
    for seed, family in enumerate(FAMILIES):
        for number, options in enumerate(OPTIONS):
            case = Case(
                family,
                6,
                (60, 2000)[seed % 2],
                (128, 1, 100)[number % 3],
                0.02,
                (128, 64)[seed % 2],
                seed,
            )
            config = dataclasses.replace(case.config, **options)
            cost = concave_cost(3.0) if number % 3 == 0 and seed % 3 == 0 else None
            make_plan(case.layout(), LLAMA, config, cost).exchange(number % 6)
            if number == seed % len(OPTIONS):
                place_and_plan(case.layout(), LLAMA, config, cost)
    assert [list(entry.signatures) for entry in jit.entry_points()] == before


PLAN_IN_PYTHON = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name == "numba" and {refused}:
            raise {error}

sys.meta_path.insert(0, Refused())
from torchtitan_cad.planning import AttentionShape, PlannerConfig, TokenLayout, jit, make_plan
layout = TokenLayout.from_segments({segments})
for planner in ("{planners}".split()):
    plan = make_plan(layout, AttentionShape(8, 2, 64, 2), PlannerConfig(planner=planner))
    print(plan.fingerprint(), jit.is_plain_python())
"""


@pytest.mark.parametrize(
    ("error", "environment", "reason"),
    [
        (
            "ImportError('newer numpy')",
            {},
            "numba cannot be imported (ImportError: newer numpy)",
        ),
        (
            "SystemError('newer numpy')",
            {},
            "numba cannot be imported (SystemError: newer numpy)",
        ),
        ("", {"NUMBA_DISABLE_JIT": "1"}, "NUMBA_DISABLE_JIT is set"),
    ],
)
def test_python_makes_the_same_plans_without_numba(error, environment, reason):
    planners = "local_search", "greedy"
    segments = [
        [(0, 0, 5000)],
        [(0, 5000, 1000), (1, 0, 300), (2, 0, 3700)],
        [(3, 0, 2048)],
        [],
    ]
    code = PLAN_IN_PYTHON.format(
        refused=bool(error), error=error, segments=segments, planners=" ".join(planners)
    )
    command = [sys.executable, "-c", code]
    slow = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )
    assert slow.returncode == 0, slow.stderr
    layout = TokenLayout.from_segments(segments)
    plans = [
        make_plan(layout, AttentionShape(8, 2, 64, 2), PlannerConfig(planner=planner))
        for planner in planners
    ]
    assert all(plan.moves_rows for plan in plans)
    assert slow.stdout.split() == [
        word for plan in plans for word in (plan.fingerprint(), "True")
    ]
    (warning,) = slow.stderr.splitlines()
    assert warning == f"planning is slow: Python runs it, as {reason}"


def nothing() -> None: ...


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache folder with nothing in it, and short waits."""
    monkeypatch.setattr(compile_once, "_cache_folder", lambda: tmp_path)
    monkeypatch.setattr(compile_once, "entry_points", list)
    monkeypatch.setattr(compile_once, "PATIENCE_S", 0.05)
    return tmp_path


def test_a_job_is_told_of_compiling(folder, monkeypatch):
    monkeypatch.setattr(plans, "_loaded", False)
    lines: list[str] = []
    warm_up_placement(lines.append)
    assert [line.split()[0] for line in lines] == ["compiling", "compiled"]
    assert compile_once.is_compiled()


def test_one_compiles_while_others_wait(folder):
    lines: list[str] = []
    ran: list[int] = []

    def compile_all() -> None:
        ran.append(1)
        deadline = time.monotonic() + 30
        # the others have said that they wait
        while len(lines) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)

    threads = [
        threading.Thread(
            target=compile_once.compile_once, args=(compile_all, lines.append)
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert ran == [1]
    assert sorted(line.split()[0] for line in lines) == [
        "compiled",
        "compiling",
        "waiting",
        "waiting",
        "waiting",
    ]
    compile_once.compile_once(compile_all, lines.append)
    assert ran == [1]
    assert len(lines) == 5


def test_a_process_that_dies_while_compiling_holds_nobody_up(folder):
    code = "import sys, time, filelock\nwith filelock.FileLock(sys.argv[1]): print('held', flush=True); time.sleep(99)"
    command = [sys.executable, "-c", code, str(folder / "planner.lock")]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    lines: list[str] = []
    thread = threading.Thread(
        target=compile_once.compile_once, args=(nothing, lines.append)
    )
    thread.start()
    while not lines:  # it waits
        time.sleep(0.01)
    os.kill(holder.pid, signal.SIGKILL)
    holder.communicate()
    thread.join(timeout=30)
    assert [line.split()[0] for line in lines] == ["waiting", "compiling", "compiled"]


@pytest.mark.parametrize("trouble", ["no folder", "not a folder", "locked for long"])
def test_a_process_compiles_for_itself_where_nothing_can_be_kept(
    folder, monkeypatch, trouble
):
    path = {"no folder": None, "not a folder": folder / "planner.lock"}.get(
        trouble, folder
    )
    monkeypatch.setattr(compile_once, "_cache_folder", lambda: path)
    monkeypatch.setattr(compile_once, "LOCK_S", 0.2)
    lines: list[str] = []
    with filelock.FileLock(folder / "planner.lock"):
        compile_once.compile_once(nothing, lines.append)
    own = (
        "compiling the planner in every process"
        if path is None
        else "compiling the planner in this process"
    )
    assert lines[-1].startswith(own)
    assert not compile_once.is_compiled()


def test_code_of_older_sources_is_forgotten(folder, monkeypatch):
    """numba itself looks at the file of the entry point only, not at those of the functions compiled into it."""
    source = folder / "callee.py"
    source.write_text("1")
    times = source.stat()
    entry = SimpleNamespace(
        py_func=make_plan, stats=SimpleNamespace(cache_path=str(folder))
    )
    monkeypatch.setattr(compile_once, "entry_points", lambda: [entry])
    monkeypatch.setattr(compile_once, "source_files", lambda: [str(source)])
    index: Path = folder / "plan.make_plan-190.py311.nbi"
    seen: list[bool] = []

    def compile_all() -> None:
        seen.append(index.exists())
        index.touch()

    compile_once.compile_once(compile_all, [].append)
    assert compile_once.is_compiled()
    first = list(folder.glob("*.ready"))
    compile_once.compile_once(compile_all, [].append)
    assert index.exists()
    source.write_text("2")  # of the same size, and installed with the same time
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert not compile_once.is_compiled()
    compile_once.compile_once(compile_all, [].append)
    assert seen == [False, False]
    assert len(first) == 1
    assert list(folder.glob("*.ready")) != first
