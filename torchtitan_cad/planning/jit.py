"""Compilation of inner loops. Imports numba only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile with numba, without fast-math: the same IEEE results on every rank.

    Machine code is cached on disk where numba finds a writable place (``NUMBA_CACHE_DIR`` sets one), so that only the
    first plan after an installation waits for the compiler, a few seconds. The GIL is released: planning runs beside
    training.
    """
    return _compile(function)


def jit_leaf(function: Callable[..., Any]) -> Callable[..., Any]:
    """As :func:`jit` for functions that create no arrays: without counting references, which takes most of the time
    where functions are small and their arrays come in a NamedTuple."""
    return _compile(function, _nrt=False)


def _compile(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    try:
        return numba.njit(cache=True, nogil=True, error_model="numpy", **options)(function)
    except RuntimeError:  # no place for a cache
        return numba.njit(nogil=True, error_model="numpy", **options)(function)
