"""What the engine of pipelines in ticks refuses.

That ticks compute every microbatch, all ranks in the same order of exchanges, is in tests/integration/test_ticks.py.
"""

import pytest
import torch

from torchtitan_cad.planning import AttentionShape, TokenLayout, make_plan
from torchtitan_cad.runtime.kernels.select import get_kernel
from torchtitan_cad.runtime.tick_engine import TickCall, TickEngine
from torchtitan_cad.runtime.transport import Transport

CPU, SHAPE = torch.device("cpu"), AttentionShape(4, 2, 8, 4)


def make_engine(transport: Transport | None = None, rank: int = 0, scale: float = 1.0) -> TickEngine:
    kernel = get_kernel("cpu", CPU)
    return TickEngine(SHAPE, torch.float32, kernel=kernel, transport=transport, rank=rank, device=CPU, scale=scale)


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
