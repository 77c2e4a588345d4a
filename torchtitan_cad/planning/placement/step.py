# SPDX-License-Identifier: BSD-3-Clause
"""Homes over all microbatches of an optimizer step: which microbatch, and then which rank, holds which documents.

The loss of a step is a sum over its tokens, so that a document may be in any of its microbatches. ``fill`` divides the
documents among microbatches of which each is then placed and planned alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchtitan_cad.planning.exchange.traffic import Moved
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import CostModel
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.placement.fill import fill
from torchtitan_cad.planning.placement.halves import join, place_microbatch
from torchtitan_cad.planning.placement.place import Placed
from torchtitan_cad.planning.placement.reorder import in_stages, light_ends
from torchtitan_cad.planning.plan import Plan, make_plan, moved_by
from torchtitan_cad.planning.timed import LEAST_GAIN, LayerTimes, plan_by_time, stay_home

SURE = 0.35
"""score / score of the given homes: above it, microbatches are placed alone as well"""

Given = Sequence[Sequence[TokenLayout]]
Step = list[list[Placed]]
"""Both: the nano-batches of every microbatch of a step."""


def place_step(
    layouts: Sequence[TokenLayout],
    shape: AttentionShape,
    config: PlannerConfig | None = None,
    cost: CostModel | None = None,
) -> list[TokenLayout]:
    """Choose new homes over the microbatches of an optimizer step: the layouts of :func:`place_and_plan_step`."""
    return [placed.layout for placed in place_and_plan_step(layouts, shape, config, cost)]


def place_and_plan_step(
    layouts: Sequence[TokenLayout],
    shape: AttentionShape,
    config: PlannerConfig | None = None,
    cost: CostModel | None = None,
) -> list[Placed]:
    """Place and plan the microbatches of an optimizer step by bytes, as :func:`plan_step`, one layout for each."""
    return [placed for (placed,) in plan_step([[layout] for layout in layouts], shape, config, cost=cost)]


def plan_step(
    given: Given,
    shape: AttentionShape,
    config: PlannerConfig | None = None,
    times: LayerTimes | None = None,
    cost: CostModel | None = None,
    *,
    place: bool = True,
    stages: int = 1,
) -> Step:
    """Assign the documents of an optimizer step to its microbatches and ranks anew, and plan each microbatch.

    Every rank has as many tokens in every microbatch as before, and every document lies in one microbatch. Equal inputs
    give equal homes on every rank. Microbatches keep their documents, and are placed alone, where no others of the same
    number of tokens are found, or where that is better: by the ``score`` of all plans, or by predicted time.

    Args:
        given: of every microbatch, its nano-batches: one, two halves by rows, or two halves of which the later attends
            to the earlier. All have the same ranks; no document is in two microbatches.
        times: rates by which plans are chosen; None: plans of ``config.tolerance``, judged by their bytes.
        place: False: all tokens stay where they are, and microbatches are planned alone.
        stages: pipeline stages that run the microbatches one after the other. With more than one, microbatches get
            equal work where that is possible, and the last and the first the least: pipelines fill and drain by them.

    Raises:
        ValueError: as ``make_plan``; to place, no microbatch, unequal numbers of ranks, a document in two microbatches.
    """
    if place:
        _check(given)
    config = (config or PlannerConfig()).for_window(shape.window)
    if times is None:
        step = _by_bytes(given, shape, config, cost, place=place, stages=stages)
    else:
        step = _by_time(given, shape, config, times, cost, place=place, stages=stages)
    return _light_ends(step) if place and stages > 1 else step


def _check(given: Given) -> None:
    if len(ranks := {layout.num_ranks for nanos in given for layout in nanos}) != 1:
        raise ValueError(f"microbatches of a step need the same ranks, got numbers of ranks {sorted(ranks)}")
    docs, counts = np.unique(np.concatenate([each.docs for each in _holders(given)]), return_counts=True)
    if (counts > 1).any():
        raise ValueError(
            f"document {docs[counts > 1][0]} is in two microbatches: give the documents of a step ids of their own"
        )


def _by_bytes(
    given: Given, shape: AttentionShape, config: PlannerConfig, cost: CostModel | None, *, place: bool, stages: int
) -> Step:
    how = shape, config, cost
    plans = [[make_plan(layout, *how) for layout in nanos] for nanos in given]
    stay = [[Placed(plan.layout, plan, plan) for plan in nanos] for nanos in plans]
    before = _moved(stay)
    if not place or config.planner == "home" or not (before.worst or stages > 1):
        return stay
    made = list[list[Placed]]()
    if refilled := _refilled(given, stages):
        made = _finish([place_microbatch(parts, *how) for parts in refilled], given, plans, shape, cost)
    if not before.worst:  # all have the same, nothing
        return made or stay
    if not made or _moved(made).score(before) > SURE * before.score(before):
        alone = [place_microbatch(nanos, *how) for nanos in given]
        if not made or _moved(alone).score(before) <= _moved(made).score(before):
            return alone
    return made


def _by_time(
    given: Given,
    shape: AttentionShape,
    config: PlannerConfig,
    times: LayerTimes,
    cost: CostModel | None,
    *,
    place: bool,
    stages: int,
) -> Step:
    def seconds(step: Step) -> float:
        each = [times.microbatch_seconds([placed.plan for placed in nanos]) for nanos in step]
        return in_stages(np.array(each), stages)

    def plan(nanos: Sequence[TokenLayout]) -> list[Placed]:
        return plan_by_time(nanos, shape, config, times, cost, place=place)

    home = [stay_home(nanos, shape, config, cost) for nanos in given]
    even = sum(times.best_seconds(placed.plan) for nanos in home for placed in nanos)
    even += (stages - 1) * even / len(given)  # of equal microbatches
    least = (1 - LEAST_GAIN) * seconds(home)
    if config.planner == "home" or even > least:
        return home
    steps = []
    if refilled := _refilled(given, stages) if place else []:
        made = [plan(parts) for parts in refilled]
        plans = [
            [make_plan(layout, shape, placed.plan.config, cost) for layout, placed in zip(nanos, parts, strict=True)]
            for nanos, parts in zip(given, made, strict=True)
        ]
        steps.append(_finish(made, given, plans, shape, cost))
    if not steps or seconds(steps[0]) > (1 + LEAST_GAIN) * even:
        steps.append([plan(nanos) for nanos in given])
    best = min(steps, key=seconds)
    return best if seconds(best) < least else home


def _light_ends(step: Step) -> Step:
    """Return the microbatches in another order, if they have the same numbers of tokens and different work."""
    tokens = np.array([[placed.layout.queries_per_rank for placed in nanos] for nanos in step])
    work = [sum(placed.plan.stats.mean_load * placed.plan.stats.max_over_mean for placed in nanos) for nanos in step]
    if (tokens != tokens[0]).any() or max(work) <= (1 + LEAST_GAIN) * min(work):
        return step
    return [
        [Placed(new.layout, new.plan, old.given) for new, old in zip(step[i], nanos, strict=True)]
        for i, nanos in zip(light_ends(np.array(work)), step, strict=True)
    ]


def _moved(step: Step) -> Moved:
    return moved_by(*(placed.plan for nanos in step for placed in nanos))


def _holders(given: Given) -> list[TokenLayout]:
    """Return the layouts that hold each of the step's tokens once: without halves that are keys of the later ones."""
    return [layout for nanos in given for layout in (nanos if nanos[-1].seg_attends.all() else nanos[-1:])]


def _refilled(given: Given, stages: int) -> Given:
    """Return the microbatches with other documents, none of which is in two nano-batches; empty if none are found."""
    if sum(map(len, given)) == 1:
        return []
    holders = _holders(given)
    docs, lengths = (np.concatenate([getattr(each, name) for each in holders]) for name in ("docs", "doc_lengths"))
    rooms, count = [layout.queries_per_rank for nanos in given for layout in nanos], len(given[0])
    parts = fill(docs, lengths, rooms, together=len(rooms) if stages > 1 else count)
    return [parts[i : i + count] for i in range(0, len(parts), count)]


def _finish(
    placed: Step, given: Given, plans: Sequence[Sequence[Plan]], shape: AttentionShape, cost: CostModel | None
) -> Step:
    """Return refilled microbatches with the ``plans`` for the given ones; later halves get the earlier ones' keys."""
    step = []
    for nanos, layouts, of_given in zip(placed, given, plans, strict=True):
        if not layouts[-1].seg_attends.all():
            nanos = [nanos[0], join(nanos[0], nanos[1], shape, cost)]
        step.append([Placed(each.layout, each.plan, plan) for each, plan in zip(nanos, of_given, strict=True)])
    return step
