"""What numba compiles, and that a machine does it once."""

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

from tests.planning.costs import concave_cost
from tests.planning.layouts import FAMILIES, LLAMA, Case
from torchtitan_cad.planning import (
    AttentionShape,
    PlannerConfig,
    TokenLayout,
    compile_once,
    jit,
    make_plan,
    place,
    warm_up,
)
from torchtitan_cad.planning import plan as plans
from torchtitan_cad.planning.model.limits import CapacityError
from torchtitan_cad.planning.placement import place as placing

OPTIONS = (
    {},
    {"planner": "greedy"},
    {"split_kv": False},
    {"rank_speeds": (1.0, 0.5, 0.9, 1.0, 1.0, 1.0)},
    {"max_recv_keys": 3000},
    {"max_recv_queries": (2000,) * 6, "max_recv_keys": (4000,) * 6},
    {"ranks_per_node": 2},
)


@pytest.mark.matrix
def test_nothing_compiles_after_warm_up():
    warm_up()
    assert compile_once.is_compiled()
    compiled = {entry.py_func.__name__: len(entry.signatures) for entry in jit.entry_points()}
    assert compiled.pop("_search") <= 1  # placement's, loaded where it is first used
    assert compiled == {
        "_fill_ranges": 1,
        "_fill_server": 1,
        "_assemble": 1,
        "_find": 1,
        "_hill_climb": 1,
        "_improve_each": 1,
    }
    place(Case("spanning", 6, 2000, 128, 0.02, 128, 0).layout(), LLAMA)
    before = [list(entry.signatures) for entry in jit.entry_points()]
    for seed, family in enumerate(FAMILIES):
        for number, options in enumerate(OPTIONS):
            case = Case(family, 6, (60, 2000)[seed % 2], (128, 1, 100)[number % 3], 0.02, (128, 64)[seed % 2], seed)
            config = dataclasses.replace(case.config, **options)
            cost = concave_cost(3.0) if number % 3 == 0 and seed % 3 == 0 else None
            try:
                plan = make_plan(case.layout(), LLAMA, config, cost)
            except CapacityError:
                continue
            plan.exchange(number % 6)
            if number == seed % len(OPTIONS):
                place(case.layout(), LLAMA, config, cost)
    assert [list(entry.signatures) for entry in jit.entry_points()] == before


@pytest.mark.slow
def test_processes_that_start_together_compile_once(tmp_path):
    code = "import sys; from torchtitan_cad.planning import warm_up; warm_up(lambda line: print(line, flush=True))"
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    starts = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    lines = sorted(line for start in starts for line in start.communicate(timeout=600)[0].splitlines())
    assert [start.returncode for start in starts] == [0, 0, 0]
    assert [line.split()[0] for line in lines] == ["compiled", "compiling", "waiting", "waiting"]
    after = subprocess.run([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True, timeout=600)
    assert (after.returncode, after.stdout) == (0, "")


def test_every_entry_point_is_compiled_by_one_process():
    named = sorted(name for part in compile_once._parts for name in part.names)
    assert named == sorted(entry.py_func.__name__ for entry in jit.entry_points())


def test_a_process_compiles_its_part():
    index, part = next((i, part) for i, part in enumerate(compile_once._parts) if part.names == ("_improve_each",))
    code = "from torchtitan_cad.planning import compile_once, jit\n"
    code += f"compile_once.compile_part({index})\n"
    code += "print(*[entry.py_func.__name__ for entry in jit.entry_points() if entry.signatures])"
    warm_up()  # on disk: it only loads
    child = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=300)
    assert (child.returncode, child.stdout) == (0, f"{part.names[0]}\n")


