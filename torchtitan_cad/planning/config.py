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
    rank_speeds: tuple[float, ...] | None = None
    """Relative speed of each rank, positive; None where all are equal. Work is dealt out so that all finish together:
    a rank of speed 0.5 gets half as much as one of speed 1."""
    max_recv_queries: int | tuple[int, ...] | None = None
    """Query rows (tokens) that a rank receives from others for a plan, at most: one number for all ranks or one for
    each; None for any number. Hard: planning fails rather than exceed it."""
    max_recv_keys: int | tuple[int, ...] | None = None
    """The same for key rows, those that a rank needs for its own queries of documents spanning ranks included."""
    ranks_per_node: int | None = None
    """Ranks of a node: ranks 0 to n - 1 are the first node, and so on. None: bytes cost the same wherever they go."""
    inter_node_weight: float = 4.0
    """What a byte between nodes costs over one inside a node, where ranks_per_node is set. 4 is about the ratio of
    what all-to-alls reach on nodes with NVLink 4 (some 150 GB/s per GPU) and 400 Gb/s InfiniBand (some 40 GB/s)."""

    def __post_init__(self) -> None:
        if not _is_number(self.tolerance) or self.tolerance < 0:
            raise ValueError(f"tolerance = {self.tolerance!r}: set a finite number that is not negative, such as 0.02")
        for key in ("min_shard", "tile"):
            if not _is_positive_integer(getattr(self, key)):
                raise ValueError(f"{key} = {getattr(self, key)!r}: set a positive integer, such as 128")
        if not isinstance(self.split_kv, bool):
            raise ValueError(f"split_kv = {self.split_kv!r}: set true or false")
        if not isinstance(self.planner, str):
            raise ValueError(f"planner = {self.planner!r}: set the name of a planner, such as 'tiling'")
        if self.rank_speeds is not None:
            object.__setattr__(self, "rank_speeds", _speeds(self.rank_speeds))
        for key in ("max_recv_queries", "max_recv_keys"):
            object.__setattr__(self, key, _capacity(key, getattr(self, key)))
        if self.ranks_per_node is not None and not _is_positive_integer(self.ranks_per_node):
            raise ValueError(f"ranks_per_node = {self.ranks_per_node!r}: set a positive integer, such as 8")
        if not _is_number(self.inter_node_weight) or self.inter_node_weight < 1:
            raise ValueError(f"inter_node_weight = {self.inter_node_weight!r}: set a number of at least 1, such as 4.0")

    @property
    def cost_tile(self) -> int:
        """Tile edge, in tokens, at which costs are counted: every allowed cut lies on its grid."""
        return math.gcd(self.tile, self.min_shard)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_positive_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _speeds(speeds: object) -> tuple[float, ...]:
    """The speeds as a tuple. Raises ValueError naming the first that is not a positive finite number."""
    if not isinstance(speeds, (tuple, list)):
        raise ValueError(f"rank_speeds = {speeds!r}: set one positive number per rank, such as [1.0, 0.9]")
    for rank, speed in enumerate(speeds):
        if not _is_number(speed) or speed <= 0:
            raise ValueError(f"rank_speeds[{rank}] = {speed!r}: set a positive finite number, such as 1.0")
    return tuple(speeds)


def _capacity(key: str, capacity: object) -> int | tuple[int, ...] | None:
    """The capacity, several as a tuple. Raises ValueError unless all are integers that are not negative."""
    several = isinstance(capacity, (tuple, list))
    for value in capacity if isinstance(capacity, (tuple, list)) else (capacity,):
        if capacity is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise ValueError(f"{key} = {capacity!r}: set a number of tokens that is not negative, or one per rank")
    return tuple(capacity) if several else capacity  # type: ignore
