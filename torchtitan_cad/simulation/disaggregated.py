"""CAD: real plans, executed on two streams per rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from torchtitan_cad.planning import Plan, PlannerConfig, TokenLayout, make_plan
from torchtitan_cad.planning.exchange import messages
from torchtitan_cad.planning.model.layout import stack
from torchtitan_cad.planning.model.limits import server_loads
from torchtitan_cad.planning.placement.halves import place_microbatch
from torchtitan_cad.planning.timed import make_timed_plan
from torchtitan_cad.simulation.batches import layouts
from torchtitan_cad.simulation.inputs import Schedule
from torchtitan_cad.simulation.memory import Memory, in_flight, kept_bytes, states, token_bytes, working_bytes
from torchtitan_cad.simulation.pipeline import PoolKey, one_f_one_b, tick_pools
from torchtitan_cad.simulation.step import Outcome, Step
from torchtitan_cad.simulation.streams import Nano, Streams

Plans = dict[PoolKey, list[Plan]]
"""Pool of microbatches: one plan per half."""


class Disaggregated:
    """A step with CAD.

    Args:
        planner: name of the planner.
        nano_batches: 1 shows every exchange in full; 2 lets the halves of a microbatch take turns.
        plans: that are known, to which others are added; by default a new dictionary. Activation checkpointing does not
            change them, but for ``tolerance = "auto"``.
    """

    def __init__(
        self,
        step: Step,
        planner: str,
        nano_batches: int,
        schedule: Schedule,
        plans: Plans | None = None,
    ) -> None:
        self.step, self.nano_batches, self.schedule = step, nano_batches, schedule
        self._name = planner
        self._layouts: dict[int, list[TokenLayout]] = {}
        self._plans: Plans = {} if plans is None else plans
        self._known: dict[tuple[PoolKey, bool, bool], list[Nano]] = {}
        self._in_ticks = step.pp > 1 and schedule == "CAD1F1B"

    @property
    def pools(self) -> list[PoolKey]:
        """Layouts and costs to plan for."""
        microbatches = self.step.split.microbatches
        if self._in_ticks:
            return sorted({pool for _, pool in tick_pools(self.step.pp, microbatches)})
        return [(microbatch,) for microbatch in range(microbatches)]

    def layouts(self, microbatch: int) -> list[TokenLayout]:
        """Lay out a microbatch, or its halves, over the ranks of a stage."""
        if microbatch not in self._layouts:
            step, costs = self.step, self.step.costs
            homes = layouts(step.batch, step.split, microbatch, self.nano_batches)
            if costs.settings.placement == "balanced":
                placed = place_microbatch(homes, costs.shape, self._config(step.ranks), costs.plan_cost)
                homes = [each.layout for each in placed]
            self._layouts[microbatch] = homes
        return self._layouts[microbatch]

    def plans(self, pool: PoolKey) -> list[Plan]:
        """Plan a pool of microbatches, one plan per half; stages without a microbatch only serve."""
        if pool not in self._plans:
            step = self.step
            halves = [self.layouts(m) for m in pool]
            if self._in_ticks:
                idle = [None] * (step.pp - len(pool))
                joint = [stack([*stages, *idle], step.ranks) for stages in zip(*halves, strict=True)]
            else:
                joint = halves[0]
            costs, ranks = step.costs, step.ranks * (step.pp if self._in_ticks else 1)
            config = self._config(ranks)
            how = costs.shape, config
            if costs.settings.auto_tolerance:
                times = costs.layer_times(ranks, self.nano_batches == 2)
                made = [make_timed_plan(layout, *how, times, costs.plan_cost) for layout in joint]
            else:
                made = [make_plan(layout, *how, costs.plan_cost) for layout in joint]
            self._plans[pool] = made
        return self._plans[pool]

    def outcome(self) -> Outcome:
        """Return the step's time by parts, each what the step takes longer with it than with those before it."""
        tp_share = self.step.tp_share(self.nano_batches)
        even = self.step.even(self.schedule, tp_share)
        ideal = even.total - even.synchronisation
        balanced, alone, full = self.seconds(False, background=False), self.seconds(False), self.seconds(True)
        parts = replace(
            even.unbalanced(balanced - ideal),
            synchronisation=alone - balanced + self.step.final,
            exchange=full - alone,
        )
        total, most = self._bytes()
        configuration = {
            **self.step.named(self.step.split.cp),
            "nano_batches": self.nano_batches,
            **({"schedule": self.schedule} if self.step.pp > 1 else {}),
        }
        return Outcome(parts, configuration, self.memory(), total * self.step.costs.cluster.tp, most)

    def total(self) -> float:
        """Return the seconds of the step."""
        return self.seconds(True) + self.step.final

    def memory(self) -> Memory:
        """Estimate the memory of the fullest GPU; before anything is planned, without attention's working memory."""
        step, split = self.step, self.step.split
        flying = in_flight(self.schedule, step.pp, split.microbatches)
        keep = step.costs.settings.backward == "keep"
        return Memory(
            states=states(step.costs, step.ranks, step.pp),
            activations=step.tokens * token_bytes(step.costs, step.layers, step.pp, flying, self.nano_batches),
            slots=self._buffers(),
            attention=working_bytes(step.costs, self._plans.values()) if self._plans else 0.0,
            kept=self._kept(flying) if keep else 0.0,
        )

    def _buffers(self) -> int:
        """Of all receive buffers of a GPU."""
        each = messages.buffer_bytes(self.step.costs.settings.receive_buffer_gb, self.nano_batches)
        return self.nano_batches * messages.BUFFERS_PER_CALL * each

    def _kept(self, flying: int) -> float:
        """Of the microbatch that brings a server the most, for all in flight."""
        costs, layers = self.step.costs, self.step.layers
        return max((kept_bytes(costs, layers, plans, flying) for plans in self._plans.values()), default=0.0)

    def seconds(self, exchange: bool, background: bool = True) -> float:
        """Return the seconds of the step, without what comes at its end, and maybe without what is exchanged."""
        step, microbatches = self.step, self.step.split.microbatches
        if self._in_ticks:
            ticks = tick_pools(step.pp, microbatches)
            known = {tick: self._alone(*tick, exchange) for tick in set(ticks)}
            return sum(known[tick] for tick in ticks)
        if step.pp > 1:
            times = [[self._alone(forward, (m,), exchange) for m in range(microbatches)] for forward in (True, False)]
            return one_f_one_b(step.pp, *times)
        streams = Streams(step.ranks)
        for microbatch in range(microbatches):
            for forward in (True, False):
                self._pass(streams, forward, (microbatch,), exchange, background)
            if step.lockstep:
                streams.join()
        return float(streams.compute.max())

    def _alone(self, forward: bool, pool: PoolKey, exchange: bool) -> float:
        """Seconds of one pass of a stage, or of all, that begins and ends together."""
        streams = Streams(self.step.ranks * (self.step.pp if self._in_ticks else 1))
        self._pass(streams, forward, pool, exchange, background=False)
        return float(streams.compute.max())

    def _pass(self, streams: Streams, forward: bool, pool: PoolKey, exchange: bool, background: bool) -> None:
        step, tp_share = self.step, self.step.tp_share(self.nano_batches)
        busy = step.background(forward) if background else 0.0
        nanos = self._nanos(pool, forward, exchange)
        head = step.head(forward) * sum(nano.share for nano in nanos)
        if not forward:
            streams.compute = streams.compute + head
        if not step.costs.repeats_forward:
            streams.run(step.regions(forward, tp_share), nanos, busy)
        else:  # halves do not overlap across layers, each of which backward computes again first
            for _ in range(step.layers):
                streams.run(step.block(True, tp_share), self._nanos(pool, True, exchange), busy)
                if not forward:
                    streams.run(step.block(False, tp_share), nanos)
        streams.compute = np.maximum(streams.compute, streams.gathered)
        if forward:
            streams.compute = streams.compute + head

    def _nanos(self, pool: PoolKey, forward: bool, exchange: bool) -> list[Nano]:
        key = (pool, forward, exchange)
        if key not in self._known:
            plans = self.plans(pool) if forward else reversed(self.plans(pool))  # autograd begins with the last half
            self._known[key] = [self._nano(plan, forward, exchange) for plan in plans]
        return self._known[key]

    def _nano(self, plan: Plan, forward: bool, exchange: bool) -> Nano:
        model = self.step.costs.models[0 if forward else 1]
        loads = server_loads(plan.tasks, model, plan.layout.num_ranks)
        attention = self.step.costs.attention_seconds(loads, forward)
        share = plan.layout.queries_per_rank / self.step.tokens
        if not exchange or not plan.moves_rows:
            return Nano(attention, share)
        return Nano(attention, share, *self.step.costs.transfers(plan, forward))

    def _bytes(self) -> tuple[float, float]:
        """Of the step: over all ranks of one TP coordinate, and into the busiest rank."""
        step, total, most = self.step, 0.0, 0.0
        if self._in_ticks:
            passes = tick_pools(step.pp, step.split.microbatches)
            stages = 1  # a pool has all of them
        else:
            passes = [(forward, pool) for pool in self.pools for forward in (True, False)]
            stages = step.pp
        if step.costs.repeats_forward:
            passes = [*passes, *((True, pool) for forward, pool in passes if not forward)]
        for forward, pool in passes:
            into = np.zeros(1)
            for plan in self.plans(pool):
                into = into + (1.0 if forward else self._backward_bytes(plan)) * plan.stats.bytes_in
            total += float(into.sum()) * step.layers * stages
            most += float(into.max()) * step.layers
        return total, most

    def _backward_bytes(self, plan: Plan) -> float:
        """Ratio of the bytes that a plan moves in backward to those in forward."""
        keep = self.step.costs.settings.backward == "keep"
        stats, rows = plan.stats, messages.RowBytes.of(self.step.costs.shape, keep=keep)
        keys = rows.key_gradients + (0 if keep else rows.keys)
        moved = stats.query_rows_moved * (rows.backward_queries + rows.query_gradients) + stats.kv_rows_moved * keys
        return moved / stats.total_bytes if stats.total_bytes else 0.0

    def _config(self, ranks: int) -> PlannerConfig:
        planner, per_node = self.step.costs.settings.planner, self.step.costs.cluster.group_per_node
        near = per_node if 1 < per_node < ranks and self.step.costs.settings.node_aware else None
        return replace(planner, planner=self._name, ranks_per_node=near)


def halves_allowed(step: Step, nano_batches: int) -> bool:
    """Tell whether microbatches can be cut so: under TP by whole rows only."""
    return nano_batches == 1 or step.costs.cluster.tp == 1 or step.split.rows_per_rank % 2 == 0
