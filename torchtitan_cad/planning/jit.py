"""Compilation of inner loops: what is compiled, how, and how that is done once per machine.

Only *entry points*, which Python calls, are compiled for their own sake, with all they call, and kept on disk. They are
called with arrays of one dtype and layout and with numbers, so that each is compiled for one signature.

Where numba cannot be imported Python runs all of it: the same plans, a hundred times slower.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock

_logger = logging.getLogger(__name__)
numba: Any = None
try:
    import llvmlite.binding
    import numba
    from numba.core.codegen import CPUCodeLibrary
    from numba.core.event import Event, Listener, install_listener
    from numba.extending import overload, register_jitable
except Exception as error:  # besides ImportError, whatever numba raises for a numpy that is too new for it
    numba = None
    _logger.warning(f"planning is slow: Python runs it, as numba cannot be imported ({type(error).__name__}: {error})")

Report = Callable[[str], None]
"""Gets one line about what is being waited for."""

PLANNER = "planner"
"""The part of the compiled code that every process needs; what it was compiled from is what others are checked by."""

LOCK_S = 600.0
"""Longest wait for another process that compiles, in seconds; after it a process compiles for itself."""

PATIENCE_S = 2.0
"""Waits that are shorter are not reported."""

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
# The GIL is released: planning runs beside training. Without fast-math, the same IEEE results on every rank.

_entries: list[Any] = []
_files: set[str] = set()


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make an entry point of compiled code, kept on disk where numba finds a place (``NUMBA_CACHE_DIR`` sets one)."""
    if numba is None:
        return function
    try:
        entry = numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # no place for a cache
        entry = numba.njit(**_OPTIONS)(function)
    _entries.append(entry)
    _files.add(function.__code__.co_filename)
    return entry


def jit_inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function callable from compiled code: compiled as a part of the entry points that call it.

    Unlike one made by ``numba.njit`` it can be called from Python without compiling anything, gets no wrapper to be
    called from there, and is not compiled anew for every literal argument.
    """
    if numba is None:
        return function
    _files.add(function.__code__.co_filename)
    return register_jitable(**_OPTIONS)(function)


def jit_leaf(function: Callable[..., Any]) -> Callable[..., Any]:
    """Do as :func:`jit_inner` for functions that create no arrays: without counting references, which takes most of the
    time where functions are small and their arrays come in a NamedTuple."""
    if numba is None:
        return function
    _files.add(function.__code__.co_filename)
    return register_jitable(_nrt=False, **_OPTIONS)(function)


def jit_literal(function: Callable[..., Any]) -> Callable[..., Any]:
    """Do as :func:`jit_leaf`, anew for literal arguments: where one such as -1 for "none" makes a loop faster."""
    if numba is None:
        return function
    _files.add(function.__code__.co_filename)
    options: Any = {**_OPTIONS, "_nrt": False}
    overload(function, options, strict=False, prefer_literal=True)(lambda *_: function)
    return function


def entry_points() -> list[Any]:
    """Return numba's dispatchers of all entry points that have been imported."""
    return list(_entries)


@contextlib.contextmanager
def compiling(chosen: Callable[[str], bool]) -> Iterator[None]:
    """Compile, in this context, the entry points whose names are ``chosen``; Python runs the others."""
    others = [entry for entry in _entries if not chosen(entry.py_func.__name__)]

    modules = [sys.modules[entry.py_func.__module__] for entry in others]
    for entry, module in zip(others, modules, strict=True):
        setattr(module, entry.py_func.__name__, entry.py_func)
    try:
        yield
    finally:
        for entry, module in zip(others, modules, strict=True):
            setattr(module, entry.py_func.__name__, entry)


@contextlib.contextmanager
def callees_optimized_once() -> Iterator[None]:
    """Let LLVM, in this context, optimize a function only as a part of the entry point that calls it.

    numba also optimizes every callee by itself before it links a copy into its caller, at every depth of calls. Without
    that, compiling takes a quarter less time and plans are made no slower. numba has no option for it, so that a method
    of its code libraries is replaced; a numba that no longer has the method compiles as it always does.
    """
    library_class: Any = CPUCodeLibrary
    optimize = getattr(library_class, "_optimize_final_module", None)
    if optimize is None:
        yield
        return
    compiled: list[Any] = []

    class Stack(Listener):
        def on_start(self, event: Event) -> None:
            compiled.append(event.data["dispatcher"])

        def on_end(self, event: Event) -> None:
            compiled.pop()

    def optimize_entry_point(library: Any) -> None:
        if not compiled or compiled[-1] in _entries:
            optimize(library)

    library_class._optimize_final_module = optimize_entry_point
    try:
        with install_listener("numba:compile", Stack()):
            yield
    finally:
        library_class._optimize_final_module = optimize


