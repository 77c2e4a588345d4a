# SPDX-License-Identifier: BSD-3-Clause
"""Homes and plans over all microbatches of an optimizer step, for all kinds of a model's attention.

The loss of a step is a sum over its tokens, so that a document may be in any of its microbatches. ``fill`` divides the
documents among microbatches of which each is then placed and planned alone.

Layers share homes, and every kind of attention has plans of its own. The first kind, whose queries see whole documents
where the model has such layers, places documents. The homes are kept if they are better for the layers of all kinds
together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from torchtitan_cad.planning.arguments import check_step, complete_config, holders
from torchtitan_cad.planning.exchange.traffic import Moved
from torchtitan_cad.planning.intervals import FloatArray, IntArray
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.pipeline.one_f_one_b import (
    best_order,
    in_stages,
    ramps,
)
from torchtitan_cad.planning.placement.fill import FILLED, fill
from torchtitan_cad.planning.placement.microbatch import (
    LEAST_GAIN,
    place_microbatch,
    plan_by_time,
    plan_in_place,
    stay_home,
    with_earlier_keys,
)
from torchtitan_cad.planning.plan import Plan, moved_by
from torchtitan_cad.planning.timed import LayerTimes

ACCEPTED_SCORE = 0.85
"""Refilled microbatches are taken without a look at the given ones if what they move has at most this score."""

SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Shares of the difference between ``ramps`` and equal attention that microbatches of a pipeline are filled with."""

Microbatches = Sequence[Sequence[TokenLayout]]
"""The layouts of the nano-batches of every microbatch of a step."""
Step = list[list[Plan]]
"""The plans of the nano-batches of every microbatch of a step, for one kind of attention."""


@dataclass(frozen=True, eq=False)
class PlannedMicrobatch:
    """A microbatch with its plans, [kinds of attention][nano-batches]."""

    plans: Sequence[Sequence[Plan]]

    @property
    def layouts(self) -> list[TokenLayout]:
        """Homes of every nano-batch, with documents as the first kind of attention cuts them."""
        return [plan.layout for plan in self.plans[0]]


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

    def plan_kind(kind: AttentionKind, homes: Microbatches, place: bool) -> Step:
        planner = _StepPlanner(
            kind, complete_config(kind.shape, config), times, place, stages
        )
        return planner.plan(
            [[kind.layout(layout, columns) for layout in nanos] for nanos in homes]
        )

    def plan_in_homes(
        homes: Microbatches, kinds: Sequence[AttentionKind]
    ) -> list[Step]:
        return [plan_kind(kind, homes, place=False) for kind in kinds]

    first = plan_kind(kinds[0], microbatches, place)
    homes = [[plan.layout for plan in plans] for plans in first]
    steps = [first, *plan_in_homes(homes, kinds[1:])]
    # layouts are equal if they are the same
    has_moved = homes != [list(nanos) for nanos in microbatches]
    if len(kinds) > 1 and has_moved:
        stay = plan_in_homes(microbatches, kinds)
        judge = _Judge(kinds, times, stages, before=_moved(stay, kinds))
        if judge.cost(stay) < judge.cost(steps):
            steps = stay
    return [PlannedMicrobatch(plans) for plans in zip(*steps, strict=True)]


@dataclass(frozen=True)
class _Judge:
    """Compares steps: by predicted seconds or, without rates, by what they move over what is moved ``before``."""

    kinds: Sequence[AttentionKind]
    times: LayerTimes | None
    stages: int
    before: Moved

    def cost(self, steps: Sequence[Step]) -> float:
        """Return the cost of a step, which has plans for every kind."""
        if self.times is None:
            if not self.before.worst:  # homes for equal work, whatever they move
                return 0.0
            return float(_moved(steps, self.kinds).score(self.before))
        attention = np.zeros(len(steps[0]))
        linear = 0.0
        for kind, step in zip(self.kinds, steps, strict=True):
            of_layer, linear_of_layer = _attention_and_linear(step, self.times)
            attention += kind.layers * of_layer
            linear += kind.layers * linear_of_layer
        return in_stages(attention, self.stages, linear)


