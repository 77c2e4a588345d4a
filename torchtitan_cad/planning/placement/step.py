# SPDX-License-Identifier: BSD-3-Clause
"""Homes over all microbatches of an optimizer step: which microbatch, and then which rank, holds which documents.

The loss of a step is a sum over its tokens, so that a document may be in any of its microbatches. ``fill`` divides the
documents among microbatches of which each is then placed and planned alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from torchtitan_cad.planning.arguments import check_step, complete_config, holders
from torchtitan_cad.planning.exchange.traffic import Moved
from torchtitan_cad.planning.intervals import FloatArray, IntArray
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import CostModel
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.pipeline.one_f_one_b import best_order, best_profile, in_stages
from torchtitan_cad.planning.placement.fill import FILLED, fill
from torchtitan_cad.planning.placement.halves import join, place_microbatch
from torchtitan_cad.planning.placement.place import Placed
from torchtitan_cad.planning.plan import Plan, make_plan, moved_by
from torchtitan_cad.planning.timed import LEAST_GAIN, LayerTimes, plan_by_time, stay_home

SURE, SURE_WORST = 0.35, 0.25
"""bytes in total, and of the worst rank / those of the given homes: above, microbatches are placed alone as well"""

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
    number of tokens are found, or where that is better: by the bytes of all plans, or by predicted time. A step
    without tokens stays home.

    Args:
        given: of every microbatch, its nano-batches: one, two halves by rows, or two halves of which the later attends
            to the earlier. All have the same ranks; no document is in two microbatches.
        times: rates by which plans are chosen; None: plans of ``config.tolerance``, judged by their bytes.
        place: False: all tokens stay where they are, and microbatches are planned alone.
        stages: pipeline stages that run the microbatches one after the other. With more than one, microbatches get
            the attention, and the order, with which 1F1B takes least time, as far as whole documents allow.

    Raises:
        ValueError: as ``make_plan``; unequal numbers of nano-batches, or no stage; to place, no microbatch,
            unequal numbers of ranks, a document in two microbatches.
    """
    check_step(given, stages, place=place)
    config = complete_config(shape, config)
    if not any(len(layout.docs) for nanos in given for layout in nanos):  # no tokens
        return [stay_home(nanos, shape, config, cost) for nanos in given]
    if times is None:
        step = _by_bytes(given, shape, config, cost, place=place, stages=stages)
        if not place or stages == 1:
            return step
        work = [sum(each.plan.stats.mean_load * each.plan.stats.max_over_mean for each in nanos) for nanos in step]
        return _reordered(step, np.array(work), float(np.mean(work)), stages)
    return _by_time(given, shape, config, times, cost, place=place, stages=stages)


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
    moved = _moved(made)
    if made and moved.total <= SURE * before.total and moved.worst <= SURE_WORST * before.worst:
        return made
    alone = [place_microbatch(nanos, *how) for nanos in given]
    least = _moved(alone)
    exceeds = stages == 1 and (moved.total > least.total or moved.worst > least.worst)
    return alone if not made or exceeds or least.score(before) <= moved.score(before) else made


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
        attention, linear = _parts(step, times)
        return in_stages(attention, stages, linear)

    plan = partial(plan_by_time, shape=shape, config=config, times=times, cost=cost, place=place)
    home = [stay_home(nanos, shape, config, cost) for nanos in given]
    linear = sum(times.linear_seconds(placed.layout) for nanos in home for placed in nanos)
    even = sum(times.best_seconds(placed.plan) for nanos in home for placed in nanos)
    least = (1 - LEAST_GAIN) * seconds(home)
    if config.planner == "home" or even + (stages - 1) * linear / len(given) > least:
        return home
    steps = []
    if refilled := _refilled(given, stages, linear / (even - linear)) if place else []:
        made = [plan(parts) for parts in refilled]
        plans = [
            [make_plan(layout, shape, placed.plan.config, cost) for layout, placed in zip(nanos, parts, strict=True)]
            for nanos, parts in zip(given, made, strict=True)
        ]
        steps.append(_finish(made, given, plans, shape, cost))
    even += (stages - 1) * even / len(given)  # of equal microbatches
    if not steps or seconds(steps[0]) > (1 + LEAST_GAIN) * even:
        steps.append([plan(nanos, home=stay) for nanos, stay in zip(given, home, strict=True)])
    if place and stages > 1:
        steps = [_reordered(step, *_parts(step, times), stages) for step in steps]
    taken = [seconds(step) for step in steps]
    return steps[int(np.argmin(taken))] if min(taken) < least else home


def _parts(step: Step, times: LayerTimes) -> tuple[FloatArray, float]:
    """Return the seconds of every microbatch's layer, less those of the mean one's linear work, and these."""
    linear = sum(times.linear_seconds(placed.layout) for nanos in step for placed in nanos) / len(step)
    each = [times.microbatch_seconds([placed.plan for placed in nanos]) for nanos in step]
    return np.array(each) - linear, linear


def _reordered(step: Step, attention: FloatArray, linear: float, stages: int) -> Step:
    """Return the microbatches in the order that pipelines like best, if they have the same numbers of tokens."""
    tokens = np.array([[placed.layout.queries_per_rank for placed in nanos] for nanos in step])
    if (tokens != tokens[0]).any():
        return step
    return [
        [Placed(new.layout, new.plan, old.given) for new, old in zip(step[i], nanos, strict=True)]
        for i, nanos in zip(best_order(attention, stages, linear), step, strict=True)
    ]


def _moved(step: Step) -> Moved:
    return moved_by(*(placed.plan for nanos in step for placed in nanos))


def _refilled(given: Given, stages: int, linear: float = 1.0) -> Given:
    """Return the microbatches with other documents, none of which is in two nano-batches; empty if none are found.

    Args:
        linear: times that of attention in the whole step, which only pipelines ask for.
    """
    if sum(map(len, given)) == 1:
        return []
    held = holders(given)
    docs, lengths = (np.concatenate([getattr(each, name) for each in held]) for name in ("docs", "doc_lengths"))
    rooms, count = [layout.queries_per_rank for nanos in given for layout in nanos], len(given[0])
    if stages == 1 or len(given) == 1:
        parts = fill(docs, lengths, rooms, together=count)
    else:
        parts = _fill_stages(docs, lengths, rooms, len(given), stages, linear)
    return [parts[i : i + count] for i in range(0, len(parts), count)]


def _fill_stages(
    docs: IntArray, lengths: IntArray, rooms: list[IntArray], count: int, stages: int, linear: float
) -> list[TokenLayout]:
    """Fill ``count`` microbatches of a pipeline: all alike, or with the attention of ``best_profile``, or between."""
    work = lengths.astype(np.float64) ** 2
    linear *= work.sum() / count
    wanted = best_profile(work, count, stages, linear)
    less = np.repeat((wanted.max() - wanted) * count / len(rooms), len(rooms) // count)

    def seconds(parts: list[TokenLayout]) -> float:
        each = np.array([(part.doc_lengths.astype(np.float64) ** 2).sum() for part in parts]).reshape(count, -1)
        return in_stages(each.sum(axis=1)[best_order(each.sum(axis=1), stages, linear)], stages, linear)

    for filled in (FILLED, 4 * FILLED):
        ways = ((share * less).tolist() for share in (1.0, 0.5, 0.0))
        made = [fill(docs, lengths, rooms, together=len(rooms), less=each, filled=filled) for each in ways]
        if any(made):
            return min(filter(None, made), key=seconds)
    return []


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
