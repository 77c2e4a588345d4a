# SPDX-License-Identifier: BSD-3-Clause
"""Homes and plans for all kinds of a model's attention: layers share homes, and every kind has plans of its own.

The first kind, whose queries see whole documents where the model has such layers, places documents. The homes are kept
if they are better for the model's layers of all kinds together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchtitan_cad.planning.exchange.traffic import Moved
from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import CostModel
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.planning.pipeline.one_f_one_b import in_stages
from torchtitan_cad.planning.placement.place import Placed
from torchtitan_cad.planning.placement.step import Given, Step, plan_step
from torchtitan_cad.planning.plan import moved_by
from torchtitan_cad.planning.timed import LayerTimes


def plan_kinds(
    given: Given,
    kinds: Sequence[AttentionKind],
    columns: IntArray,
    config: PlannerConfig | None = None,
    times: LayerTimes | None = None,
    cost: CostModel | None = None,
    *,
    place: bool = True,
    stages: int = 1,
) -> list[Step]:
    """Plan an optimizer step for every kind of attention, on homes that they share; see ``plan_step``.

    Args:
        kinds: of the model; only the others than the first may be chunked.
        columns: of each document's first token in the row that it was loaded in, by document id.

    Returns:
        For each kind the step; its layouts hold the same tokens in the same rows, with documents as the kind cuts them.

    Raises:
        ValueError: as ``plan_step``.
    """

    def plan(homes: Given, kind: AttentionKind) -> Step:
        layouts = [[kind.layout(layout, columns) for layout in nanos] for nanos in homes]
        return plan_step(layouts, kind.shape, config, times, cost, place=False)

    first = plan_step(given, kinds[0].shape, config, times, cost, place=place, stages=stages)
    homes = [[placed.layout for placed in nanos] for nanos in first]
    steps = [first, *(plan(homes, kind) for kind in kinds[1:])]
    if len(kinds) == 1 or _flat(homes) == _flat(given):  # layouts are equal if they are the same
        return steps
    stay = [plan(given, kind) for kind in kinds]
    if not _is_better(steps, stay, kinds, times, stages):
        return stay
    return [first, *(_replacing(old, new) for old, new in zip(stay[1:], steps[1:], strict=True))]


def _is_better(
    steps: list[Step], stay: list[Step], kinds: Sequence[AttentionKind], times: LayerTimes | None, stages: int
) -> bool:
    """Tell whether steps of all kinds take less time than others or, without rates, move fewer bytes."""
    if times is not None:
        return _seconds(steps, kinds, times, stages) < _seconds(stay, kinds, times, stages)
    new, old = _moved(steps, kinds), _moved(stay, kinds)
    return new.score(old) < old.score(old) if old.worst else stages > 1  # homes for equal work, as nothing moved before


def _seconds(steps: list[Step], kinds: Sequence[AttentionKind], times: LayerTimes, stages: int) -> float:
    each = [[times.microbatch_seconds([placed.plan for placed in nanos]) for nanos in step] for step in steps]
    layers = np.array([kind.layers for kind in kinds])
    return in_stages(layers @ np.array(each), stages)


def _moved(steps: list[Step], kinds: Sequence[AttentionKind]) -> Moved:
    """Return what all layers move."""
    moved = [moved_by(*(placed.plan for placed in _flat(step))) for step in steps]
    pairs = list(zip(kinds, moved, strict=True))
    return Moved(
        sum(kind.layers * each.total for kind, each in pairs), sum(kind.layers * each.worst for kind, each in pairs)
    )


def _replacing(old: Step, new: Step) -> Step:
    """Return the new homes and plans, with the old plans as those for the given homes."""
    return [
        [Placed(after.layout, after.plan, before.plan) for before, after in zip(*nanos, strict=True)]
        for nanos in zip(old, new, strict=True)
    ]


def _flat(step: Sequence[Sequence]) -> list:
    return [each for nanos in step for each in nanos]
