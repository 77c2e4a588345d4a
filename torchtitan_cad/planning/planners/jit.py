"""Compilation of the planners' inner loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile with numba, without fast-math: the same IEEE results on every rank.

    Machine code is cached on disk where numba finds a writable place (``NUMBA_CACHE_DIR`` sets one), so that only the
    first plan after an installation waits for the compiler, a few seconds.
    """
    try:
        return numba.njit(cache=True, error_model="numpy")(function)
    except RuntimeError:  # no place for a cache
        return numba.njit(error_model="numpy")(function)
