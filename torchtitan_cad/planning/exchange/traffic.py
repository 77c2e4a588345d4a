# SPDX-License-Identifier: BSD-3-Clause
"""Bytes that a plan moves into and out of each rank, and the score by which placement compares plans."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from torchtitan_cad.planning.exchange.needs import RowNeeds
from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.model.config import PlannerConfig

WORST_WEIGHT = 2
"""score = total / total_given + WORST_WEIGHT x worst / worst_given"""

BETWEEN_NODES = 4
"""Price of a byte between nodes over one inside a node: about the ratio of what all-to-alls reach on nodes with NVLink
4 (some 150 GB/s per GPU) and 400 Gb/s InfiniBand (some 40 GB/s)."""


class Traffic(NamedTuple):
    """int64 [2, num_ranks] bytes into and out of every rank: all of them, and those between nodes."""

    total: IntArray
    between: IntArray

    def weighted(self) -> IntArray:
        """Return int64 [2, num_ranks] the bytes, those between nodes ``BETWEEN_NODES`` times."""
        return self.total + (BETWEEN_NODES - 1) * self.between


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
    needs: Sequence[RowNeeds], row_bytes: Sequence[int], node: IntArray
) -> Traffic:
    """Return the traffic of a plan with these needs; ``node`` [num_ranks] is the node of every rank.

    Args:
        needs: of queries and of keys.
        row_bytes: bytes of a query row and of a key row; 0 for rows that do not travel.
    """
    total = np.zeros((2, len(node)), dtype=np.int64)
    between = np.zeros_like(total)
    for of_kind, num_bytes in zip(needs, row_bytes, strict=True):
        total += num_bytes * of_kind.rows
        between += num_bytes * of_kind.rows_between(node)
    return Traffic(total, between)
