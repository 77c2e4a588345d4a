# SPDX-License-Identifier: BSD-3-Clause
"""Homes and plans over all microbatches of an optimizer step, for all kinds of a model's attention.

The loss of a step is a sum over its tokens, so that a document may be in any of its microbatches. ``fill`` divides the
documents among microbatches of which each is then placed and planned alone.

Layers share homes, and every kind of attention has plans of its own. The first kind, whose queries see whole documents
where the model has such layers, places documents. The homes are kept if they are better for the layers of all kinds
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from torchtitan_cad.planning.arguments import check_step, complete_config, holders
from torchtitan_cad.planning.exchange.traffic import Moved
from torchtitan_cad.planning.intervals import FloatArray, IntArray
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.pipeline.one_f_one_b import (
    best_order,
    best_profile,
    in_stages,
)
from torchtitan_cad.planning.placement.fill import FILLED, fill
from torchtitan_cad.planning.placement.microbatch import (
    LEAST_GAIN,
    PlannedMicrobatch,
    place_microbatch,
    plan_by_time,
    plan_in_place,
    stay_home,
    with_earlier_keys,
)
from torchtitan_cad.planning.plan import Plan, make_plan, moved_by
from torchtitan_cad.planning.timed import LayerTimes

ACCEPTED_TOTAL = 0.35
ACCEPTED_WORST = 0.25
"""Refilled microbatches are taken without a look at the given ones if they move at most these shares of the bytes that
the given homes move: of all ranks, and of the worst rank."""

Microbatches = Sequence[Sequence[TokenLayout]]
"""The layouts of the nano-batches of every microbatch of a step."""
Step = list[PlannedMicrobatch]


def plan_step(
    microbatches: Microbatches,
    kinds: Sequence[AttentionKind],
    config: PlannerConfig | None = None,
    times: LayerTimes | None = None,
    *,
    columns: IntArray | None = None,
    place: bool = True,
    stages: int = 1,
) -> list[PlannedMicrobatch]:
    """Assign the documents of an optimizer step to its microbatches and ranks anew, and plan each microbatch.

    Every rank has as many tokens in every microbatch as before, and every document lies in one microbatch. Equal inputs
    give equal homes on every rank. Microbatches keep their documents, and are placed alone, where no others of the same
    number of tokens are found, or where that is better: by the bytes of all plans, or by predicted time. A step
    without tokens stays home.

    Args:
        microbatches: of each, its nano-batches: one, two nano-batches by rows, or two nano-batches of which the
            later attends to the earlier. All have the same ranks; no document is in two microbatches.
        kinds: of the model's attention; only the others than the first may be chunked.
        times: rates by which plans are chosen; None: plans of ``config.tolerance``, judged by their bytes.
        columns: of each document's first token in the row that it was loaded in, by document id; for chunked attention.
        place: False: all tokens stay where they are, and microbatches are planned alone.
        stages: pipeline stages that run the microbatches one after the other. With more than one, microbatches get
            the attention, and the order, with which 1F1B takes least time, as far as whole documents allow.

    Raises:
        ValueError: as ``make_plan``; unequal numbers of nano-batches, or no stage; to place, no microbatch,
            unequal numbers of ranks, a document in two microbatches.
    """
    check_step(microbatches, kinds, stages, place=place)

    def plan_in_homes(homes: Microbatches, kind: AttentionKind) -> Step:
        layouts = [
            [kind.layout(layout, columns) for layout in nanos] for nanos in homes
        ]
        return _StepPlanner(
            kind.shape, complete_config(kind.shape, config), times, False, 1
        ).plan(layouts)

    shape = kinds[0].shape
    first = _StepPlanner(
        shape, complete_config(shape, config), times, place, stages
    ).plan(microbatches)
    if len(kinds) == 1:
        return first
    homes = [microbatch.layouts for microbatch in first]
    steps = [first, *(plan_in_homes(homes, kind) for kind in kinds[1:])]
    # layouts are equal if they are the same
    if homes == [list(nanos) for nanos in microbatches]:
        return _of_all_kinds(steps)
    stay = [plan_in_homes(microbatches, kind) for kind in kinds]
    if not _is_better(steps, stay, kinds, times, stages):
        return _of_all_kinds(stay)
    old = [[microbatch.plans[0] for microbatch in step] for step in stay]
    old[0] = [microbatch.given_plans[0] for microbatch in first]
    return [
        PlannedMicrobatch(microbatch.plans, given_plans)
        for microbatch, *given_plans in zip(_of_all_kinds(steps), *old, strict=True)
    ]


def _of_all_kinds(steps: Sequence[Step]) -> Step:
    """Return a step with the plans of all kinds, from a step of each."""
    return [
        PlannedMicrobatch(
            [microbatch.plans[0] for microbatch in by_kind],
            [microbatch.given_plans[0] for microbatch in by_kind],
        )
        for by_kind in zip(*steps, strict=True)
    ]


def _is_better(
    steps: Sequence[Step],
    stay: Sequence[Step],
    kinds: Sequence[AttentionKind],
    times: LayerTimes | None,
    stages: int,
) -> bool:
    """Tell whether steps of all kinds take less time than others or, without rates, move fewer bytes."""
    if times is not None:
        return _all_seconds(steps, kinds, times, stages) < _all_seconds(
            stay, kinds, times, stages
        )
    new = _all_moved(steps, kinds)
    old = _all_moved(stay, kinds)
    # homes for equal work, as nothing moved before
    return new.score(old) < old.score(old) if old.worst else stages > 1


def _all_seconds(
    steps: Sequence[Step],
    kinds: Sequence[AttentionKind],
    times: LayerTimes,
    stages: int,
) -> float:
    seconds = [
        [times.microbatch_seconds(microbatch.plans[0]) for microbatch in step]
        for step in steps
    ]
    layers = np.array([kind.layers for kind in kinds])
    return in_stages(layers @ np.array(seconds), stages)


def _all_moved(steps: Sequence[Step], kinds: Sequence[AttentionKind]) -> Moved:
    """Return what all layers move."""
    moved = [
        kind.layers * np.array(_moved(step))
        for kind, step in zip(kinds, steps, strict=True)
    ]
    return Moved(*np.sum(moved, axis=0).tolist())


def _moved(step: Step) -> Moved:
    return moved_by(*_plans(step))


def _plans(step: Step) -> list[Plan]:
    """Return the plans of all microbatches, of the first kind."""
    return [*chain(*(microbatch.plans[0] for microbatch in step))]


@dataclass(frozen=True)
class _StepPlanner:
    """Plans steps for one kind of attention; the arguments of ``plan_step``."""

    shape: AttentionShape
    config: PlannerConfig
    times: LayerTimes | None
    place: bool
    stages: int

    def plan(self, microbatches: Microbatches) -> Step:
        """Plan the microbatches, and maybe place them."""
        # no tokens
        if not any(len(layout.docs) for layout in chain(*microbatches)):
            return self._stay_home(microbatches)
        if self.times is not None:
            return self._by_time(microbatches, self.times)
        step = self._by_bytes(microbatches)
        if not self.place or self.stages == 1:
            return step
        work = []
        for microbatch in step:
            stats = [plan.stats for plan in microbatch.plans[0]]
            work.append(sum(nano.mean_load * nano.max_over_mean for nano in stats))
        return self._reordered(step, np.array(work), float(np.mean(work)))

    def _by_bytes(self, microbatches: Microbatches) -> Step:
        stay = [plan_in_place(nanos, self.shape, self.config) for nanos in microbatches]
        before = _moved(stay)
        may_gain = before.worst or self.stages > 1
        if not self.place or self.config.planner == "home" or not may_gain:
            return stay
        refilled = [
            self._place(nanos) for nanos in _refilled(microbatches, self.stages)
        ]
        if refilled:
            refilled = self._finished(
                refilled, microbatches, [microbatch.plans[0] for microbatch in stay]
            )
        if not before.worst:  # nothing moves in the given layouts
            return refilled or stay
        moved = _moved(refilled)
        is_accepted = (
            moved.total <= ACCEPTED_TOTAL * before.total
            and moved.worst <= ACCEPTED_WORST * before.worst
        )
        if refilled and is_accepted:
            return refilled
        alone = [self._place(nanos) for nanos in microbatches]
        least = _moved(alone)
        exceeds = self.stages == 1 and (
            moved.total > least.total or moved.worst > least.worst
        )
        return (
            alone
            if not refilled or exceeds or least.score(before) <= moved.score(before)
            else refilled
        )

    def _by_time(self, microbatches: Microbatches, times: LayerTimes) -> Step:
        home = self._stay_home(microbatches)
        linear = sum(times.linear_seconds(plan.layout) for plan in _plans(home))
        even = sum(times.best_seconds(plan) for plan in _plans(home))
        filling = self.stages - 1  # microbatches for which a pipeline fills or drains
        most = (1 - LEAST_GAIN) * self._seconds(home, times)
        least = even + filling * linear / len(microbatches)
        if self.config.planner == "home" or least > most:
            return home
        steps = []
        if self.place:
            steps = self._refilled_by_time(
                microbatches, times, linear / (even - linear)
            )
        even += filling * even / len(microbatches)  # of equal microbatches
        if not steps or self._seconds(steps[0], times) > (1 + LEAST_GAIN) * even:
            alone = [
                self._fastest(nanos, times, stay)
                for nanos, stay in zip(microbatches, home, strict=True)
            ]
            steps.append(alone)
        if self.place and self.stages > 1:
            steps = [
                self._reordered(step, *_attention_and_linear(step, times))
                for step in steps
            ]
        seconds = [self._seconds(step, times) for step in steps]
        return steps[int(np.argmin(seconds))] if min(seconds) < most else home

    def _refilled_by_time(
        self, microbatches: Microbatches, times: LayerTimes, linear: float
    ) -> list[Step]:
        """Return the step of refilled microbatches; none if no other documents are found for them."""
        refilled = _refilled(microbatches, self.stages, linear)
        if not refilled:
            return []
        step = [self._fastest(nanos, times) for nanos in refilled]
        given_plans = [
            self._as(nanos, microbatch.plans[0])
            for nanos, microbatch in zip(microbatches, step, strict=True)
        ]
        return [self._finished(step, microbatches, given_plans)]

    def _stay_home(self, microbatches: Microbatches) -> Step:
        return [stay_home(nanos, self.shape, self.config) for nanos in microbatches]

    def _place(self, nanos: Sequence[TokenLayout]) -> PlannedMicrobatch:
        return place_microbatch(nanos, self.shape, self.config)

    def _fastest(
        self,
        nanos: Sequence[TokenLayout],
        times: LayerTimes,
        home: PlannedMicrobatch | None = None,
    ) -> PlannedMicrobatch:
        return plan_by_time(
            nanos,
            self.shape,
            self.config,
            times,
            place=self.place,
            home=home,
        )

    def _as(self, nanos: Sequence[TokenLayout], plans: Sequence[Plan]) -> list[Plan]:
        """Plan layouts with the options of ``plans``."""
        pairs = zip(nanos, plans, strict=True)
        return [make_plan(layout, self.shape, plan.config) for layout, plan in pairs]

    def _seconds(self, step: Step, times: LayerTimes) -> float:
        attention, linear = _attention_and_linear(step, times)
        return in_stages(attention, self.stages, linear)

    def _reordered(self, step: Step, attention: FloatArray, linear: float) -> Step:
        """Return the microbatches in the order that pipelines like best, if they have the same numbers of tokens."""
        tokens = np.array(
            [
                [layout.queries_per_rank for layout in microbatch.layouts]
                for microbatch in step
            ]
        )
        if (tokens != tokens[0]).any():
            return step
        order = best_order(attention, self.stages, linear)
        return [
            PlannedMicrobatch(step[i].plans, old.given_plans)
            for i, old in zip(order, step, strict=True)
        ]

    def _finished(
        self,
        refilled: Step,
        microbatches: Microbatches,
        given_plans: Sequence[Sequence[Plan]],
    ) -> Step:
        """Return refilled microbatches with the plans for the given ones; later nano-batches get the earlier ones'
        keys."""
        step = []
        for microbatch, layouts, old in zip(
            refilled, microbatches, given_plans, strict=True
        ):
            plans = list(microbatch.plans[0])
            if not layouts[-1].seg_attends.all():
                plans[1] = with_earlier_keys(plans[0], plans[1])
            step.append(PlannedMicrobatch([plans], [old]))
        return step


def _attention_and_linear(step: Step, times: LayerTimes) -> tuple[FloatArray, float]:
    """Return the seconds of every microbatch's layer, less those of the mean one's linear work, and these."""
    linear_seconds = [times.linear_seconds(plan.layout) for plan in _plans(step)]
    linear = sum(linear_seconds) / len(step)
    seconds = [times.microbatch_seconds(microbatch.plans[0]) for microbatch in step]
    return np.array(seconds) - linear, linear


def _refilled(
    microbatches: Microbatches, stages: int, linear: float = 1.0
) -> Microbatches:
    """Return the microbatches with other documents, none of which is in two nano-batches; empty if none are found.

    Args:
        linear: linear work over attention, both of the whole step; only pipelines ask for it.
    """
    if sum(map(len, microbatches)) == 1:
        return []
    held = holders(microbatches)
    docs = np.concatenate([layout.docs for layout in held])
    lengths = np.concatenate([layout.doc_lengths for layout in held])
    capacities = [layout.queries_per_rank for layout in chain(*microbatches)]
    count = len(microbatches[0])
    if stages == 1 or len(microbatches) == 1:
        parts = fill(docs, lengths, capacities, together=count)
    else:
        parts = _fill_stages(
            docs, lengths, capacities, len(microbatches), stages, linear
        )
    return [parts[i : i + count] for i in range(0, len(parts), count)]


def _fill_stages(
    docs: IntArray,
    lengths: IntArray,
    capacities: list[IntArray],
    count: int,
    stages: int,
    linear: float,
) -> list[TokenLayout]:
    """Fill ``count`` microbatches of a pipeline: all alike, or with the attention of ``best_profile``, or between."""
    work = lengths.astype(np.float64) ** 2
    linear *= work.sum() / count
    wanted = best_profile(work, count, stages, linear)
    less = np.repeat(
        (wanted.max() - wanted) * count / len(capacities), len(capacities) // count
    )

    def seconds(parts: list[TokenLayout]) -> float:
        of_parts = np.array(
            [(part.doc_lengths.astype(np.float64) ** 2).sum() for part in parts]
        )
        of_microbatches = of_parts.reshape(count, -1).sum(axis=1)
        return in_stages(
            of_microbatches[best_order(of_microbatches, stages, linear)], stages, linear
        )

    for filled in (FILLED, 4 * FILLED):
        made = []
        for share in (1.0, 0.5, 0.0):
            layouts = fill(
                docs,
                lengths,
                capacities,
                together=len(capacities),
                less=(share * less).tolist(),
                filled=filled,
            )
            if layouts:
                made.append(layouts)
        if made:
            return min(made, key=seconds)
    return []
