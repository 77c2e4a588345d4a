"""Attention of a pipeline in ticks, ranks as threads: results of all microbatches, and one order for all ranks."""

import random
import time
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
import torch

from tests.runtime.rows import Tensors, assert_ranks_as_exact, dense, undivided
from tests.runtime.threaded import needs_linux, run_ranks, symmetric_transports, thread_transports
from tests.support.observer import observe
from torchtitan_cad.planning import AttentionShape, Plan, PlannerConfig, TokenLayout, make_plan
from torchtitan_cad.planning.pipeline.program import TickProgram, make_program
from torchtitan_cad.planning.pipeline.ticks import tick_schedule
from torchtitan_cad.runtime.call import FORWARD, Saved
from torchtitan_cad.runtime.kernels.select import get_kernel
from torchtitan_cad.runtime.tick_engine import TickCall, TickEngine
from torchtitan_cad.runtime.transport import Transport

CPU, SHAPE = torch.device("cpu"), AttentionShape(4, 2, 8, 4)
Events = list[tuple[str, int]]


def half_layout(microbatch: int, nano: int) -> TokenLayout:
    """One rank's tokens of a nano-batch; the first of microbatch 0 is ten times heavier than the others."""
    lengths = [640] if microbatch == nano == 0 else [64] * 10
    return TokenLayout.from_segments([[(doc, 0, length) for doc, length in enumerate(lengths)]])


def pool_plans(program: TickProgram, ranks: int, nano_batches: int = 1) -> list[list[Plan]]:
    """One plan per pool and nano-batch."""
    plans = []
    for pool in program.pools:
        nanos: list[list[list[tuple[int, int, int]]]] = [[[] for _ in range(ranks)] for _ in range(nano_batches)]
        for rank, microbatch in enumerate(pool.microbatches):
            for nano, segments in enumerate(nanos):
                if microbatch is not None:
                    mine = half_layout(microbatch, nano).segments()[0]
                    segments[rank] = [(1000 * rank + doc, start, length) for doc, start, length in mine]
        layouts = [TokenLayout.from_segments(segments) for segments in nanos]
        plans.append([make_plan(layout, SHAPE, PlannerConfig(min_shard=32)) for layout in layouts])
    return plans


def make_engine(transport: Transport | None = None, rank: int = 0, scale: float = 1.0) -> TickEngine:
    kernel = get_kernel("cpu", CPU)
    return TickEngine(SHAPE, torch.float32, kernel=kernel, transport=transport, rank=rank, device=CPU, scale=scale)


class Rank:
    """One pipeline rank: runs its stages' blocks, each on tensors of its own, and finishes as late as blocks do."""

    def __init__(
        self, rank: int, program: TickProgram, plans: list[list[Plan]], blocks: list[list[bool]], transport
    ) -> None:
        self.rank, self.program, self.blocks, self.nanos = rank, program, blocks, range(len(plans[0]))
        engine = make_engine(transport, rank, scale=8**-0.5)
        for pool, nanos in enumerate(plans):
            for nano, plan in enumerate(nanos):
                engine.add_plan(pool * len(nanos) + nano, plan)
        self.events: Events = []
        observe(engine, lambda name, key: self.events.append((name, key)))
        self.engine = engine
        self.flying: dict = {}
        self.saved: dict = {}
        self.results: dict = {}
        self.delays = random.Random(rank)

    def run(self, tensors: dict) -> None:
        count = len(self.nanos)
        for number, tick in enumerate(self.program.ticks):
            time.sleep(self.delays.random() * 0.01)
            work = tick.work[self.rank]
            pools = self.program.pools
            calls = [
                TickCall(
                    c.forward,
                    tuple(c.pool * count + nano for nano in self.nanos),
                    pools[c.pool].microbatches[self.rank] is not None,
                )
                for c in self.program.calls[number]
            ]
            self.engine.begin_tick(calls, None if work is None else work.microbatch * count)
            if work is not None:
                stage = work.chunk * len(tick.work) + self.rank
                order = range(len(self.blocks[stage]))
                for block in order if tick.forward else reversed(order):
                    self.attend(tick.forward, (stage, work.microbatch, block), tensors)
                self.finish(list(self.flying))
            self.engine.end_tick()

    def attend(self, forward: bool, name: tuple[int, int, int], tensors: dict) -> None:
        stage, microbatch, block = name
        keys = [microbatch * len(self.nanos) + nano for nano in self.nanos]
        recomputed = not forward and self.blocks[stage][block]
        if any(map(any, self.blocks)):  # blocks are units then, which begin when the last one is done
            self.finish(list(self.flying))
        if forward or recomputed:
            for nano in self.nanos:
                self.finish([nano])
                t: Tensors = tensors[*name, nano]
                call = self.engine.send(self.engine.begin_forward(t.q[0], t.k[0], t.v[0], keys[nano]))
                self.flying[nano] = (*name, nano), call
            for nano in self.nanos:
                self.engine.attend(self.flying[nano][1])
        if not forward:
            self.finish(list(self.flying) if recomputed else [])
            for nano in reversed(self.nanos):
                self.finish([nano])
                t = tensors[*name, nano]
                saved = Saved(t.q[0], t.k[0], t.v[0], *self.saved[*name, nano])
                call = self.engine.begin_backward(t.dout[0], saved, keys[nano])
                self.flying[nano] = (*name, nano), self.engine.send(call)
            for nano in reversed(self.nanos):
                self.engine.attend(self.flying[nano][1])

    def finish(self, nanos: Iterable[int]) -> None:
        for nano in [nano for nano in nanos if nano in self.flying]:
            name, call = self.flying.pop(nano)
            if call.direction is FORWARD:
                self.saved[name] = self.engine.finish(call)
            else:
                out, lse, *_ = self.saved.pop(name)
                self.results[name] = [out, lse, *self.engine.finish(call)]