def is_plain_python() -> bool:
    """Tell whether numba is missing, so that nothing is compiled."""
    return numba is None


def is_compiled() -> bool:
    """Tell whether the compiled code is on disk, ready to load."""
    folder = _cache_folder()
    return folder is not None and (folder / _ready_name(_machine_tag())).exists()


def load(run: Callable[[], None], build: Callable[[], None], report: Report, part: str = PLANNER) -> None:
    """Load the compiled code of a part by ``run``, which calls all its entry points; by ``build`` if it is not on disk.

    Of the processes of a machine that find nothing on disk one compiles, the others wait for it, at most LOCK_S; the
    kernel releases the lock of one that dies. Where nothing can be kept on disk every process compiles for itself.
    """
    if numba is None:
        return
    folder = _cache_folder()
    if folder is None:
        report(f"compiling the {part} in every process, there is no writable cache folder: set NUMBA_CACHE_DIR to one")
        _timed(run, report, part)
        return
    ready = folder / _ready_name(_machine_tag(), part)
    if not ready.exists():
        lock = filelock.FileLock(folder / f"{part}.lock")
        try:
            _acquire(lock, report, part)
            if not ready.exists():
                if not any(folder.glob(_ready_name("*"))):
                    _remove_stale(folder)
                report(f"compiling the {part}, once per machine: about 15 s, longer on a busy CPU ...")
                _timed(build, report, part)
                ready.touch()
                return
        except (OSError, NotImplementedError) as error:  # Timeout is one, too
            report(f"compiling the {part} in this process, not once per machine: {error}")
        finally:
            lock.release()
    run()


def _timed(run: Callable[[], None], report: Report, part: str) -> None:
    begin = time.perf_counter()
    with callees_optimized_once():
        run()
    report(f"compiled the {part} in {time.perf_counter() - begin:.0f} s")


def _acquire(lock: filelock.BaseFileLock, report: Report, part: str) -> None:
    """Raise filelock.Timeout, an OSError, after LOCK_S."""
    try:
        lock.acquire(timeout=PATIENCE_S)
    except filelock.Timeout:
        report(f"waiting for another process of this machine to compile the {part}, {LOCK_S:.0f} s at most ...")
        lock.acquire(timeout=LOCK_S - PATIENCE_S)


def _cache_folder() -> Path | None:
    """Folder of the first entry point's compiled code; None unless numba has a place for all of them."""
    paths = [entry.stats.cache_path for entry in _entries]
    return Path(paths[0]) if paths and all(paths) else None


def _remove_stale(folder: Path) -> None:
    """Forget what was compiled from other sources.

    numba compiles a function anew if its own file has changed, but not if one has changed that holds what it calls.
    """
    for ready in folder.glob("*.ready"):
        ready.unlink(missing_ok=True)
    for entry in _entries:
        stem = Path(entry.py_func.__code__.co_filename).stem
        for index in Path(entry.stats.cache_path).glob(f"{stem}.{entry.py_func.__qualname__}-*.nbi"):
            index.unlink(missing_ok=True)


def _ready_name(machine: str, part: str = PLANNER) -> str:
    """Name of the file that says that a part, as its sources are now, has been compiled for that machine."""
    return f"{part}-{_source_tag()}-{machine}.ready"


def _source_tag() -> str:
    """Modification times and sizes of all files with compiled code, which numba's cache is keyed by."""
    stats = [(path, Path(path).stat()) for path in sorted(_files)]
    return _hash([(path, stat.st_mtime_ns, stat.st_size) for path, stat in stats])


def _machine_tag() -> str:
    features = llvmlite.binding.get_host_cpu_features().flatten()
    versions = (sys.implementation.cache_tag, numba.__version__, llvmlite.__version__)
    return _hash((versions, llvmlite.binding.get_host_cpu_name(), features))


def _hash(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=6).hexdigest()
