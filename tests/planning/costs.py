"""Cost models of every kind, drawn by hypothesis, and any table of row costs."""

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
from hypothesis import strategies as st

from torchtitan_cad.planning import CostModel, ProfileCost, TileAreaCost
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


def cost_of(kind: str, seed: int, tile: int) -> CostModel:
    """Cost of that kind for documents of up to 60,000 tokens."""
    tiles = 60_000 // tile + 2
    match kind:
        case "tiles":
            return TileAreaCost(tile)
        case "concave":
            return concave_cost(seed % 8, tiles, tile)
        case "noisy":
            return noisy_cost(seed % 1000, tiles, tile)
        case "profile":
            return ProfileCost(tile, (1, 3, 9), (seed % 9 + 1, seed % 9 + 3, seed % 9 + 9))
    raise ValueError(kind)


@st.composite
def profiles(draw: st.DrawFn) -> ProfileCost:
    """Noisy grids, some of them nonsense: any times at any key lengths."""
    tiles = [1, *sorted(draw(st.sets(st.integers(2, 250), max_size=6)))]
    noise = st.floats(0.5, 2.0) if draw(st.booleans()) else st.floats(1e-6, 1e6)
    times = [draw(noise) * (draw(st.sampled_from([0, 5])) + n) * 1e-9 for n in tiles]
    return ProfileCost.from_times(draw(st.integers(1, 24)), tiles, [Fraction(time) for time in times])


models: st.SearchStrategy[CostModel] = st.one_of(
    st.builds(TileAreaCost, st.integers(1, 24)),
    profiles(),
    st.builds(concave_cost, st.floats(0, 9), st.just(2000), st.integers(1, 24)),
    st.builds(noisy_cost, st.integers(0, 99), st.just(2000), st.integers(1, 24)),
)
