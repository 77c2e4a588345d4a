"""Ping-pong asks of a block no more than ``BlockView``: blocks in plain PyTorch do, without torchtitan."""

import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.support.cpp import needs_compiler
from tests.support.plain_blocks import HalvesAndWhole, PlainBlock
from torchtitan_cad.integration.pingpong.loop import PingPong
from torchtitan_cad.planning import AttentionShape

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, dtype_bytes=4)


@pytest.mark.parametrize(
    "backend", [None, pytest.param("inductor", marks=[needs_compiler, pytest.mark.matrix])], ids=["eager", "compiled"]
)
def test_halves_of_plain_blocks_give_what_the_whole_gives(backend: str | None) -> None:
    HalvesAndWhole(torch.device("cpu"), torch.float32, dim=32, seq_len=64, shape=SHAPE, seed=0).check(backend)


def test_torchtitan_is_not_needed() -> None:
    code = "import sys, tests.support.plain_blocks; print([name for name in sys.modules if name == 'torchtitan'])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


@needs_compiler
def test_stages_of_one_block_and_of_several_compile_for_every_layout_of_rows() -> None:
    """Runs with gradients and without take more graphs together than torch's own limit allows."""
    loops = []
    for number in (1, 3):
        views: Any = [PlainBlock(32, SHAPE) for _ in range(number)]
        loops.append(PingPong(views, "never run"))
        loops[-1].compile("eager")
    torch._dynamo.utils.counters.clear()
    for grad, rows, loop in itertools.product((True, False), (1, 2), loops):
        whole, rope = torch.randn(rows, 16, 32), torch.randn(16, 4)
        xs, ropes = (whole.chunk(2), (rope, rope)) if rows == 2 else (whole.chunk(2, 1), rope.chunk(2))
        with torch.set_grad_enabled(grad):
            for i, region in enumerate(loop.regions):
                attended = torch.randn(xs[0].shape) if i else None
                begun = ropes if i < len(loop.blocks) else (None, None)
                results = [region(x, attended, rope, None) for x, rope in zip(xs, begun, strict=True)]
                xs = tuple(x for x, *_ in results)
                assert all((q is None) == (i == len(loop.blocks)) for _, q, _, _ in results)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 8
