"""Options of the planner. Imports the standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class PlannerConfig:
    """How to plan. Raises ValueError naming the option, its value and what to set instead."""

    tolerance: float = 0.02
    """No server's load exceeds (1 + tolerance) times the mean, up to the cost of one shard (see ``limits.py``)."""
    min_shard: int = 128
    """Tokens. Documents are cut along the queries at multiples of this only, counted from the document's start."""
    split_kv: bool = True
    """Let ``tiling`` make tasks with partial key ranges, cut at multiples of min_shard; else it plans as ``greedy``."""
    planner: str = "tiling"
    """Name of a registered planner."""
    tile: int = 128
    """Tokens. Kernel tile of the default cost model. Tiles are counted in units of gcd(tile, min_shard), so that cuts
    never add cost; 1 balances exact (query, key) pairs."""

    def __post_init__(self) -> None:
        number = isinstance(self.tolerance, (int, float)) and not isinstance(self.tolerance, bool)
        if not number or not math.isfinite(self.tolerance) or self.tolerance < 0:
            raise ValueError(f"tolerance = {self.tolerance!r}: set a finite number that is not negative, such as 0.02")
        for key in ("min_shard", "tile"):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{key} = {value!r}: set a positive integer, such as 128")
        if not isinstance(self.split_kv, bool):
            raise ValueError(f"split_kv = {self.split_kv!r}: set true or false")
        if not isinstance(self.planner, str):
            raise ValueError(f"planner = {self.planner!r}: set the name of a planner, such as 'tiling'")

    @property
    def cost_tile(self) -> int:
        """Tile edge, in tokens, at which costs are counted: every allowed cut lies on its grid."""
        return math.gcd(self.tile, self.min_shard)
