"""Compiling once per machine: the entry points' code is put on disk before the first process needs it.

Of the processes that find nothing on disk one has it compiled, the others wait for it. Child processes compile, each a
*part* of the entry points: numba compiles in one thread, and what makes it faster here changes numba's own classes.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from torchtitan_cad.planning.jit import compiling, entry_points, source_files

Report = Callable[[str], None]
"""Gets one line about what is being waited for."""

LOCK_S = 600.0
"""Longest wait for another process that compiles, in seconds; after it a process compiles for itself."""

PATIENCE_S = 2.0
"""Waits that are shorter are not reported."""


@dataclass(frozen=True)
class Part:
    """Entry points that one process compiles: their names, and what calls all of them."""

    names: tuple[str, ...]
    run: Callable[[], None]


_parts: list[Part] = []
_is_child = False


def compiled_by(run: Callable[[], None], *names: str) -> None:
    """Have the entry points of these names compiled together, by ``run``, which calls them with small arguments."""
    _parts.append(Part(names, run))


def compile_once(report: Report) -> None:
    """Have all entry points compiled onto the disk, unless a process of this machine has done it.

    Waits for another process that compiles, at most LOCK_S; the kernel releases the lock of one that dies. What a child
    process fails to compile, this one compiles. Where nothing can be kept on disk, every process compiles what it
    calls.

    Args:
        report: gets a line before and after compiling, and one where another process is waited for.
    """
    if _is_child:
        return
    folder = _cache_folder()
    if folder is None:
        report("compiling the planner in every process, there is no writable cache folder: set NUMBA_CACHE_DIR to one")
        return
    if is_compiled():
        return
    lock = filelock.FileLock(folder / "planner.lock")
    try:
        _acquire(lock, report)
        if is_compiled():
            return
        _remove_stale(folder)
        report("compiling the planner, once per machine: about 15 s, longer on a busy CPU ...")
        begin = time.perf_counter()
        _compile_parts()
        report(f"compiled the planner in {time.perf_counter() - begin:.0f} s")
        (folder / _ready_name(_machine_tag())).touch()
    except (OSError, NotImplementedError) as error:  # Timeout is one, too
        report(f"compiling the planner in this process, not once per machine: {error}")
    finally:
        lock.release()


def is_compiled() -> bool:
    """Tell whether the compiled code is on disk, ready to load."""
    folder = _cache_folder()
    return folder is not None and (folder / _ready_name(_machine_tag())).exists()


def compile_part(index: int) -> None:
    """Compile a part onto the disk: all that a child process does."""
    global _is_child
    _is_child = True  # the process that started this one holds the lock
    part = _parts[index]
    gc.disable()  # up to a fifth of the time: nothing that numba makes goes before the process does
    with compiling(lambda name: name in part.names), entry_points_only():
        part.run()


def _compile_parts() -> None:
    """Compile every part in a process of its own, at the same time."""
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(_start_child(index)) for index in range(len(_parts))]
        for child in children:
            stack.callback(child.kill)
        for part, child in zip(_parts, children, strict=True):
            try:
                compiled = child.wait(timeout=LOCK_S) == 0
            except subprocess.TimeoutExpired:
                compiled = False
            if not compiled:
                part.run()


def _start_child(index: int) -> subprocess.Popen[bytes]:
    code = f"import sys; sys.path[:] = {sys.path!r}; import torchtitan_cad.planning; "
    code += f"from {__name__} import compile_part; compile_part({index})"
    nothing = subprocess.DEVNULL
    return subprocess.Popen([sys.executable, "-c", code], stdin=nothing, stdout=nothing, stderr=nothing)


@contextlib.contextmanager
def entry_points_only() -> Iterator[None]:
    """Let LLVM, in this context, optimize and translate only whole entry points, not what they call by itself.

    numba makes machine code of every callee, with all that it calls in turn, and then links a copy of its
    intermediate code into the caller. Compiling takes a fifth to two fifths less time without that. A callee compiled
    so has no machine code, so that Python must not call it: only a process that compiles does this. numba has no
    option for it, so that methods of its classes are replaced; a numba without them compiles as it always does.
    """
    from numba.core import codegen
    from numba.core.event import Event, Listener, install_listener

    compiled: list[Any] = []

    class Stack(Listener):
        def on_start(self, event: Event) -> None:
            compiled.append(event.data["dispatcher"])

        def on_end(self, event: Event) -> None:
            compiled.pop()

    def end(library: Any) -> None:
        library._finalize_dynamic_globals()
        library._finalized = True

    def nothing(*_: Any) -> None: ...

    replacements = (
        ("CPUCodeLibrary", "_optimize_final_module", nothing),
        ("CPUCodeLibrary", "_finalize_final_module", end),
        ("JITCPUCodegen", "set_env", nothing),  # for functions in machine code
    )
    found = [(getattr(codegen, holder, None), name, other) for holder, name, other in replacements]
    if not all(hasattr(holder, name) for holder, name, _ in found):
        yield
        return

    def choose(whole: Callable[..., None], callee: Callable[..., None]) -> Callable[..., None]:
        def method(self: Any, *args: Any) -> None:
            is_callee = len(compiled) > 1 and compiled[-1] not in entry_points()
            (callee if is_callee else whole)(self, *args)

        return method

    originals = [getattr(holder, name) for holder, name, _ in found]
    for (holder, name, other), original in zip(found, originals, strict=True):
        setattr(holder, name, choose(original, other))
    try:
        with install_listener("numba:compile", Stack()):
            yield
    finally:
        for (holder, name, _), original in zip(found, originals, strict=True):
            setattr(holder, name, original)


def _acquire(lock: filelock.BaseFileLock, report: Report) -> None:
    """Raise filelock.Timeout, an OSError, after LOCK_S."""
    try:
        lock.acquire(timeout=PATIENCE_S)
    except filelock.Timeout:
        report(f"waiting for another process of this machine to compile the planner, {LOCK_S:.0f} s at most ...")
        lock.acquire(timeout=LOCK_S - PATIENCE_S)


def _cache_folder() -> Path | None:
    """Folder of the first entry point's compiled code; None unless numba has a place for all of them."""
    paths = [entry.stats.cache_path for entry in entry_points()]
    return Path(paths[0]) if paths and all(paths) else None


