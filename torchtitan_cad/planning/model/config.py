# SPDX-License-Identifier: BSD-3-Clause
"""Options of the planner."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torchtitan_cad.planning.model.layout import MAX_TOKENS
from torchtitan_cad.planning.text import brief, is_integer, is_number


@dataclass(frozen=True)
class PlannerConfig:
    """Options of a planner. Raises ValueError naming the option, its value and what to set instead.

    Whole numbers are at most ``MAX_TOKENS``: no layout has more tokens or ranks.
    """

    tolerance: float = 0.02
    """No server's load exceeds (1 + tolerance) times the mean, up to the cost of one shard (see ``limits.py``)."""
    min_shard: int = 128
    """Tokens. Documents are cut along the queries only at multiples of min_shard, counted from the document's start."""
    split_kv: bool = True
    """Allow tasks with partial key ranges, cut at multiples of min_shard (``local_search`` only)."""
    planner: str = "local_search"
    """Name of a registered planner."""
    tile: int = 128
    """Tokens. Kernel tile of the default cost model. Tiles are counted in units of gcd(tile, min_shard), so that cuts
    never add cost; 1 balances exact (query, key) pairs."""
    ranks_per_node: int | None = None
    """Ranks of a node: ranks 0 to n - 1 are the first node, and so on. None: bytes cost the same between all ranks,
    else bytes between nodes ``BETWEEN_NODES`` times as much."""

    def __post_init__(self) -> None:
        if not is_number(self.tolerance) or self.tolerance < 0:
            raise ValueError(
                f"tolerance = {brief(self.tolerance)}: set a finite number that is not negative, such as 0.02"
            )
        for key, example in (("min_shard", 128), ("tile", 128), ("ranks_per_node", 8)):
            value = getattr(self, key)
            optional = key == "ranks_per_node" and value is None
            if not optional and not is_integer(value, 1, MAX_TOKENS):
                at_most = (
                    f", at most {MAX_TOKENS}"
                    if isinstance(value, int) and value > MAX_TOKENS
                    else ""
                )
                raise ValueError(
                    f"{key} = {brief(value)}: set a positive integer{at_most}, such as {example}"
                )
        if not isinstance(self.split_kv, bool):
            raise ValueError(f"split_kv = {brief(self.split_kv)}: set true or false")
        if not isinstance(self.planner, str):
            raise ValueError(
                f"planner = {brief(self.planner)}: set the name of a planner, such as 'local_search'"
            )

    def for_window(self, window: int | None) -> PlannerConfig:
        """Return the options for attention with this window, whose queries stay at home: their work is even."""
        return self if window is None else replace(self, planner="home")

    @property
    def cost_tile(self) -> int:
        """Tile edge, in tokens, at which costs are counted: every allowed cut lies on its grid."""
        return math.gcd(self.tile, self.min_shard)