@dataclass(frozen=True)
class _StepPlanner:
    """Plans steps for one kind of attention; the arguments of ``plan_step``."""

    kind: AttentionKind
    config: PlannerConfig
    times: LayerTimes | None
    place: bool
    stages: int

    def plan(self, microbatches: Microbatches) -> Step:
        """Plan the microbatches, and maybe place them."""
        if self.times is None:
            return self._by_bytes(microbatches)
        return self._by_time(microbatches, self.times)

    def _by_bytes(self, microbatches: Microbatches) -> Step:
        shape = self.kind.shape
        stay = [plan_in_place(nanos, shape, self.config) for nanos in microbatches]
        before = _moved([stay], [self.kind])
        may_gain = before.worst or self.stages > 1
        if not self.place or not may_gain or self.config.planner == "home":
            return stay

        def place(nanos: Sequence[TokenLayout]) -> list[Plan]:
            return place_microbatch(nanos, shape, self.config)

        judge = _Judge([self.kind], None, self.stages, before)
        return self._best(microbatches, place, judge, accepted=ACCEPTED_SCORE)

    def _by_time(self, microbatches: Microbatches, times: LayerTimes) -> Step:
        shape = self.kind.shape
        home = [stay_home(nanos, shape, self.config) for nanos in microbatches]
        if self.config.planner == "home" or not microbatches:
            return home

        def plan(nanos: Sequence[TokenLayout]) -> list[Plan]:
            return plan_by_time(nanos, shape, self.config, times, place=self.place)

        judge = _Judge([self.kind], times, self.stages, before=Moved(0, 0))
        even = sum(times.best_seconds(plan) for plan in chain(*home))
        # a pipeline fills and drains for this share of the step
        filling = (self.stages - 1) / len(microbatches)
        of_equal = self.kind.layers * (1 + filling) * even
        accepted = (1 + LEAST_GAIN) * of_equal
        best = self._best(microbatches, plan, judge, accepted=accepted)
        most = (1 - LEAST_GAIN) * judge.cost([home])
        return best if judge.cost([best]) < most else home

    def _best(
        self,
        microbatches: Microbatches,
        plan: Callable[[Sequence[TokenLayout]], list[Plan]],
        judge: _Judge,
        accepted: float,
    ) -> Step:
        """Return the best of the refilled microbatches and, unless their cost is ``accepted``, the given ones."""
        steps = []
        refilled = _refilled(microbatches, self.stages) if self.place else []
        if refilled:
            step = [plan(nanos) for nanos in refilled]
            for nanos, plans in zip(microbatches, step, strict=True):
                if not nanos[-1].seg_attends.all():
                    plans[1] = with_earlier_keys(plans[0], plans[1])
            steps.append(step)
        if not refilled or judge.cost([steps[0]]) > accepted:
            steps.append([plan(nanos) for nanos in microbatches])
        if self.place and self.stages > 1:
            steps = [self._reordered(step) for step in steps]
        return min(steps, key=lambda step: judge.cost([step]))

    def _reordered(self, step: Step) -> Step:
        """Return the microbatches in the order that pipelines like best, if they have the same numbers of tokens."""
        tokens = np.array(
            [[plan.layout.queries_per_rank for plan in plans] for plans in step]
        )
        if (tokens != tokens[0]).any():
            return step
        attention, linear = _attention_and_linear(step, self.times)
        return [step[i] for i in best_order(attention, self.stages, linear)]


def _moved(steps: Sequence[Step], kinds: Sequence[AttentionKind]) -> Moved:
    """Return what all layers move."""
    moved = [
        kind.layers * np.array(moved_by(*chain(*step)))
        for kind, step in zip(kinds, steps, strict=True)
    ]
    return Moved(*np.sum(moved, axis=0).tolist())


def _attention_and_linear(
    step: Step, times: LayerTimes | None
) -> tuple[FloatArray, float]:
    """Return the seconds of every microbatch's layer, less those of the mean one's linear work, and these.

    Without rates they are in units of work, and linear work is as much as the mean attention.
    """
    if times is None:
        work = [float(sum(plan.stats.loads.max() for plan in plans)) for plans in step]
        return np.array(work), float(np.mean(work))
    linear_seconds = [times.linear_seconds(plan.layout) for plan in chain(*step)]
    linear = sum(linear_seconds) / len(step)
    seconds = [times.microbatch_seconds(plans) for plans in step]
    return np.array(seconds) - linear, linear


def _refilled(microbatches: Microbatches, stages: int) -> Microbatches:
    """Return the microbatches with other documents, none of which is in two nano-batches; empty if none are found."""
    held = holders(microbatches)
    docs = np.concatenate([layout.docs for layout in held])
    if sum(map(len, microbatches)) == 1 or not len(docs):
        return []
    lengths = np.concatenate([layout.doc_lengths for layout in held])
    capacities = [layout.queries_per_rank for layout in chain(*microbatches)]
    nano_batches = len(microbatches[0])
    if stages == 1 or len(microbatches) == 1:
        parts = fill(docs, lengths, capacities, together=nano_batches)
    else:
        parts = _fill_stages(docs, lengths, capacities, nano_batches, stages)
    return [
        parts[first : first + nano_batches]
        for first in range(0, len(parts), nano_batches)
    ]


def _fill_stages(
    docs: IntArray,
    lengths: IntArray,
    capacities: list[IntArray],
    nano_batches: int,
    stages: int,
) -> list[TokenLayout]:
    """Fill the microbatches of a pipeline: all alike, or with the attention of ``ramps``, or between.

    Linear work is taken to be as much as the mean microbatch's attention.
    """
    count = len(capacities)
    mean = (lengths.astype(np.float64) ** 2).sum() / count
    ramp = np.repeat(ramps(count // nano_batches, stages), nano_batches)

    def seconds(parts: list[TokenLayout]) -> float:
        squares = np.array(
            [(part.doc_lengths.astype(np.float64) ** 2).sum() for part in parts]
        )
        attention = squares.reshape(-1, nano_batches).sum(axis=1)
        linear = attention.mean()
        order = best_order(attention, stages, linear)
        return in_stages(attention[order], stages, linear)

    for filled in (FILLED, 4 * FILLED):
        candidates = []
        for share in SHARES:
            less = share * mean * (ramp.max() - ramp)
            parts = fill(
                docs,
                lengths,
                capacities,
                together=count,
                less=less.tolist(),
                filled=filled,
            )
            if parts:
                candidates.append(parts)
        if candidates:
            return min(candidates, key=seconds)
    return []