UNEQUAL = [[False], [True, True], [False, True], []]


@pytest.mark.parametrize(
    ("ranks", "microbatches", "blocks", "nano_batches", "symmetric"),
    [
        (2, 2, [[False], [False]], 1, False),
        pytest.param(4, 8, UNEQUAL, 1, False, marks=pytest.mark.matrix),
        pytest.param(2, 4, [[True], [False, True], [False], []], 1, False, marks=pytest.mark.matrix),
        (2, 2, [[False, False], [False]], 2, False),
        pytest.param(4, 4, UNEQUAL, 2, False, marks=pytest.mark.matrix),
        pytest.param(4, 4, UNEQUAL, 2, True, marks=[needs_linux, pytest.mark.matrix]),
    ],
    ids=["pp2", "pp4-unequal-recomputed", "pp2-two-chunks", "halves-pp2", "halves-pp4-unequal-recomputed", "symmetric"],
)
def test_ticks_compute_every_microbatch_and_ranks_keep_step(
    ranks: int, microbatches: int, blocks: list, nano_batches: int, symmetric: bool
) -> None:
    torch.manual_seed(0)
    program = make_program(tick_schedule(ranks, microbatches, len(blocks) // ranks), blocks)
    plans = pool_plans(program, ranks, nano_batches)
    tensors = {
        (stage, microbatch, block, nano): Tensors.random(half_layout(microbatch, nano), SHAPE)
        for stage, flags in enumerate(blocks)
        for block in range(len(flags))
        for microbatch in range(microbatches)
        for nano in range(nano_batches)
    }
    transports = symmetric_transports(ranks) if symmetric else thread_transports(ranks, max_delay_s=0.002)
    every = [Rank(rank, program, plans, blocks, transports[rank]) for rank in range(ranks)]
    run_ranks(ranks, lambda rank: every[rank].run(tensors))
    order = exchanges(every[0].events)
    assert {key for _, key in order} == set(range(nano_batches * len(program.pools)))
    for rank in every:
        assert exchanges(rank.events) == order
        finished = [(name.replace("finish", "attend"), key) for name, key in rank.events if name.startswith("finish")]
        assert Counter(finished) == Counter(event for event in order if event[0].startswith("attend"))
    results = {name: result for rank in every for name, result in rank.results.items()}
    assert results.keys() == tensors.keys()
    for name, result in results.items():
        layout = half_layout(name[1], name[3])
        whole = undivided(layout, SHAPE, tensors[name])
        assert_ranks_as_exact([result], whole, dense(layout, tensors[name]))


def exchanges(events: Events) -> Events:
    """The steps that may start exchanges, in their order."""
    return [event for event in events if event[0].startswith(("start", "attend"))]


def test_ranks_without_a_microbatch_take_their_share() -> None:
    """The heavy microbatch alone in a tick is spread over all ranks of the pipeline."""
    program = make_program(tick_schedule(4, 4), [[False]] * 4)
    alone = next(i for i, pool in enumerate(program.pools) if pool.microbatches == (0, None, None, None))
    loads = np.array(pool_plans(program, 4)[alone][0].stats.loads)
    assert loads.min() > 0
    assert loads.max() <= 1.5 * loads.mean()


def test_what_falls_out_of_step_is_an_error() -> None:
    q, kv = torch.randn(4, 4, 8), torch.randn(4, 2, 8)
    mine = [TickCall(forward=True, keys=(0,), mine=True)]
    engine = make_engine()
    with pytest.raises(RuntimeError, match="microbatch 5 outside its tick"):
        engine.forward(q, kv, kv, 5)
    engine.begin_tick(mine, microbatch=6)
    with pytest.raises(RuntimeError, match="before the last one has ended"):
        engine.begin_tick(mine, microbatch=6)
    with pytest.raises(RuntimeError, match="microbatch 5 outside its tick"):
        engine.forward(q, kv, kv, 5)
    with pytest.raises(RuntimeError, match=r"expect torch\.float32"):
        engine.forward(q.bfloat16(), kv.bfloat16(), kv.bfloat16(), 6)
    with pytest.raises(RuntimeError, match="has not taken"):
        engine.end_tick()
    engine = make_engine()
    engine.begin_tick([TickCall(forward=False, keys=(0,), mine=True)], microbatch=6)
    with pytest.raises(RuntimeError, match="comes to start_forward, but its next step"):
        engine.forward(q, kv, kv, 6)


def test_the_second_half_cannot_go_first() -> None:
    q, kv = torch.randn(4, 4, 8), torch.randn(4, 2, 8)
    layout = TokenLayout.from_segments([[(0, 0, 4)]])
    first_try, engine = make_engine(), make_engine()
    for key in (2, 3):
        first_try.add_plan(key, make_plan(layout, SHAPE))
        engine.add_plan(key, make_plan(layout, SHAPE))
    both = [TickCall(forward=True, keys=(2, 3), mine=True)]
    first_try.begin_tick(both, microbatch=6)
    with pytest.raises(RuntimeError, match=r"comes to start_forward, but its next step .*nano=0"):
        first_try.begin_forward(q, kv, kv, 7)
    engine.begin_tick(both, microbatch=6)
    first, second = (engine.send(engine.begin_forward(q, kv, kv, key)) for key in (6, 7))
    assert (first.key, second.key) == (2, 3)
    with pytest.raises(RuntimeError, match=r"comes to attend_forward, but its next step .*nano=0"):
        engine.attend(second)
