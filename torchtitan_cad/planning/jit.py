"""Compilation of inner loops: what is compiled, and how; ``compile_once.py`` does it once per machine.

Only *entry points*, which Python calls, are compiled for their own sake, with all they call, and kept on disk. They are
called with arrays of one dtype and layout and with numbers, so that each is compiled for one signature.

Where numba cannot be imported Python runs all of it: the same plans, a hundred times slower.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

_logger = logging.getLogger(__name__)
numba: Any = None
try:
    import numba
    from numba.extending import overload, register_jitable
except Exception as error:  # besides ImportError, whatever numba raises for a numpy that is too new for it
    numba = None
    _logger.warning(f"planning is slow: Python runs it, as numba cannot be imported ({type(error).__name__}: {error})")

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


def source_files() -> list[str]:
    """Return the paths of all imported files that have compiled code."""
    return sorted(_files)


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


def is_plain_python() -> bool:
    """Tell whether numba is missing, so that nothing is compiled."""
    return numba is None
