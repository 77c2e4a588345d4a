# SPDX-License-Identifier: BSD-3-Clause
"""CAD: real plans, executed on two streams per rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, product

import numpy as np

from torchtitan_cad.planning import Plan, PlannerConfig, TokenLayout, plan_step
from torchtitan_cad.planning.exchange import messages
from torchtitan_cad.planning.intervals import FloatArray, IntArray
from torchtitan_cad.planning.model.batch import BatchShape, nano_layouts, pool_layouts
from torchtitan_cad.planning.model.limits import server_loads
from torchtitan_cad.planning.model.tasks import HOME
from torchtitan_cad.planning.pipeline.one_f_one_b import one_f_one_b
from torchtitan_cad.planning.pipeline.ticks import tick_schedule
from torchtitan_cad.planning.servers import (
    DIRECTIONS,
    JoinedServer,
    assign_to_servers,
)
from torchtitan_cad.tools.simulation.memory import (
    in_flight,
    kept_bytes,
    kept_bytes_per_call,
    states,
    token_bytes,
    working_bytes,
)
from torchtitan_cad.tools.simulation.step import Memory, Outcome, Step
from torchtitan_cad.tools.simulation.streams import Nano, Streams

PoolKey = tuple[int, ...]
"""Microbatches that run together in a tick, ascending."""
Plans = dict[PoolKey, list[list[Plan]]]
"""Pool of microbatches: for every kind of attention one plan per half."""


class Disaggregated:
    """A step with CAD.

    Args:
        with_servers: whether the cluster's attention servers take part.
    """

    def __init__(self, step: Step, *, with_servers: bool = False) -> None:
        self._with_servers = with_servers
        self.step = step
        self.configuration = step.configuration
        self._plans: Plans = {}
        self._known: dict[tuple[PoolKey, bool, bool], list[list[Nano]]] = {}
        self._in_ticks = step.pp > 1 and self.configuration.schedule == "CAD1F1B"

    @cached_property
    def passes(self) -> list[tuple[bool, PoolKey]]:
        """(forward or backward, pool) of every pass of a stage, or of every tick of all stages."""
        microbatches = self.step.microbatches
        if self._in_ticks:
            ticks = tick_schedule(self.step.pp, microbatches)
            return [
                (
                    tick.forward,
                    tuple(sorted(work.microbatch for work in tick.work if work)),
                )
                for tick in ticks
            ]
        return [
            (forward, (microbatch,))
            for microbatch, forward in product(range(microbatches), (True, False))
        ]

    @cached_property
    def starts(self) -> list[IntArray]:
        """Places where documents begin in the rows of every data-parallel rank."""
        rows = self.step.batch.rows
        groups = [
            np.concatenate([rows[row] for row in order.ravel()])
            for order in self.step.row_order
        ]
        return [np.cumsum(lengths) - lengths for lengths in groups]

    @cached_property
    def layouts(self) -> list[list[TokenLayout]]:
        """Lay out every microbatch, or its halves, over the ranks of a stage, as loaders give them."""
        step = self.step
        cp = self.configuration.cp
        nano_batches = self.configuration.nano_batches
        shape = BatchShape(
            step.rows_per_rank * step.microbatches,
            step.batch.row_tokens,
            step.rows_per_rank,
        )
        shapes = [shape] * len(self.starts)
        return [
            nano_layouts(self.starts, shapes, microbatch, cp, nano_batches)
            for microbatch in range(step.microbatches)
        ]

    @cached_property
    def homes(self) -> list[list[TokenLayout]]:
        """Lay out microbatches for ticks: homes are chosen by bytes, and plans for all stages are made for them."""
        if self.configuration.placement == "loader":
            return self.layouts
        step = self.step
        costs = step.costs
        kinds = costs.kinds[:1]
        config = self._config(step.ranks)
        placed = plan_step(self.layouts, kinds, config, stages=step.pp)
        return [microbatch.layouts for microbatch in placed]

    def plans(self, pool: PoolKey) -> list[list[Plan]]:
        """Plan a pool of microbatches, for every kind one plan per half; stages without a microbatch only serve."""
        if pool not in self._plans:
            step = self.step
            costs = step.costs
            ranks = step.ranks
            stages = step.pp
            pools: list[PoolKey] = [
                (microbatch,) for microbatch in range(step.microbatches)
            ]
            layouts = self.layouts
            if self._in_ticks:
                working = [*pool, *[None] * (stages - len(pool))]
                pools = [pool]
                layouts = [pool_layouts(self.homes, working, ranks)]
                ranks = ranks * stages
                stages = 1
            times = None
            if self.configuration.tolerance == "auto":
                overlaps = self.configuration.nano_batches == 2
                times = costs.layer_times(ranks, overlaps, self._kept_per_call)
            place = self.configuration.placement == "balanced" and not self._in_ticks
            columns = np.concatenate(self.starts) % step.batch.row_tokens
            planned = plan_step(
                layouts,
                costs.kinds,
                self._config(ranks),
                times=times,
                columns=columns,
                place=place,
                stages=stages,
            )
            for key, microbatch in zip(pools, planned, strict=True):
                self._plans[key] = [list(plans) for plans in microbatch.plans]
        return self._plans[pool]

    def outcome(self) -> Outcome:
        """Return the step's time by parts, each what the step takes longer with it than with those before it."""
        even = self.step.even(self.configuration.schedule)
        ideal = even.total - even.synchronisation
        balanced = self.seconds(False, background=False)
        alone = self.seconds(False)
        full = self.seconds(True)
        parts = even.unbalanced(balanced - ideal)
        if self._with_servers:  # what they compute, ranks do not
            served = even.bubble - parts.bubble
            attention = parts.attention - served
            parts = replace(parts, attention=attention, bubble=even.bubble)
        num_bytes = self._exchanged_bytes()
        if num_bytes:  # otherwise FSDP2's waits are those of a step without CAD
            parts = replace(
                parts,
                synchronisation=alone - balanced + self.step.final,
                exchange=full - alone,
            )
        return Outcome(parts, self.memory(), num_bytes, self._max_over_mean())

    def memory(self) -> Memory:
        """Estimate the memory of the fullest GPU; before anything is planned, without attention's working memory."""
        step = self.step
        nanos = self.configuration.nano_batches
        microbatches_in_flight = in_flight(step, self.configuration.schedule)
        return Memory(
            states=states(step),
            activations=step.tokens * token_bytes(step, microbatches_in_flight, nanos),
            buffers=self._buffers,
            attention=max(
                (
                    working_bytes(kinds, self.configuration.receive_buffer_gb)
                    for kinds in self._plans.values()
                ),
                default=0.0,
            ),
            kept=max(
                (
                    kept_bytes(step, kinds, microbatches_in_flight, self._kept_per_call)
                    for kinds in self._plans.values()
                ),
                default=0.0,
            ),
        )

    @property
    def _buffers(self) -> int:
        """Bytes of all receive buffers."""
        nanos = self.configuration.nano_batches
        return (
            nanos
            * messages.BUFFERS_PER_CALL
            * messages.buffer_bytes(self.configuration.receive_buffer_gb, nanos)
        )

    @cached_property
    def _kept_per_call(self) -> float:
        """Bytes of received rows that a server may keep in each call."""
        return kept_bytes_per_call(self.step, self._buffers, self._in_ticks)

    def seconds(self, exchange: bool, background: bool = True) -> float:
        """Return the seconds of the step, without what comes at its end, and maybe without what is exchanged."""
        step = self.step
        if step.pp > 1:
            known = {
                one_pass: self._alone(*one_pass, exchange)
                for one_pass in set(self.passes)
            }
            times = [known[one_pass] for one_pass in self.passes]
            if self._in_ticks:
                return float(sum(seconds.max() for seconds in times))
            moved = [
                any(plan.moves_rows for plan in chain(*self.plans(pool)))
                for _, pool in self.passes[::2]
            ]
            return one_f_one_b(step.pp, times[::2], times[1::2], moved)
        streams = Streams(step.ranks)
        for forward, pool in self.passes:
            self._pass(streams, forward, pool, exchange, background)
            if step.lockstep and not forward:
                streams.join()
        return float(streams.compute.max())

    def _alone(self, forward: bool, pool: PoolKey, exchange: bool) -> FloatArray:
        """Seconds, [ranks], of one pass of a stage, or of all, that begins together."""
        streams = Streams(self.step.ranks * (self.step.pp if self._in_ticks else 1))
        self._pass(streams, forward, pool, exchange, background=False)
        return streams.compute

    def _pass(
        self,
        streams: Streams,
        forward: bool,
        pool: PoolKey,
        exchange: bool,
        background: bool,
    ) -> None:
        step = self.step
        busy = step.background(forward) if background else 0.0
        nanos = self._nanos(pool, forward, exchange)
        order = step.kinds if forward else step.kinds[::-1]
        head = step.head(forward) * sum(nano.share for nano in nanos[0])
        if not forward:
            streams.compute = streams.compute + head
        if not step.repeats_forward:
            layers = [nanos[kind] for kind in order]
            fixed: Sequence[float] = step.segments(forward, 0.0)
            streams.run(step.segments(forward), fixed, layers, busy)
        else:  # halves do not overlap across layers, each of which backward computes again first
            for kind in order:
                layers = [self._nanos(pool, True, exchange)[kind]]
                fixed = step.block(True, 0.0)
                streams.run(step.block(True), fixed, layers, busy)
                if not forward:
                    fixed = step.block(False, 0.0)
                    streams.run(step.block(False), fixed, [nanos[kind]])
        streams.compute = np.maximum(streams.compute, streams.gathered)
        if forward:
            streams.compute = streams.compute + head

    def _nanos(self, pool: PoolKey, forward: bool, exchange: bool) -> list[list[Nano]]:
        key = (pool, forward, exchange)
        if key not in self._known:
            # autograd: the last half first
            kinds = [plans if forward else plans[::-1] for plans in self.plans(pool)]
            self._known[key] = [
                [self._nano(plan, forward, exchange) for plan in plans]
                for plans in kinds
            ]
        return self._known[key]

    def _nano(self, plan: Plan, forward: bool, exchange: bool) -> Nano:
        loads = server_loads(plan.tasks, plan.cost, plan.layout.num_ranks)
        attention = self.step.costs.attention_seconds(loads, forward)
        if self._with_servers:
            attention = self._attention_with_servers(plan, forward)
        share = plan.layout.queries_per_rank / self.step.tokens
        if not exchange or not plan.moves_rows:
            return Nano(attention, share)
        keep = plan.most_rows.are_kept(plan.shape, self._kept_per_call)
        return Nano(attention, share, *self.step.costs.transfers(plan, forward, keep))

    def _attention_with_servers(self, plan: Plan, forward: bool) -> FloatArray:
        """Seconds, [ranks], until a rank has computed its tasks and has what joined servers compute for it."""
        costs = self.step.costs
        cluster = costs.cluster
        ranks = plan.layout.num_ranks
        joined = [
            JoinedServer(number, cluster.server_speed, cluster.server_net)
            for number in range(cluster.servers)
        ]
        groups = cluster.tp * (1 if self._in_ticks else self.step.pp)
        unit = costs.layer_times(ranks, False, 0.0).unit
        plan = assign_to_servers(plan, joined, unit, 1 / groups)
        stand_ins = plan.stand_ins
        tasks = (
            plan.tasks if stand_ins is None else plan.tasks[stand_ins.server == HOME]
        )
        loads = server_loads(tasks, plan.cost, ranks)
        seconds = costs.attention_seconds(loads, forward)
        if stand_ins is None:
            return seconds
        share = 1 / DIRECTIONS if forward else 1 - 1 / DIRECTIONS
        for number, both_passes in stand_ins.seconds.items():
            waiting = plan.tasks["server"][stand_ins.server == number]
            seconds[waiting] = np.maximum(seconds[waiting], share * both_passes)
        return seconds

    def _max_over_mean(self) -> float:
        """Attention forward of the slowest rank over the mean rank's, of all layers; the mean over halves and pools."""
        ratios = []
        for pool in (pool for forward, pool in self.passes if forward):
            for kinds in zip(*self._nanos(pool, True, False), strict=True):
                layers = np.stack([kinds[kind].attention for kind in self.step.kinds])
                ratios.append(layers.max(axis=1).sum() / layers.mean(axis=1).sum())
        return float(np.mean(ratios))

    def _exchanged_bytes(self) -> float:
        """Bytes of the step, of all GPUs."""
        step = self.step
        again = [(True, pool) for forward, pool in self.passes if not forward]
        passes = self.passes + again * step.repeats_forward
        num_bytes = 0.0
        for forward, pool in passes:
            kinds = self._nanos(pool, forward, True)
            for kind in step.kinds:
                num_bytes += sum(nano.num_bytes for nano in kinds[kind])
        return num_bytes * (1 if self._in_ticks else step.pp) * step.costs.cluster.tp

    def _config(self, ranks: int) -> PlannerConfig:
        node = self.step.costs.cluster.group_per_node
        return replace(
            self.configuration.planner_config(),
            ranks_per_node=node if 1 < node < ranks else None,
        )


def obstacle(step: Step) -> str:
    """Say why a step cannot run with CAD; empty if it can."""
    configuration = step.configuration
    costs = step.costs
    if (
        configuration.nano_batches == 2
        and costs.cluster.tp > 1
        and step.rows_per_rank % 2
    ):
        return "TP takes halves of whole rows, and a microbatch has an odd number"
    if (
        step.pp > 1
        and configuration.schedule == "CAD1F1B"
        and (len(costs.kinds) > 1 or costs.model.idle_ffn)
    ):
        return "stages in ticks attend together, which experts and layers of several kinds of attention do not"
    return ""
