"""The engine on a plan for forward and another one for backward, as in ticks of pipelines."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.plans import random_layout, random_plan
from tests.runtime.rows import CPU, SHAPES, Tensors, execute
from tests.runtime.threaded import ThreadTransport, run_ranks, thread_transports
from tests.sets import seeds
from torchtitan_cad.planning import (
    Plan,
    PlannerConfig,
    TokenLayout,
    make_plan,
)
from torchtitan_cad.runtime.call import Saved
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.kernels.select import get_kernel
from torchtitan_cad.runtime.packing import RowFormat
from torchtitan_cad.runtime.transport import Routes

SHAPE = SHAPES["gqa 8:2"]
LAYOUT = TokenLayout.from_segments([[(0, 0, 1500)], [(1, 0, 700), (2, 0, 800)], [(3, 0, 129)], []])
HOME = PlannerConfig(planner="home")


@pytest.mark.parametrize("seed", seeds(2, 6))
def test_each_direction_has_the_bits_of_its_plan(seed: int) -> None:
    """Where forward has the same bits under every plan, gradients are those of the backward plan used for both."""
    rng = np.random.default_rng(200 + seed)
    torch.manual_seed(seed)
    layout = random_layout(rng, num_ranks=int(rng.integers(2, 5)), max_length=900)
    tensors = Tensors.random(layout, SHAPE)
    forward = random_plan(rng, layout, SHAPE, aligned=True, split_kv=False)
    backward = random_plan(rng, layout, SHAPE, aligned=True, split_kv=False)
    assert forward.fingerprint() != backward.fingerprint()
    both = execute(forward, tensors, backward=backward)
    for delay in (0.0, 0.005):
        again = execute(forward, tensors, backward=backward, max_delay_s=delay)
        for got, repeated, alone in zip(both, again, execute(backward, tensors), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, repeated, strict=True))
            assert all(torch.equal(a, b) for a, b in zip(got, alone, strict=True))


@pytest.mark.parametrize("moves", ["forward", "backward"])
def test_one_direction_may_stay_at_home(moves: str) -> None:
    torch.manual_seed(1)
    tensors = Tensors.random(LAYOUT, SHAPE)
    home, away = make_plan(LAYOUT, SHAPE, HOME), make_plan(LAYOUT, SHAPE, PlannerConfig(split_kv=False))
    assert home.stats.total_bytes == 0 < away.stats.total_bytes
    forward, backward = (away, home) if moves == "forward" else (home, away)
    for got, want in zip(execute(forward, tensors, backward=backward), execute(backward, tensors), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


class CountingTransport:
    """Counts the bytes of every phase on their way through another transport."""

    name = "counting"
    replayable = False

    def __init__(self, inner: ThreadTransport) -> None:
        self.inner, self.sent = inner, {"forward": 0, "backward": 0}
        self.prepare, self.begin, self.buffer_bytes = inner.prepare, inner.begin, inner.buffer_bytes

    def start(self, messages: Sequence[Sequence[Tensor]], routes: Routes, phase: str, call: int):
        for parts, route in zip(messages, routes, strict=True):
            self.sent[phase.split()[0]] += sum(route.send_counts) * RowFormat(parts).row_bytes
        return self.inner.start(messages, routes, phase, call)


def bytes_sent(forward: Plan, backward: Plan) -> dict[str, int]:
    """Over all ranks, by direction."""
    transports = [CountingTransport(inner) for inner in thread_transports(LAYOUT.num_ranks)]
    tensors = Tensors.random(LAYOUT, SHAPE)

    def body(rank: int) -> None:
        engine = CoreAttentionEngine(get_kernel("cpu", CPU), transports[rank], rank=rank, device=CPU, scale=0.25)
        engine.add_plan(0, forward)
        engine.add_plan(1, backward)
        q, k, v, dout = tensors.q[rank], tensors.k[rank], tensors.v[rank], tensors.dout[rank]
        engine.backward(dout, Saved(q, k, v, *engine.forward(q, k, v, 0)), 1)

    run_ranks(LAYOUT.num_ranks, body)
    return {direction: sum(t.sent[direction] for t in transports) for direction in ("forward", "backward")}


def test_planned_bytes_are_those_that_travel() -> None:
    """In both directions."""
    rng = np.random.default_rng(0)
    forward, other = (random_plan(rng, LAYOUT, SHAPE, aligned=False, split_kv=True) for _ in range(2))
    backward = Plan.from_tasks(LAYOUT, SHAPE.for_backward(), other.config, other.tasks)
    sent = bytes_sent(forward, backward)
    assert sent == {"forward": forward.stats.total_bytes, "backward": backward.stats.total_bytes}