def _remove_stale(folder: Path) -> None:
    """Forget what was compiled from other sources.

    numba compiles a function anew if its own file has changed, but not if one has changed that holds what it calls.
    Nothing is stale where this machine's sources have been compiled for another processor, onto the same disk.
    """
    if any(folder.glob(_ready_name("*"))):
        return
    for ready in folder.glob("*.ready"):
        ready.unlink(missing_ok=True)
    for entry in entry_points():
        stem = Path(entry.py_func.__code__.co_filename).stem
        for index in Path(entry.stats.cache_path).glob(f"{stem}.{entry.py_func.__qualname__}-*.nbi"):
            index.unlink(missing_ok=True)


def _ready_name(machine: str) -> str:
    """Name of the file that says that all, as its sources are now, has been compiled for that machine."""
    return f"planner-{_source_tag()}-{machine}.ready"


def _source_tag() -> str:
    """Modification times and sizes of all files with compiled code, which numba's cache is keyed by."""
    stats = [(path, Path(path).stat()) for path in source_files()]
    return _hash([(path, stat.st_mtime_ns, stat.st_size) for path, stat in stats])


def _machine_tag() -> str:
    import llvmlite.binding
    import numba

    features = llvmlite.binding.get_host_cpu_features().flatten()
    versions = (sys.implementation.cache_tag, numba.__version__, llvmlite.__version__)
    return _hash((versions, llvmlite.binding.get_host_cpu_name(), features))


def _hash(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=6).hexdigest()
