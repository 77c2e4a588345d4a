"""Cost models unlike tile area: any table of row costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.model.tasks import TaskArray, is_diagonal


@dataclass(frozen=True)
class TableCost:
    """Cost model with ``rows[n]`` for a row of tiles against n key tiles; the table must reach the longest document."""

    granularity: int
    rows: tuple[int, ...]

    @cached_property
    def _table(self) -> IntArray:
        return np.array(self.rows, dtype=np.int64)

    @cached_property
    def _sums(self) -> IntArray:
        return np.append(0, np.cumsum(self._table))

    def row_cost(self, num_key_tiles: IntArray) -> IntArray:
        return self._table[num_key_tiles]

    def cost(self, tasks: TaskArray) -> IntArray:
        tile = self.granularity
        first, stop = tasks["q_start"] // tile, -(-tasks["q_end"] // tile)
        left, right = tasks["kv_start"] // tile, -(-tasks["kv_end"] // tile)
        # Row i of a diagonal has i + 1 - left tiles; rectangles are computed with harmless indices.
        causal = self._sums[stop - left + 1] - self._sums[np.maximum(first - left, 0) + 1]
        return np.where(is_diagonal(tasks), causal, (stop - first) * self._table[right - left])

    def prefix_cost(self, length: int) -> IntArray:
        return self._sums[1 : -(-length // self.granularity) + 2]

    def max_pairs(self, load: int) -> int:
        cheapest = (self._table[1:] / np.arange(1, len(self._table))).min()
        return int(load / cheapest * self.granularity**2 * (1 + 1e-9)) + (load > 0)


def concave_cost(overhead: float, tiles: int = 2100, tile: int = 128) -> TableCost:
    """Every row costs ``overhead`` tiles besides its tiles."""
    return TableCost(tile, (0, *(round(1000 * (n + overhead)) for n in range(1, tiles))))


def noisy_cost(seed: int, tiles: int = 2100, tile: int = 128) -> TableCost:
    """A row never costs less with one tile more; by how much more is lognormal."""
    steps = 1 + np.random.default_rng(seed).lognormal(7, 1, size=tiles - 1).astype(np.int64)
    return TableCost(tile, (0, *np.cumsum(steps).tolist()))
