"""The score by which placement compares plans."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from torchtitan_cad.planning.exchange.traffic import measure_traffic, node_of_ranks
from torchtitan_cad.planning.plan import Plan

WORST_WEIGHT = 2
"""score = total / total_given + WORST_WEIGHT x worst / worst_given"""


class Moved(NamedTuple):
    """Bytes of all ranks, and of the worst rank in or out; a byte between nodes counts ``inter_node_weight`` times."""

    total: int
    worst: int

    @classmethod
    def by(cls, *plans: Plan) -> Moved:
        """Return the sums over plans that are executed one after the other."""
        total = worst = 0
        for plan in plans:
            node = node_of_ranks(plan.config, plan.layout.num_ranks)
            traffic = measure_traffic(plan.shape, plan.query_needs, plan.key_needs, node)
            each = traffic.weighted(plan.config.inter_node_weight)
            total, worst = total + each[0], worst + each[1]
        return cls(total, worst)

    def score(self, given: Moved) -> Fraction:
        """Return the objective, relative to the bytes of the given homes, which are not 0."""
        return Fraction(self.total, given.total) + WORST_WEIGHT * Fraction(self.worst, given.worst)
