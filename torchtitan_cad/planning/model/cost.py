# SPDX-License-Identifier: BSD-3-Clause
"""Cost of a task on its server.

Costs are integers, so that sums do not depend on their order and every rank computes the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import chain, pairwise
from typing import Protocol

import numpy as np

from torchtitan_cad.planning.intervals import IntArray, exclusive_cumsum
from torchtitan_cad.planning.model.tasks import TaskArray, is_diagonal

LARGEST = 2**62
"""saturation value of loads and pairs; the sum of two still fits in int64."""

SMALLER = "plan shorter documents, or measure the profile again"

PICOSECONDS = 10**12
"""units of ``ProfileCost`` per second; a row of tiles takes about a microsecond on a large GPU."""


class CostModel(Protocol):
    """Predicted cost of tasks, in integer units of the model's choice (tiles, picoseconds).

    The contract that planners and the guarantee on the maximum load rely on:

    - a task costs the sum over its rows of tiles (``granularity`` queries on the grid that starts at the document's
      first token) of ``row_cost`` of the key tiles that the row touches, whatever the document;
    - cutting a task along the queries at a multiple of ``granularity`` leaves the sum of costs unchanged;
    - joining tasks with ``merge_queries`` never raises the sum;
    - ``row_cost`` does not decrease: a row of tiles does not cost less further down the document.

    The first property implies the second and third.
    """

    @property
    def granularity(self) -> int:
        """Tokens: cutting is free at query positions that are multiples."""
        ...

    def cost(self, tasks: TaskArray) -> IntArray:
        """Return int64 [n] cost of each task."""
        ...

    def row_cost(self, num_key_tiles: IntArray) -> IntArray:
        """Return int64, same shape: cost of one row of tiles against ``num_key_tiles`` key tiles, 0 against none."""
        ...

    def prefix_cost(self, length: int) -> IntArray:
        """Return int64 [ceil(length / granularity) + 1]: cost of the first 0, 1, 2 ... rows of tiles against all keys.

        Queries [a, b) of a document against their full prefix cost P[ceil(b / granularity)] - P[a // granularity].
        """
        ...

    def max_pairs(self, load: int) -> int:
        """Return the most (query, key) pairs that tasks of total cost ``load`` can contain; for lower bounds."""
        ...


@dataclass(frozen=True)
class TileAreaCost:
    """Number of tile x tile squares of the document's (query, key) plane that a task touches.

    The grid starts at the document's first token. A causal kernel skips the squares above the diagonal and computes
    squares on the diagonal in full, so this is the kernel's arithmetic up to a constant. A task that starts inside a
    row of tiles pays for the whole row. If ranks share a row of tiles, because a document that spans them is cut
    inside it, each of them pays for the row.
    """

    granularity: int = 128

    def cost(self, tasks: TaskArray) -> IntArray:
        tile = self.granularity
        q_first = tasks["q_start"] // tile
        q_stop = -(-tasks["q_end"] // tile)
        k_first = tasks["kv_start"] // tile
        k_stop = -(-tasks["kv_end"] // tile)
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


@dataclass(frozen=True)
class ProfileCost:
    """Predicted kernel time in picoseconds, piecewise linear in the key tiles of a row.

    ``row_costs[i]`` is what a row of ``granularity`` queries costs against ``key_tiles[i]`` tiles of keys at peak
    throughput (arXiv 2510.18121, section 4.2: the grid is interpolated, and saturates at peak throughput). Beyond the
    grid the last slope goes on, but no tile costs less than the best of the grid. A task that starts or ends inside
    a row of tiles pays for the whole row, and a diagonal tile in full, as with ``TileAreaCost``.

    Raises:
        ValueError: ``key_tiles`` do not ascend from 1, or ``row_costs`` are not positive, or decrease.
    """

    granularity: int
    key_tiles: tuple[int, ...]
    row_costs: tuple[int, ...]
    _prefix: IntArray = field(
        init=False,
        repr=False,
        compare=False,
        default_factory=lambda: np.zeros(1, np.int64),
    )

    def __post_init__(self) -> None:
        tiles = self.key_tiles
        costs = self.row_costs
        if (
            len(tiles) != len(costs)
            or not tiles
            or tiles[0] != 1
            or any(a >= b for a, b in pairwise(tiles))
        ):
            raise ValueError(
                f"key_tiles = {tiles}: set one ascending entry per row cost, the first 1"
            )
        if costs[0] < 1 or any(a > b for a, b in pairwise(costs)):
            raise ValueError(
                f"row_costs = {costs}: set positive integers that do not decrease"
            )
        if costs[-1] > LARGEST:
            raise ValueError(
                f"a row of {tiles[-1]} key tiles takes more than {LARGEST} ps by this profile: {SMALLER}"
            )

    @classmethod
    def from_times(
        cls, granularity: int, key_tiles: Sequence[int], seconds: Sequence[Fraction]
    ) -> ProfileCost:
        """Fit measured times of one row of tiles; times that decrease are averaged, see ``isotonic``."""
        smooth = isotonic(seconds)
        return cls(
            granularity,
            tuple(key_tiles),
            tuple(max(1, round(time * PICOSECONDS)) for time in smooth),
        )

    def cost(self, tasks: TaskArray) -> IntArray:
        tile = self.granularity
        q_first = tasks["q_start"] // tile
        q_stop = -(-tasks["q_end"] // tile)
        k_first = tasks["kv_start"] // tile
        k_stop = -(-tasks["kv_end"] // tile)
        prefix = self._prefix_up_to(int(q_stop.max(initial=0)))
        diagonal = is_diagonal(tasks)
        # Keys of a rectangle end before its queries, so the table reaches far enough for both kinds.
        causal = (
            prefix[q_stop - k_first] - prefix[np.where(diagonal, q_first - k_first, 0)]
        )
        return np.where(
            diagonal, causal, (q_stop - q_first) * self.row_cost(k_stop - k_first)
        )

    def row_cost(self, num_key_tiles: IntArray) -> IntArray:
        tiles, costs, rise, run = self._segments
        count = np.asarray(num_key_tiles, dtype=np.int64)
        segment = np.maximum(np.searchsorted(tiles, count, side="right") - 1, 0)
        beyond = count - tiles[segment]
        rise = rise[segment]
        run = run[segment]
        # Rounded up: ``max_pairs`` relies on it. Divided first, so that nothing overflows.
        cost = costs[segment] + rise // run * beyond - (-(rise % run) * beyond) // run
        if (costs[segment] + rise / run * beyond).max(initial=0) > LARGEST:
            raise ValueError(
                f"{count.max()} key tiles take more than {LARGEST} ps by this profile: {SMALLER}"
            )
        return np.where(count > 0, cost, 0)

    def prefix_cost(self, length: int) -> IntArray:
        rows = -(-length // self.granularity)
        return self._prefix_up_to(rows)[: rows + 1]

    def max_pairs(self, load: int) -> int:
        # No row of n tiles costs less than n times the best tile of the grid: the pieces are linear.
        tiles, cost = self._best_tile
        return load * tiles * self.granularity**2 // cost

    @property
    def _best_tile(self) -> tuple[int, int]:
        """(tiles, cost) of the grid point with the least cost per tile."""
        return min(
            zip(self.key_tiles, self.row_costs, strict=True),
            key=lambda point: Fraction(point[1], point[0]),
        )

    @cached_property
    def _segments(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Grid points and, from each on, the slope as rise over run."""
        tiles = self.key_tiles
        costs = self.row_costs
        rise = [b - a for a, b in pairwise(costs)]
        run = [b - a for a, b in pairwise(tiles)]
        best_tiles, best_cost = self._best_tile
        slope = Fraction(best_cost, best_tiles)
        if rise:
            slope = max(slope, Fraction(rise[-1], run[-1]))
        columns = (tiles, costs, [*rise, slope.numerator], [*run, slope.denominator])
        first, second, third, fourth = (
            np.array(column, dtype=np.int64) for column in columns
        )
        return first, second, third, fourth

    def _prefix_up_to(self, rows: int) -> IntArray:
        """Return the cumulative cost of rows with 1, 2, ... key tiles, at least ``rows`` rows; cached."""
        prefix = self._prefix
        if len(prefix) <= rows:
            prefix = exclusive_cumsum(
                self.row_cost(np.arange(1, max(rows + 1, 2 * len(prefix))))
            )
            if (
                prefix < 0
            ).any():  # no cost exceeds LARGEST, so a sum that does not fit is negative first
                raise ValueError(
                    f"{rows} rows of tiles take more than {LARGEST} ps by this profile: {SMALLER}"
                )
            object.__setattr__(self, "_prefix", prefix)
        return prefix


@dataclass(frozen=True)
class WindowCost:
    """Cost of tasks whose queries attend to ``window`` keys at most: a row of tiles never touches more than ``most``.

    Tasks are diagonals with all keys of their queries' windows, see ``home_tasks``.
    """

    base: CostModel
    window: int

    @property
    def granularity(self) -> int:
        return self.base.granularity

    @property
    def most(self) -> int:
        """Key tiles of a row of tiles, maximum: that of its last query and those that its first one looks back to."""
        return 1 - (1 - self.window) // self.granularity

    def cost(self, tasks: TaskArray) -> IntArray:
        tile = self.granularity
        first = tasks["q_start"] // tile
        rows = -(-tasks["q_end"] // tile)
        before = first - tasks["kv_start"] // tile
        prefix = self.prefix_cost(tile * int((rows - first + before).max(initial=0)))
        return prefix[rows - first + before] - prefix[before]

    def row_cost(self, num_key_tiles: IntArray) -> IntArray:
        return self.base.row_cost(np.minimum(num_key_tiles, self.most))

    def prefix_cost(self, length: int) -> IntArray:
        return exclusive_cumsum(
            self.row_cost(np.arange(1, -(-length // self.granularity) + 1))
        )

    def max_pairs(self, load: int) -> int:
        return self.base.max_pairs(load)


def cost_model(cost: CostModel | None, tile: int, window: int | None) -> CostModel:
    """Return ``cost``, by default tile area in tiles of ``tile``, for tasks with this window."""
    if cost is None:
        cost = TileAreaCost(tile)
    return (
        cost
        if window is None or isinstance(cost, WindowCost)
        else WindowCost(cost, window)
    )


def isotonic(values: Sequence[Fraction]) -> list[Fraction]:
    """Return the non-decreasing sequence nearest to ``values`` in least squares: averages neighbours out of order."""
    blocks: list[tuple[Fraction, int]] = []
    for value in values:
        total = value
        count = 1
        while blocks and blocks[-1][0] * count > total * blocks[-1][1]:
            total = total + blocks[-1][0]
            count = count + blocks[-1][1]
            blocks.pop()
        blocks.append((total, count))
    means = ([total / count] * count for total, count in blocks)
    return list(chain.from_iterable(means))
