"""Attention of a pipeline in ticks, ranks as threads: results of all microbatches, and one order for all ranks."""

import random
import time

import numpy as np
import pytest
import torch

from tests.runtime.test_engine import Tensors, dense
from tests.runtime.threaded import run_ranks, thread_transports
from torchtitan_cad.planning import AttentionShape, Plan, PlannerConfig, TokenLayout, make_plan
from torchtitan_cad.planning.program import Program, make_program
from torchtitan_cad.planning.ticks import tick_schedule
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.kernels.base import get_kernel
from torchtitan_cad.runtime.ticked import TickCall, TickedEngine

CPU, SHAPE = torch.device("cpu"), AttentionShape(4, 2, 8, 4)
Events = list[tuple[str, int]]


def microbatch_layout(num: int) -> TokenLayout:
    """One rank's tokens of a microbatch; number 0 is ten times heavier than the others."""
    lengths = [640] if num == 0 else [64] * 10
    return TokenLayout.from_segments([[(doc, 0, length) for doc, length in enumerate(lengths)]])


def pool_plans(program: Program, ranks: int) -> list[Plan]:
    plans = []
    for pool in program.pools:
        segments: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
        for rank, microbatch in enumerate(pool.microbatches):
            if microbatch is not None:
                mine = microbatch_layout(microbatch).segments()[0]
                segments[rank] = [(1000 * rank + doc, start, length) for doc, start, length in mine]
        plans.append(make_plan(TokenLayout.from_segments(segments), SHAPE, PlannerConfig(min_shard=32)))
    return plans


class Rank:
    """One pipeline rank: runs its stages' blocks, each on tensors of its own."""

    def __init__(self, rank: int, program: Program, plans: list[Plan], blocks: list[list[bool]], transport) -> None:
        self.rank, self.program, self.blocks = rank, program, blocks
        engine = CoreAttentionEngine(get_kernel("cpu", CPU), transport, rank=rank, device=CPU, scale=8**-0.5)
        for key, plan in enumerate(plans):
            engine.add_plan(key, plan)
        self.events: Events = []
        engine.trace = lambda name, key: self.events.append((name, key))
        self.ticked = TickedEngine(engine, SHAPE, torch.float32)
        self.saved: dict = {}
        self.results: dict = {}
        self.delays = random.Random(rank)

    def run(self, tensors: dict) -> None:
        for number, tick in enumerate(self.program.ticks):
            time.sleep(self.delays.random() * 0.01)
            work = tick.work[self.rank]
            pools = self.program.pools
            calls = [
                TickCall(c.forward, c.pool, pools[c.pool].microbatches[self.rank] is not None)
                for c in self.program.calls[number]
            ]
            self.ticked.begin(calls, None if work is None else work.microbatch)
            if work is not None:
                stage = work.chunk * len(tick.work) + self.rank
                for block in (
                    range(len(self.blocks[stage])) if tick.forward else reversed(range(len(self.blocks[stage])))
                ):
                    self.attend(tick.forward, (stage, work.microbatch, block), tensors)
            self.ticked.end()

    def attend(self, forward: bool, name: tuple[int, int, int], tensors: dict) -> None:
        stage, microbatch, block = name
        t: Tensors = tensors[name]
        q, k, v, dout = t.q[0], t.k[0], t.v[0], t.dout[0]
        if forward or self.blocks[stage][block]:
            self.saved[name] = self.ticked.forward(q, k, v, microbatch)
        if not forward:
            out, lse, *kept = self.saved.pop(name)
            self.results[name] = [out, lse, *self.ticked.backward(dout, q, k, v, out, lse, *kept, microbatch)]


@pytest.mark.parametrize(
    ("ranks", "microbatches", "blocks"),
    [
        (2, 2, [[False], [False]]),
        (4, 8, [[False], [True, True], [False, True], []]),
        (2, 4, [[True], [False, True], [False], []]),
    ],
    ids=["pp2", "pp4-unequal-recomputed", "pp2-two-chunks"],
)
def test_ticks_compute_every_microbatch_and_ranks_keep_step(ranks: int, microbatches: int, blocks: list) -> None:
    torch.manual_seed(0)
    program = make_program(tick_schedule(ranks, microbatches, len(blocks) // ranks), blocks)
    plans = pool_plans(program, ranks)
    tensors = {
        (stage, microbatch, block): Tensors.random(microbatch_layout(microbatch), SHAPE)
        for stage, flags in enumerate(blocks)
        for block in range(len(flags))
        for microbatch in range(microbatches)
    }
    transports = thread_transports(ranks, max_delay_s=0.002)
    every = [Rank(rank, program, plans, blocks, transports[rank]) for rank in range(ranks)]
    run_ranks(ranks, lambda rank: every[rank].run(tensors))
    assert every[0].events
    assert all(rank.events == every[0].events for rank in every)
    results = {name: result for rank in every for name, result in rank.results.items()}
    assert results.keys() == tensors.keys()
    for name, result in results.items():
        (want,) = dense(microbatch_layout(name[1]), tensors[name])
        for mine, reference in zip(result, want, strict=True):
            assert (mine.double() - reference).norm() <= 1e-5 * reference.norm(), name


def test_ranks_without_a_microbatch_take_their_share() -> None:
    """The heavy microbatch alone in a tick is spread over all ranks of the pipeline."""
    program = make_program(tick_schedule(4, 4), [[False]] * 4)
    alone = next(i for i, pool in enumerate(program.pools) if pool.microbatches == (0, None, None, None))
    loads = np.array(pool_plans(program, 4)[alone].stats.loads)
    assert loads.min() > 0
    assert loads.max() <= 1.5 * loads.mean()


def ticked() -> TickedEngine:
    engine = CoreAttentionEngine(get_kernel("cpu", CPU), None, rank=0, device=CPU, scale=1.0)
    return TickedEngine(engine, SHAPE, torch.float32)


def test_what_falls_out_of_step_is_an_error() -> None:
    q, kv = torch.randn(4, 4, 8), torch.randn(4, 2, 8)
    mine = [TickCall(forward=True, key=0, mine=True)]
    engine = ticked()
    with pytest.raises(RuntimeError, match="microbatch 5 outside its tick"):
        engine.forward(q, kv, kv, 5)
    engine.begin(mine, microbatch=6)
    with pytest.raises(RuntimeError, match="before the last one has ended"):
        engine.begin(mine, microbatch=6)
    with pytest.raises(RuntimeError, match="microbatch 5 outside its tick"):
        engine.forward(q, kv, kv, 5)
    with pytest.raises(RuntimeError, match=r"expect torch\.float32"):
        engine.forward(q.bfloat16(), kv.bfloat16(), kv.bfloat16(), 6)
    with pytest.raises(RuntimeError, match="has not made call"):
        engine.end()
    engine = ticked()
    engine.begin([TickCall(forward=False, key=0, mine=True)], microbatch=6)
    with pytest.raises(RuntimeError, match="runs attention forward, but its next call"):
        engine.forward(q, kv, kv, 6)
