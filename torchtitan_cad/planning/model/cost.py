# SPDX-License-Identifier: BSD-3-Clause
"""Cost of a task on its server.

Costs are integers, so that sums do not depend on their order and every rank computes the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchtitan_cad.planning.intervals import IntArray, causal_pairs
from torchtitan_cad.planning.model.tasks import TaskArray, is_diagonal

LARGEST = 2**62
"""saturation value of loads and pairs; the sum of two still fits in int64."""


@dataclass(frozen=True)
class TileAreaCost:
    """Number of tile x tile squares of the document's (query, key) plane that a task touches.

    The grid starts at the document's first token. A causal kernel skips the squares above the diagonal and computes
    squares on the diagonal in full, so this is the kernel's arithmetic up to a constant. A task that starts inside a
    row of tiles pays for the whole row. If ranks share a row of tiles, because a document that spans them is cut
    inside it, each of them pays for the row.

    Planners and the guarantee on the maximum load rely on what follows: cutting a task along the queries at a multiple
    of ``granularity`` leaves the sum of costs unchanged, joining tasks with ``merge_queries`` never raises it, and a
    row of tiles does not cost less further down the document.

    Attributes:
        granularity: tokens of a tile's edge.
        window: keys that a query attends to at most; None: all before it. With a window, tasks are diagonals with all
            keys of their queries' windows, see ``home_tasks``.
    """

    granularity: int = 128
    window: int | None = None

    @property
    def most(self) -> int | None:
        """Key tiles of a row of tiles, maximum: that of its last query and those that its first one looks back to."""
        if self.window is None:
            return None
        return 1 - (1 - self.window) // self.granularity

    def cost(self, tasks: TaskArray) -> IntArray:
        """Return int64 [n] cost of each task."""
        tile = self.granularity
        q_first = tasks["q_start"] // tile
        q_stop = -(-tasks["q_end"] // tile)
        k_first = tasks["kv_start"] // tile
        k_stop = -(-tasks["kv_end"] // tile)
        # A row of tiles ends with its diagonal square.
        above = causal_pairs(q_first - k_first, self.most)
        causal = causal_pairs(q_stop - k_first, self.most) - above
        rectangle = (q_stop - q_first) * (k_stop - k_first)
        return np.where(is_diagonal(tasks), causal, rectangle)

    def prefix_cost(self, length: int) -> IntArray:
        """Return int64 [ceil(length / granularity) + 1]: cost of the first 0, 1, 2 ... rows of tiles against all keys.

        Queries [a, b) of a document against their full prefix cost P[ceil(b / granularity)] - P[a // granularity].
        """
        rows = np.arange(-(-length // self.granularity) + 1, dtype=np.int64)
        return causal_pairs(rows, self.most)

    def max_pairs(self, load: int) -> int:
        """Return the most (query, key) pairs that tasks of total cost ``load`` can contain; for lower bounds."""
        return load * self.granularity**2
