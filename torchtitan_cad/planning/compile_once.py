# SPDX-License-Identifier: BSD-3-Clause
"""Compiling once per machine: of the processes that find no compiled code on disk one compiles, the others wait."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock

from torchtitan_cad.planning.jit import entry_points

Report = Callable[[str], None]
"""Called with one line that tells what the process is waiting for."""

_SOURCES = Path(__file__).parent

LOCK_S = 600.0
"""seconds: longest wait for another process that compiles; then the process compiles for itself."""

PATIENCE_S = 2.0
"""seconds: shorter waits are not reported."""


def compile_once(run: Callable[[], None], report: Report) -> None:
    """Compile all entry points onto the disk, by ``run``, unless a process of this machine has done so already.

    Waits at most LOCK_S for another process that compiles; the operating system releases the lock of a process that
    dies. Without a writable cache folder, every process compiles the functions that it calls.

    Args:
        run: calls every entry point with small arguments.
        report: gets a line before and after compiling, and a line when waiting for another process.
    """
    folder = _cache_folder()
    if folder is None:
        report(
            "compiling the planner in every process, there is no writable cache folder: set NUMBA_CACHE_DIR to one"
        )
        return
    ready = folder / _ready_name(_machine_tag())
    if ready.exists():
        return
    lock = filelock.FileLock(folder / "planner.lock")
    try:
        _acquire(lock, report)
        if ready.exists():
            return
        _remove_stale(folder)
        report(
            "compiling the planner, once per machine: 15 to 20 s, longer on a busy CPU ..."
        )
        begin = time.perf_counter()
        with _no_garbage_collection():
            run()
        report(f"compiled the planner in {time.perf_counter() - begin:.0f} s")
        ready.touch()
    except (OSError, NotImplementedError) as error:  # Timeout is one, too
        report(f"compiling the planner in this process, not once per machine: {error}")
    finally:
        lock.release()


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Suspend garbage collection, which takes up to a fifth of the compile time and frees nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def is_compiled() -> bool:
    """Tell whether the compiled code is on disk, ready to load."""
    folder = _cache_folder()
    return folder is not None and (folder / _ready_name(_machine_tag())).exists()


def _acquire(lock: filelock.BaseFileLock, report: Report) -> None:
    """Raise filelock.Timeout, an OSError, after LOCK_S."""
    try:
        lock.acquire(timeout=PATIENCE_S)
    except filelock.Timeout:
        report(
            f"waiting for another process of this machine to compile the planner, {LOCK_S:.0f} s at most ..."
        )
        lock.acquire(timeout=LOCK_S - PATIENCE_S)


def _cache_folder() -> Path | None:
    """Folder of the first entry point's compiled code; None unless numba has a place for all of them."""
    paths = [entry.stats.cache_path for entry in entry_points()]
    return Path(paths[0]) if paths and all(paths) else None


def _remove_stale(folder: Path) -> None:
    """Remove code that was compiled from other sources.

    numba recompiles a function if its own file has changed, but not if the file of a function that it calls has.
    Nothing is stale if the current sources have been compiled onto the same disk for another processor.
    """
    if any(folder.glob(_ready_name("*"))):
        return
    for ready in folder.glob("*.ready"):
        ready.unlink(missing_ok=True)
    for entry in entry_points():
        stem = Path(entry.py_func.__code__.co_filename).stem
        for index in Path(entry.stats.cache_path).glob(
            f"{stem}.{entry.py_func.__qualname__}-*.nbi"
        ):
            index.unlink(missing_ok=True)


def _ready_name(machine: str) -> str:
    """Name of the file whose existence shows that the current sources have been compiled for ``machine``."""
    return f"planner-{_source_tag()}-{machine}.ready"


def _source_tag() -> str:
    """Hash of all files of planning, as compiled code holds constants of files without compiled code.

    Times count, which numba's keys have, and contents, as images may fix times.
    """
    paths = sorted(_SOURCES.rglob("*.py"))
    return _hash(
        [(str(path), path.stat().st_mtime_ns, path.read_bytes()) for path in paths]
    )


def _machine_tag() -> str:
    import llvmlite.binding
    import numba

    features = llvmlite.binding.get_host_cpu_features().flatten()
    versions = (sys.implementation.cache_tag, numba.__version__, llvmlite.__version__)
    return _hash((versions, llvmlite.binding.get_host_cpu_name(), features))


def _hash(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=6).hexdigest()
