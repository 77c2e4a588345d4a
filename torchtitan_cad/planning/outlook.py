# SPDX-License-Identifier: BSD-3-Clause
"""What an optimizer step takes as loaded, with whole rows reordered, and with core attention disaggregated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray, IntArray
from torchtitan_cad.planning.model.batch import BatchShape, nano_layouts
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import CostModel, TileAreaCost
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.planning.pipeline.one_f_one_b import in_stages
from torchtitan_cad.planning.placement.kinds import plan_kinds
from torchtitan_cad.planning.placement.reorder import row_loads
from torchtitan_cad.planning.plan import Plan
from torchtitan_cad.planning.timed import LayerTimes


@dataclass(frozen=True)
class Outlook:
    """Predicts steps of a CAD group.

    Attributes:
        kinds, config, cost, nano_batches: how CAD would plan.
        cp, stages: ranks of a row, and pipeline stages that run the microbatches one after the other.
        times: rates of this machine; None if they are not known.
        by_time: whether CAD would plan by these rates.
        layers: of attention that a rank runs.
    """

    kinds: Sequence[AttentionKind]
    config: PlannerConfig
    cost: CostModel | None
    nano_batches: int
    cp: int
    stages: int
    times: LayerTimes | None
    by_time: bool
    layers: int

    def plan(self, starts: Sequence[IntArray], shape: BatchShape, *, place: bool) -> list[list[list[Plan]]]:
        """Plan a step with CAD: for every kind and microbatch, its nano-batches.

        Args:
            starts: of every data-parallel rank, where the documents of its rows begin; ``shape`` is of these rows.
            place: whether tokens may get other homes.
        """
        layouts = [nano_layouts(starts, shape, i, self.cp, self.nano_batches) for i in range(shape.microbatches)]
        how = np.concatenate(starts) % shape.seq_len, self.config, self.times if self.by_time else None, self.cost
        steps = plan_kinds(layouts, self.kinds, *how, place=place, stages=self.stages)
        return [[[each.plan for each in nanos] for nanos in step] for step in steps]

    def without(
        self, starts: Sequence[IntArray], shape: BatchShape, plans: Sequence[Sequence[Sequence[Plan]]]
    ) -> dict[str, Any]:
        """Return the figures of a step without CAD, and if rates are known, seconds of all layers without and with it.

        Imbalances and loads are sums over ``plans``, those with CAD.
        """
        cost = self.cost or TileAreaCost(self.config.cost_tile)
        # torchtitan's context parallelism divides the attention of a row evenly.
        loads_of_rows = row_loads(starts, shape, self.kinds, cost, self.stages)
        ways = [np.repeat(each, self.cp, axis=0) / self.cp for each in loads_of_rows]
        loaded, reordered = (self.nano_batches * each / np.maximum(each.mean(axis=0), 1e-9) for each in ways)
        figures: dict[str, Any] = {
            "imbalance_before": loaded.max(axis=0).sum(),
            "imbalance_reordered": reordered.max(axis=0).sum(),
            "loads_before": ways[0].sum(axis=1),
            "ranked_before": -np.sort(-loaded, axis=0).sum(axis=1),
        }
        if self.times is not None:
            linear = self.times.linear * shape.rows_per_microbatch * shape.seq_len / self.cp
            seconds = [linear + self.times.unit * loads.max(axis=0) for loads in ways]
            layers = np.array([kind.layers for kind in self.kinds])
            of_kinds = [[self.times.microbatch_seconds(nanos) for nanos in kind] for kind in plans]
            seconds.append(layers @ np.array(of_kinds) / layers.sum())
            names = "seconds_before", "seconds_reordered", "seconds_after"
            figures |= {name: self._of_step(each) for name, each in zip(names, seconds, strict=True)}
        return figures

    def _of_step(self, microbatches: FloatArray) -> float:
        return self.layers * in_stages(microbatches, self.stages)


def speedups(figures: dict[str, Any], step_seconds: float) -> dict[str, float]:
    """Return how many times as fast a step is with rows reordered and with CAD that takes ``step_seconds`` without.

    Empty for ``figures`` without seconds.
    """
    if "seconds_before" not in figures:
        return {}
    before = figures["seconds_before"]
    share = min(1.0, before / step_seconds)  # rates may be a little off
    ways = "reordered", "after"
    return {f"speedup_{way}": 1 / (1 - share * (1 - figures[f"seconds_{way}"] / before)) for way in ways}
