# SPDX-License-Identifier: BSD-3-Clause
"""The ping-pong loop over blocks in plain PyTorch, with all ranks as threads: any plans, any delays, no deadlock.

It asks of a block no more than ``BlockView``, and not for torchtitan.
"""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from tests.lib.cpp import needs_compiler
from tests.lib.plain_blocks import NanoBatchesAndWhole, PlainBlock
from tests.lib.sets import seeds
from tests.lib.threaded import thread_transports
from torchtitan_cad.integration.pingpong.loop import PingPong
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu
from torchtitan_cad.planning import AttentionShape

enable_cpu()

# torchtitan must not be imported before enable_cpu().
from torchtitan.config.job_config import ActivationCheckpoint  # noqa: E402
from torchtitan.distributed import activation_checkpoint  # noqa: E402

from torchtitan_cad.integration.torchtitan_v0_2.blocks import apply_ac  # noqa: E402

CPU = torch.device("cpu")
SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, dtype_bytes=4)
AC_MODES = [("none", ""), ("selective", "op"), ("selective", "2"), ("full", "op")]
"""Modes of activation checkpointing, and their options."""


def checkpoint(loop: PingPong, mode: str, option: str) -> None:
    if mode == "none":
        return
    # counts all ranks' blocks, as they share a process
    activation_checkpoint._layer_sac_count = 0
    config = ActivationCheckpoint(
        mode=mode,
        selective_ac_option=option,
        per_op_sac_force_recompute_mm_shapes_by_fqns=[],
        early_stop=True,
        preserve_rng_state=False,
    )
    saved = {torch.ops.aten.mm.default}
    apply = activation_checkpoint.apply_ac
    apply_ac(loop, apply, config, op_sac_save_list=saved)


@pytest.mark.parametrize("seed", seeds(4, 18))
def test_any_plans_and_delays_give_the_undivided_result(seed):
    """Two microbatches go forward, then backward; ranks, rows, their length and the mode are drawn.

    Buffers are so small that rows travel in several chunks, with those of the other nano-batch in between.
    """
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(1, 4))
    blocks = NanoBatchesAndWhole(
        CPU,
        torch.float32,
        32,
        2 * int(rng.integers(5, 24)),
        SHAPE,
        seed,
        rows=int(rng.integers(1, 5)),
        transports=thread_transports(ranks, 2**13),
        microbatches=2,
        keep=bool(rng.integers(2)),
    )
    mode, option = AC_MODES[rng.integers(len(AC_MODES))]
    blocks.check(prepare=lambda loop: checkpoint(loop, mode, option))


@needs_compiler
@pytest.mark.matrix
def test_compiled_nano_batches_give_what_the_whole_gives():
    NanoBatchesAndWhole(CPU, torch.float32, 32, 64, SHAPE, seed=0).check("inductor")


@pytest.mark.matrix
@needs_compiler
def test_stages_of_one_block_and_of_several_compile_for_every_layout_of_rows():
    """Runs with gradients and without take more graphs together than torch's own limit allows."""
    loops = []
    for num_blocks in (1, 3):
        views: Any = [PlainBlock(32, SHAPE) for _ in range(num_blocks)]
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
