"""What a plan moves, and which of two plans moves less: one scoring for all comparisons of plans."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from torchtitan_cad.planning.exchange.traffic import measure_traffic, node_of_ranks
from torchtitan_cad.planning.plan import Plan

WORST_WEIGHT = 2
"""Weight of the worst rank's bytes against the total, both relative to those of the given homes."""


class Moved(NamedTuple):
    """Bytes of all ranks, and of the worst, in or out; one between nodes counts ``inter_node_weight`` times."""

    total: int
    worst: int

    @classmethod
    def by(cls, *plans: Plan) -> Moved:
        """Sum what plans that are executed one after the other move."""
        total = worst = 0
        for plan in plans:
            node = node_of_ranks(plan.config, plan.layout.num_ranks)
            traffic = measure_traffic(plan.shape, plan.query_needs, plan.key_needs, node)
            each = traffic.weighted(plan.config.inter_node_weight)
            total, worst = total + each[0], worst + each[1]
        return cls(total, worst)

    def score(self, given: Moved) -> Fraction:
        """Return what is to be small, relative to bytes that are not 0."""
        return Fraction(self.total, given.total) + WORST_WEIGHT * Fraction(self.worst, given.worst)
