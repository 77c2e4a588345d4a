"""Whether the planner's compiled code is in numba's cache. Imports numba only."""

from __future__ import annotations

import sys
from typing import Any

from numba.core.registry import CPUDispatcher


def missing_code() -> int:
    """How many functions of the imported planners are not in the cache on disk: the first plan compiles them."""
    modules = [module for name, module in sys.modules.items() if name.startswith(__package__)]
    functions = {id(f): f for module in modules for f in vars(module).values() if isinstance(f, CPUDispatcher)}
    return sum(not _is_cached(function) for function in functions.values())


def _is_cached(function: Any) -> bool:
    index = getattr(function._cache, "_cache_file", None)  # numba has no public way to ask
    return bool(index is not None and index._load_index())
