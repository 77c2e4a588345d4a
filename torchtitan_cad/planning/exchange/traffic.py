"""Bytes that a plan moves into and out of each rank, in total and between nodes."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from torchtitan_cad.planning.exchange.needs import RowNeeds
from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.shape import AttentionShape


@dataclass(frozen=True, eq=False)
class Traffic:
    """int64 [num_ranks] bytes in and out of every rank, in total and from or to other nodes."""

    bytes_in: IntArray
    bytes_out: IntArray
    inter_in: IntArray
    inter_out: IntArray

    def weighted(self, inter_node_weight: float) -> tuple[int, int]:
        """Return the bytes of all ranks, and of the worst in or out; those between nodes count by their weight.

        Both are integers, in a unit that depends on the weight alone.
        """
        weight = _node_weight(inter_node_weight)
        local, extra = weight.denominator, weight.numerator - weight.denominator
        into = local * self.bytes_in + extra * self.inter_in
        out = local * self.bytes_out + extra * self.inter_out
        return int(into.sum()), int(max(into.max(), out.max()))


def _node_weight(inter_node_weight: float) -> Fraction:
    return Fraction(inter_node_weight).limit_denominator(1000)


def node_of_ranks(config: PlannerConfig, num_ranks: int) -> IntArray:
    """Return int64 [num_ranks] node of every rank, 0 for all if ``config.ranks_per_node`` is not set."""
    return np.arange(num_ranks, dtype=np.int64) // (config.ranks_per_node or max(1, num_ranks))


def node_prices(config: PlannerConfig, num_ranks: int) -> tuple[IntArray, int, int]:
    """Return int64 [num_ranks] nodes, and the prices of a byte inside a node and between nodes as in ``weighted``."""
    node = node_of_ranks(config, num_ranks)
    weight = _node_weight(config.inter_node_weight) if num_ranks and node[-1] else Fraction(1)
    return node, weight.denominator, weight.numerator


def measure_traffic(shape: AttentionShape, queries: RowNeeds, keys: RowNeeds, node: IntArray) -> Traffic:
    """Return the traffic of a plan with these needs; ``node`` [num_ranks] is the node of every rank."""
    num_ranks = len(node)
    one_node = num_ranks == 0 or node[-1] == 0
    totals = np.zeros((4, num_ranks), dtype=np.int64)
    for needs, row_bytes in ((queries, shape.query_bytes), (keys, shape.kv_bytes)):
        into, out = needs.rows_in, needs.rows_out
        totals[0] += into * row_bytes
        totals[1] += out * row_bytes
        if not one_node:
            inside_in, inside_out = needs.rows_inside(node)
            totals[2] += (into - inside_in) * row_bytes
            totals[3] += (out - inside_out) * row_bytes
    return Traffic(*totals)
