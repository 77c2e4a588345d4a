# SPDX-License-Identifier: BSD-3-Clause
"""Graphs of the ping-pong loop, over blocks in plain PyTorch: it asks of a block no more than ``BlockView``."""

from itertools import product

import pytest
import torch
from torch._dynamo.utils import counters

from tests.lib.cpp import needs_compiler
from tests.lib.plain_blocks import NanoBatchesAndWhole, PlainBlock
from torchtitan_cad.integration.pingpong.loop import PingPong
from torchtitan_cad.planning import AttentionShape

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, dtype_bytes=4)


@needs_compiler
@pytest.mark.matrix
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("backend", [None, "inductor"])
def test_nano_batches_give_what_the_whole_gives(rows, backend):
    cpu = torch.device("cpu")
    job = NanoBatchesAndWhole(cpu, torch.float32, 32, 64, SHAPE, 0, rows=rows)
    job.check(backend)


@pytest.mark.matrix
@needs_compiler
def test_stages_of_one_block_and_of_several_compile_for_every_layout_of_rows():
    """Runs with gradients and without take more graphs together than torch's own limit allows."""
    loops = []
    for num_blocks in (1, 3):
        views = [PlainBlock(32, SHAPE) for _ in range(num_blocks)]
        loop = PingPong(views, "never run")
        loop.compile("eager")
        loops.append(loop)
    counters.clear()
    rope = torch.randn(16, 4)
    by_row = torch.randn(2, 16, 32).chunk(2), (rope, rope)
    in_the_middle = torch.randn(1, 16, 32).chunk(2, dim=1), rope.chunk(2)
    for grad, loop, (xs, ropes) in product(
        (True, False), loops, (by_row, in_the_middle)
    ):
        *segments, last = loop.segments
        with torch.set_grad_enabled(grad):
            attended = None
            for segment in segments:
                results = list(map(segment, xs, (attended,) * 2, ropes, (None,) * 2))
                xs = [x for x, *_ in results]
                attended = torch.randn(xs[0].shape)
            for x in xs:
                assert last(x, attended, None, None)[1] is None
    assert counters["stats"]["unique_graphs"] > 8
