# SPDX-License-Identifier: BSD-3-Clause
"""Bytes that a plan moves into and out of each rank, and the score by which placement compares plans."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from torchtitan_cad.planning.exchange.needs import RowNeeds
from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.shape import AttentionShape

WORST_WEIGHT = 2
"""score = total / total_given + WORST_WEIGHT x worst / worst_given"""

BETWEEN_NODES = 4
"""Price of a byte between nodes over one inside a node: about the ratio of what all-to-alls reach on nodes with NVLink
4 (some 150 GB/s per GPU) and 400 Gb/s InfiniBand (some 40 GB/s)."""


@dataclass(frozen=True, eq=False)
class Traffic:
    """int64 [num_ranks] bytes in and out of every rank, in total and from or to other nodes."""

    bytes_in: IntArray
    bytes_out: IntArray
    inter_in: IntArray
    inter_out: IntArray

    def weighted(self) -> IntArray:
        """Return int64 [2, num_ranks] bytes into and out of every rank, those between nodes ``BETWEEN_NODES`` times."""
        total = np.stack([self.bytes_in, self.bytes_out])
        inter = np.stack([self.inter_in, self.inter_out])
        return total + (BETWEEN_NODES - 1) * inter


class Moved(NamedTuple):
    """Bytes of all ranks, and of the worst rank in or out; a byte between nodes counts ``BETWEEN_NODES`` times."""

    total: int
    worst: int

    @classmethod
    def of(cls, by_rank: IntArray) -> Moved:
        """Return the sums over weighted bytes [2, num_ranks] into and out of every rank."""
        return cls(int(by_rank[0].sum()), int(by_rank.max()))

    def score(self, before: Moved) -> Fraction:
        """Return the objective, relative to the bytes ``before``, of the given homes, which are not 0."""
        return Fraction(self.total, before.total) + WORST_WEIGHT * Fraction(
            self.worst, before.worst
        )


def node_of_ranks(config: PlannerConfig, num_ranks: int) -> IntArray:
    """Return int64 [num_ranks] node of every rank, 0 for all if ``config.ranks_per_node`` is not set."""
    return np.arange(num_ranks, dtype=np.int64) // (
        config.ranks_per_node or max(1, num_ranks)
    )


def measure_traffic(
    shape: AttentionShape, queries: RowNeeds, keys: RowNeeds, node: IntArray
) -> Traffic:
    """Return the traffic of a plan with these needs; ``node`` [num_ranks] is the node of every rank."""
    num_ranks = len(node)
    one_node = not node.any()
    totals = np.zeros((4, num_ranks), dtype=np.int64)
    for needs, row_bytes in ((queries, shape.query_bytes), (keys, shape.kv_bytes)):
        into = needs.rows_in
        out = needs.rows_out
        totals[0] += into * row_bytes
        totals[1] += out * row_bytes
        if not one_node:
            inside_in, inside_out = needs.rows_inside(node)
            totals[2] += (into - inside_in) * row_bytes
            totals[3] += (out - inside_out) * row_bytes
    return Traffic(*totals)
