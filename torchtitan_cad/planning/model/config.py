"""Options of the planner."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchtitan_cad.planning.model.layout import MAX_TOKENS
from torchtitan_cad.planning.text import brief, is_integer, is_number

MAX_SPEED_RATIO = 10**6
"""The fastest rank's speed over the slowest's, at most: loads in proportion to it fit in int64."""

MAX_NODE_WEIGHT = 1000
"""The largest ``inter_node_weight``; networks between nodes are some 4 to 50 times slower than those inside."""


MAX_BUFFER_BYTES = 2**40


@dataclass(frozen=True)
class PlannerConfig:
    """Options of a planner. Raises ValueError naming the option, its value and what to set instead.

    Whole numbers are at most ``MAX_TOKENS``: no layout has more tokens or ranks. Bytes are at most
    ``MAX_BUFFER_BYTES``.
    """

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
    a rank of speed 0.5 gets half as much as one of speed 1. The fastest is at most ``MAX_SPEED_RATIO`` times the
    slowest."""
    max_recv_queries: int | tuple[int, ...] | None = None
    """Query rows (tokens) that a rank receives from others for a plan, at most: one number for all ranks or one for
    each; None for any number. Hard: planning fails rather than exceed it."""
    max_recv_keys: int | tuple[int, ...] | None = None
    """The same for key rows, those that a rank needs for its own queries of documents spanning ranks included."""
    buffer_bytes: int | None = None
    """Bytes of the largest message of queries, and of keys, that a rank should receive as a server, at most; None for
    any number. Soft: a plan that exceeds it is made again with capacities that keep it, and kept if there is none."""
    ranks_per_node: int | None = None
    """Ranks of a node: ranks 0 to n - 1 are the first node, and so on. None: bytes cost the same wherever they go."""
    inter_node_weight: float = 4.0
    """Price of a byte between nodes over one inside a node, where ranks_per_node is set. 4 is about the ratio of
    what all-to-alls reach on nodes with NVLink 4 (some 150 GB/s per GPU) and 400 Gb/s InfiniBand (some 40 GB/s); from 1
    to ``MAX_NODE_WEIGHT``."""

    def __post_init__(self) -> None:
        if not is_number(self.tolerance) or self.tolerance < 0:
            raise ValueError(
                f"tolerance = {brief(self.tolerance)}: set a finite number that is not negative, such as 0.02"
            )
        for key, example in (("min_shard", 128), ("tile", 128), ("ranks_per_node", 8), ("buffer_bytes", 10**9)):
            value, most = getattr(self, key), MAX_BUFFER_BYTES if key == "buffer_bytes" else MAX_TOKENS
            optional = key in ("ranks_per_node", "buffer_bytes") and value is None
            if not optional and not is_integer(value, 1, most):
                raise ValueError(
                    f"{key} = {brief(value)}: set a positive integer{_up_to(value, most)}, such as {example}"
                )
        if not isinstance(self.split_kv, bool):
            raise ValueError(f"split_kv = {brief(self.split_kv)}: set true or false")
        if not isinstance(self.planner, str):
            raise ValueError(f"planner = {brief(self.planner)}: set the name of a planner, such as 'tiling'")
        if self.rank_speeds is not None:
            object.__setattr__(self, "rank_speeds", _speeds(self.rank_speeds))
        for key in ("max_recv_queries", "max_recv_keys"):
            object.__setattr__(self, key, _capacity(key, getattr(self, key)))
        weight = self.inter_node_weight
        if not is_number(weight) or not 1 <= weight <= MAX_NODE_WEIGHT:
            raise ValueError(
                f"inter_node_weight = {brief(weight)}: set a number of at least 1 and at most {MAX_NODE_WEIGHT}, "
                "such as 4.0"
            )

    @property
    def cost_tile(self) -> int:
        """Tile edge, in tokens, at which costs are counted: every allowed cut lies on its grid."""
        return math.gcd(self.tile, self.min_shard)


def _up_to(value: object, most: int = MAX_TOKENS) -> str:
    """Return the upper limit in words, for a value that exceeds it."""
    return f", at most {most}" if isinstance(value, int) and value > most else ""


def _speeds(speeds: object) -> tuple[float, ...]:
    """Return the speeds as a tuple. Raises ValueError naming the first that is not a positive finite number."""
    if not isinstance(speeds, (tuple, list)):
        raise ValueError(f"rank_speeds = {brief(speeds)}: set one positive number per rank, such as [1.0, 0.9]")
    for rank, speed in enumerate(speeds):
        if not is_number(speed) or speed <= 0:
            raise ValueError(f"rank_speeds[{rank}] = {brief(speed)}: set a positive finite number, such as 1.0")
    if speeds and max(speeds) > MAX_SPEED_RATIO * min(speeds):
        raise ValueError(
            f"rank_speeds = {brief(speeds)}: set speeds of which the largest is at most {MAX_SPEED_RATIO} times the "
            "smallest"
        )
    return tuple(speeds)


def _capacity(key: str, capacity: object) -> int | tuple[int, ...] | None:
    """Return the capacity, several as a tuple. Raises ValueError unless all are integers that are not negative."""
    if capacity is None:
        return None
    values = tuple(capacity) if isinstance(capacity, (tuple, list)) else (capacity,)
    for value in values:
        if not is_integer(value, 0, MAX_TOKENS):
            raise ValueError(
                f"{key} = {brief(capacity)}: set a number of tokens that is not negative{_up_to(value)}, "
                "or one per rank"
            )
    return values if isinstance(capacity, (tuple, list)) else values[0]
