"""What a task costs its server. Imports numpy only.

Costs are integers, so that sums do not depend on their order and every rank computes the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .intervals import IntArray
from .tasks import TaskArray, is_diagonal


class CostModel(Protocol):
    """Predicted cost of tasks, in integer units of the model's choice (tiles, nanoseconds).

    The contract that planners and the guarantee on the maximum load rely on:

    - a task costs the sum over its rows of tiles (``granularity`` queries on the grid that starts at the document's
      first token) of ``row_cost`` of the key tiles that the row touches, whatever the document;
    - cutting a task along the queries at a multiple of ``granularity`` leaves the sum of costs unchanged;
    - joining tasks with ``merge_queries`` never raises the sum;
    - ``row_cost`` does not decrease: a row of tiles does not cost less further down the document.

    The first makes the next two true.
    """

    @property
    def granularity(self) -> int:
        """Tokens: the grid of query positions at which cutting is free."""
        ...

    def cost(self, tasks: TaskArray) -> IntArray:
        """int64 [n] cost of each task."""
        ...

    def row_cost(self, num_key_tiles: IntArray) -> IntArray:
        """int64, same shape: cost of one row of tiles against that many key tiles (0 for none)."""
        ...

    def prefix_cost(self, length: int) -> IntArray:
        """int64 [ceil(length / granularity) + 1], entry i: cost of the first i rows of tiles against all their keys.

        Queries [a, b) of a document against their full prefix cost P[ceil(b / granularity)] - P[a // granularity].
        """
        ...

    def max_pairs(self, load: int) -> int:
        """Most (query, key) pairs that tasks of total cost ``load`` can contain; for lower bounds."""
        ...


@dataclass(frozen=True)
class TileAreaCost:
    """Number of tile x tile squares of the document's (query, key) plane that a task touches.

    The grid starts at the document's first token. A causal kernel skips the squares above the diagonal and computes
    those on it in full, so this is the kernel's arithmetic up to a constant. A task that starts inside a row of tiles
    pays for the whole row, hence ranks that share a row of tiles (a document spanning ranks, cut at a place that is
    not a multiple of the tile) pay for it once each.
    """

    granularity: int = 128

    def cost(self, tasks: TaskArray) -> IntArray:
        tile = self.granularity
        q_first, q_stop = tasks["q_start"] // tile, -(-tasks["q_end"] // tile)
        k_first, k_stop = tasks["kv_start"] // tile, -(-tasks["kv_end"] // tile)
        rows = q_stop - q_first
        # Row i of tiles ends with its diagonal square: i + 1 - k_first squares.
        causal = rows * (q_first + q_stop + 1) // 2 - rows * k_first
        return np.where(is_diagonal(tasks), causal, rows * (k_stop - k_first))

    def row_cost(self, num_key_tiles: IntArray) -> IntArray:
        return np.array(num_key_tiles, dtype=np.int64)

    def prefix_cost(self, length: int) -> IntArray:
        rows = np.arange(-(-length // self.granularity) + 1, dtype=np.int64)
        return rows * (rows + 1) // 2

    def max_pairs(self, load: int) -> int:
        return load * self.granularity**2