COUNT = """
from numba.core.event import Listener, install_listener
from torchtitan_cad.planning import compile_once

class Counter(Listener):
    count = 0
    def on_start(self, event): self.count += 1
    def on_end(self, event): pass

counter = Counter()
with install_listener("numba:compile", counter):
    compile_once.compile_part({index})
print(counter.count)
"""
MOST_FUNCTIONS = (92, 56, 77)
"""Compiled by each process, for one signature each: entry points and all that they call."""


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(MOST_FUNCTIONS)))
def test_what_a_machine_compiles_once_does_not_grow(index, tmp_path):
    """The goal is 15 s on two idle cores. Seconds depend on what else a machine does; they follow what is compiled."""
    pytest.importorskip("numba")
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    code = COUNT.format(index=index)
    counted = subprocess.run([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True, timeout=600)
    assert counted.returncode == 0
    assert int(counted.stdout) <= MOST_FUNCTIONS[index]


ENTRY_AND_CALLEE = """
from numba.core import codegen
from torchtitan_cad.planning import compile_once, jit

done = []
steps = (codegen.CPUCodeLibrary, "_optimize_final_module"), (codegen.JITCodeLibrary, "_finalize_specific")
for holder, name in steps:
    def count(library, original=getattr(holder, name), name=name):
        done.append((name, library.name))
        original(library)
    setattr(holder, name, count)

def compile_both():
    callee = jit.jit_leaf(lambda value: value * value)

    @jit.numba.njit
    def entry(value):
        return callee(value) + 1

    jit._entries[:] = [entry]
    done.clear()
    assert entry(5) == 26
    for _, step in steps:
        assert any("entry" in library for name, library in done if name == step)
    return sum("lambda" in library for _, library in done)

print(compile_both())
with compile_once.entry_points_only():
    print(compile_both())
print(compile_both())
"""


def test_callees_become_machine_code_as_parts_of_their_entry_point():
    pytest.importorskip("numba")
    ran = subprocess.run([sys.executable, "-c", ENTRY_AND_CALLEE], stdout=subprocess.PIPE, text=True, timeout=300)
    assert (ran.returncode, ran.stdout.split()) == (0, ["2", "0", "2"])


def test_a_numba_that_optimizes_elsewhere_still_compiles(monkeypatch):
    codegen = pytest.importorskip("numba.core.codegen")
    monkeypatch.delattr(codegen.JITCPUCodegen, "set_env")
    optimize = codegen.CPUCodeLibrary._optimize_final_module
    with compile_once.entry_points_only():
        assert codegen.CPUCodeLibrary._optimize_final_module is optimize
        assert not hasattr(codegen.JITCPUCodegen, "set_env")


def test_python_runs_what_is_not_compiled_here_and_it_is_put_back():
    def called() -> list[object]:
        return [getattr(sys.modules[entry.py_func.__module__], entry.py_func.__name__) for entry in jit.entry_points()]

    chosen = "_improve_each"
    with jit.compiling(lambda name: name == chosen):
        inside = called()
    entries = jit.entry_points()
    assert inside == [entry if entry.py_func.__name__ == chosen else entry.py_func for entry in entries]
    assert called() == entries


PLAN_IN_PYTHON = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name == "numba":
            raise {error}

sys.meta_path.insert(0, Refused())
from torchtitan_cad.planning import AttentionShape, PlannerConfig, TokenLayout, jit, make_plan
layout = TokenLayout.from_segments({segments})
for planner in ("{planners}".split()):
    plan = make_plan(layout, AttentionShape(8, 2, 64, 2), PlannerConfig(planner=planner))
    print(plan.fingerprint(), jit.is_plain_python())
"""


@pytest.mark.parametrize("error", ["ImportError('newer numpy')", "SystemError('newer numpy')"])
def test_python_makes_the_same_plans_where_numba_cannot_be_imported(error):
    planners = "tiling", "greedy"
    segments = [[(0, 0, 5000)], [(0, 5000, 1000), (1, 0, 300), (2, 0, 3700)], [(3, 0, 2048)], []]
    code = PLAN_IN_PYTHON.format(error=error, segments=segments, planners=" ".join(planners))
    slow = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert slow.returncode == 0, slow.stderr
    layout = TokenLayout.from_segments(segments)
    plans = [make_plan(layout, AttentionShape(8, 2, 64, 2), PlannerConfig(planner=planner)) for planner in planners]
    assert all(plan.moves_rows for plan in plans)
    assert slow.stdout.split() == [word for plan in plans for word in (plan.fingerprint(), "True")]
    (warning,) = slow.stderr.splitlines()
    assert warning.startswith("planning is slow: Python runs it, as numba cannot be imported (")
    assert "newer numpy" in warning


def test_nothing_is_planned_to_load_what_python_runs(monkeypatch):
    def refuse() -> None:
        raise AssertionError

    monkeypatch.setattr(plans, "_loaded", False)
    for module, name in ((plans, "_plan_small_batches"), (placing, "_place_small_batch")):
        monkeypatch.setattr(module, name, refuse)
        monkeypatch.setattr(module, "is_plain_python", lambda: True)
    placing.warm_up_placement(pytest.fail)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache folder with nothing in it, nothing to compile, and short waits."""
    monkeypatch.setattr(compile_once, "_cache_folder", lambda: tmp_path)
    monkeypatch.setattr(compile_once, "entry_points", list)
    monkeypatch.setattr(compile_once, "_parts", [])
    monkeypatch.setattr(compile_once, "PATIENCE_S", 0.05)
    return tmp_path


def test_one_compiles_while_others_wait(folder, monkeypatch):
    lines: list[str] = []
    ran: list[int] = []

    def compile_parts() -> None:
        ran.append(1)
        deadline = time.monotonic() + 30
        while len(lines) < 4 and time.monotonic() < deadline:  # the others have said that they wait
            time.sleep(0.01)

    monkeypatch.setattr(compile_once, "_compile_parts", compile_parts)
    threads = [threading.Thread(target=compile_once.compile_once, args=(lines.append,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert ran == [1]
    assert sorted(line.split()[0] for line in lines) == ["compiled", "compiling", "waiting", "waiting", "waiting"]
    compile_once.compile_once(lines.append)
    assert ran == [1]
    assert len(lines) == 5


@pytest.mark.parametrize("end", ["fails", "hangs"])
def test_what_a_child_does_not_compile_this_process_does(folder, monkeypatch, end):
    ran: list[int] = []
    parts = [compile_once.Part((), lambda: ran.append(1))]
    monkeypatch.setattr(compile_once, "_parts", parts)
    started: list[subprocess.Popen[bytes]] = []

    def start_child(index: int) -> subprocess.Popen[bytes]:
        code = "raise IndexError" if end == "fails" else "import time; time.sleep(99)"
        started.append(subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL))
        return started[-1]

    monkeypatch.setattr(compile_once, "_start_child", start_child)
    monkeypatch.setattr(compile_once, "LOCK_S", 0.5 if end == "hangs" else 60.0)
    lines: list[str] = []
    compile_once.compile_once(lines.append)
    assert ran == [1]
    assert lines[-1].startswith("compiled the planner in ")
    assert started[0].poll() is not None
    assert compile_once.is_compiled()


def test_a_process_that_dies_while_compiling_holds_nobody_up(folder):
    code = (
        "import sys, time, filelock; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print('held', flush=True)"
    )
    code += "; time.sleep(99)"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(folder / "planner.lock")], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    lines: list[str] = []
    thread = threading.Thread(target=compile_once.compile_once, args=(lines.append,))
    thread.start()
    while not lines:  # it waits
        time.sleep(0.01)
    os.kill(holder.pid, signal.SIGKILL)
    holder.communicate()
    thread.join(timeout=30)
    assert [line.split()[0] for line in lines] == ["waiting", "compiling", "compiled"]


def test_the_wait_is_bounded(folder, monkeypatch):
    monkeypatch.setattr(compile_once, "LOCK_S", 0.2)
    lines: list[str] = []
    with filelock.FileLock(folder / "planner.lock"):
        compile_once.compile_once(lines.append)
    assert lines[-1].startswith("compiling the planner in this process, not once per machine: ")
    assert not compile_once.is_compiled()


def test_no_cache_folder(monkeypatch):
    monkeypatch.setattr(compile_once, "_cache_folder", lambda: None)
    lines: list[str] = []
    compile_once.compile_once(lines.append)
    (line,) = lines
    assert "set NUMBA_CACHE_DIR" in line
    assert not compile_once.is_compiled()


def test_code_of_older_sources_is_forgotten(folder, monkeypatch):
    """numba itself looks at the file of the entry point only, not at those of the functions compiled into it."""
    source = folder / "callee.py"
    source.write_text("1")
    entry = SimpleNamespace(py_func=make_plan, stats=SimpleNamespace(cache_path=str(folder)))
    monkeypatch.setattr(compile_once, "entry_points", lambda: [entry])
    monkeypatch.setattr(compile_once, "source_files", lambda: [str(source)])
    index: Path = folder / "plan.make_plan-190.py311.nbi"
    seen: list[bool] = []

    def compile_parts() -> None:
        seen.append(index.exists())
        index.touch()

    monkeypatch.setattr(compile_once, "_compile_parts", compile_parts)
    compile_once.compile_once([].append)
    assert compile_once.is_compiled()
    first = list(folder.glob("*.ready"))
    compile_once.compile_once([].append)
    assert index.exists()
    source.write_text("22")
    assert not compile_once.is_compiled()
    compile_once.compile_once([].append)
    assert seen == [False, False]
    assert len(first) == 1
    assert list(folder.glob("*.ready")) != first


def test_unwritable_cache_folder(folder, monkeypatch):
    (folder / "file").touch()
    monkeypatch.setattr(compile_once, "_cache_folder", lambda: folder / "file")
    lines: list[str] = []
    compile_once.compile_once(lines.append)
    assert lines[0].startswith("compiling the planner in this process, not once per machine: ")
