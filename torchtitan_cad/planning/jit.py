# SPDX-License-Identifier: BSD-3-Clause
"""Decorators of compiled functions; ``compile_once.py`` compiles them once per machine.

numba compiles *entry points*, which Python calls, together with all functions that they call, and keeps them on disk.
Entry points are called with arrays of one dtype and layout and with numbers, so that each has one signature.

If numba cannot be imported, or ``NUMBA_DISABLE_JIT`` is set, Python runs the same functions: the same plans, a hundred
times slower.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

_logger = logging.getLogger(__name__)
numba: Any = None
try:
    import numba
    from numba.core.compiler_lock import global_compiler_lock
    from numba.extending import register_jitable
except Exception as error:  # besides ImportError, numba raises others for a numpy that is too new for it
    numba = None
    _logger.warning(
        f"planning is slow: Python runs it, as numba cannot be imported ({type(error).__name__}: {error})"
    )
if numba is not None and numba.config.DISABLE_JIT:
    numba = None
    _logger.warning("planning is slow: Python runs it, as NUMBA_DISABLE_JIT is set")

_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "no_cfunc_wrapper": True,
    "_nrt": False,
}
# The GIL is released: planning runs beside training. Without fast-math, the same IEEE results on every rank. Compiled
# code creates no arrays: counting references to them takes most of the time where functions are small.

_entries: list[Any] = []


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make an entry point of compiled code, kept on disk if numba finds a folder (``NUMBA_CACHE_DIR`` sets one)."""
    if numba is None:
        return function
    try:
        entry = numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # no folder for a cache
        entry = numba.njit(**_OPTIONS)(function)
    entry.compile = _with_fewer_passes(entry.compile)
    _entries.append(entry)
    return entry


def _with_fewer_passes(compile_entry: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an entry point's ``compile`` so that LLVM runs its first level, without vector instructions.

    That takes 0.7 of the time, and the code is as fast here. numba has these options for the process only. They hold
    while an entry point compiles, and nothing else can then: numba compiles under a lock.
    """

    @functools.wraps(compile_entry)
    def compile_with_fewer_passes(*arguments: Any) -> Any:
        config = numba.config
        with global_compiler_lock:
            level = config.OPT
            vectorizes = config.LOOP_VECTORIZE
            config.OPT = type(level)(1)
            config.LOOP_VECTORIZE = 0
            try:
                return compile_entry(*arguments)
            finally:
                config.OPT = level
                config.LOOP_VECTORIZE = vectorizes

    return compile_with_fewer_passes


def jit_inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function callable from compiled code: it is compiled as a part of the entry points that call it.

    Unlike a function of ``numba.njit``, it runs uncompiled if Python calls it, has no wrapper for such calls, and is
    not compiled again for every literal argument; it is, where an entry point and another function both call it.
    """
    if numba is None:
        return function
    return register_jitable(**_OPTIONS)(function)


def entry_points() -> list[Any]:
    """Return numba's dispatchers of all entry points that have been imported."""
    return list(_entries)


def is_plain_python() -> bool:
    """Tell whether numba is missing or switched off, so that nothing is compiled."""
    return numba is None
