# SPDX-License-Identifier: BSD-3-Clause
"""The ping-pong loop over blocks in plain PyTorch, with all ranks as threads: any plans, any delays, no deadlock.

It asks of a block no more than ``BlockView``, and not for torchtitan.
"""

import itertools
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.lib.cpp import needs_compiler
from tests.lib.plain_blocks import NanoBatchesAndWhole, PlainBlock
from tests.lib.sets import params, seeds
from tests.lib.threaded import needs_linux, symmetric_transports, thread_transports
from torchtitan_cad.integration.pingpong.loop import PingPong
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu
from torchtitan_cad.planning import AttentionShape

enable_cpu()

# torchtitan must not be imported before enable_cpu().
from torchtitan.distributed import activation_checkpoint  # noqa: E402

from torchtitan_cad.integration.torchtitan_v0_2.blocks import apply_ac  # noqa: E402

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, dtype_bytes=4)
AC_MODES = {
    "none": ("none", ""),
    "op": ("selective", "op"),
    "layer": ("selective", "2"),
    "full": ("full", "op"),
}
"""Modes of activation checkpointing, and their options."""


def checkpoint(loop: PingPong, mode: str) -> None:
    activation_checkpoint._layer_sac_count = (
        0  # counts all ranks' blocks, as they share a process
    )
    config = SimpleNamespace(
        mode=AC_MODES[mode][0],
        selective_ac_option=AC_MODES[mode][1],
        preserve_rng_state=False,
        determinism_check="default",
        early_stop=True,
        debug=False,
        per_op_sac_force_recompute_mm_shapes_by_fqns=[],
    )
    apply_ac(
        loop,
        activation_checkpoint.apply_ac,
        config,
        op_sac_save_list={torch.ops.aten.mm.default},
    )


def check(seed: int, max_delay_s: float = 0.0, *, symmetric: bool = False) -> None:
    """Two microbatches go forward, then backward; ranks, rows, their length and the mode are drawn."""
    rng = np.random.default_rng(seed)
    ranks, rows, seq_len = (
        int(rng.integers(1, 4)),
        int(rng.integers(1, 5)),
        2 * int(rng.integers(5, 24)),
    )
    keep, mode = bool(rng.integers(2)), str(rng.choice(list(AC_MODES)))
    transports = (
        symmetric_transports(ranks, 2**13)
        if symmetric
        else thread_transports(ranks, max_delay_s)
    )
    options = {"rows": rows, "transports": transports, "microbatches": 2, "keep": keep}
    job = NanoBatchesAndWhole(
        torch.device("cpu"), torch.float32, 32, seq_len, SHAPE, seed, **options
    )
    job.check(prepare=None if mode == "none" else lambda loop: checkpoint(loop, mode))


@pytest.mark.parametrize("seed", seeds(3, 12))
def test_any_plans_and_delays_give_the_undivided_result(seed):
    check(seed, 0.002)


@needs_linux
@pytest.mark.parametrize("seed", params(range(20, 26), (20, 21)))
def test_exchanges_of_both_nano_batches_fit_into_symmetric_memory(seed):
    """Into buffers so small that rows travel in several chunks, with those of the other nano-batch in between."""
    check(seed, symmetric=True)


@pytest.mark.parametrize(
    "backend",
    [None, pytest.param("inductor", marks=[needs_compiler, pytest.mark.matrix])],
    ids=["eager", "compiled"],
)
def test_nano_batches_of_plain_blocks_give_what_the_whole_gives(backend):
    NanoBatchesAndWhole(
        torch.device("cpu"), torch.float32, dim=32, seq_len=64, shape=SHAPE, seed=0
    ).check(backend)


def test_torchtitan_is_not_needed():
    code = "import sys, tests.lib.plain_blocks; print([name for name in sys.modules if name == 'torchtitan'])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True
        ).stdout
        == "[]\n"
    )


@pytest.mark.matrix
@needs_compiler
def test_stages_of_one_block_and_of_several_compile_for_every_layout_of_rows():
    """Runs with gradients and without take more graphs together than torch's own limit allows."""
    loops = []
    for number in (1, 3):
        views: Any = [PlainBlock(32, SHAPE) for _ in range(number)]
        loops.append(PingPong(views, "never run"))
        loops[-1].compile("eager")
    torch._dynamo.utils.counters.clear()
    for grad, rows, loop in itertools.product((True, False), (1, 2), loops):
        whole, rope = torch.randn(rows, 16, 32), torch.randn(16, 4)
        xs, ropes = (
            (whole.chunk(2), (rope, rope))
            if rows == 2
            else (whole.chunk(2, 1), rope.chunk(2))
        )
        with torch.set_grad_enabled(grad):
            for i, segment in enumerate(loop.segments):
                attended = torch.randn(xs[0].shape) if i else None
                begun = ropes if i < len(loop.blocks) else (None, None)
                results = [
                    segment(x, attended, rope, None)
                    for x, rope in zip(xs, begun, strict=True)
                ]
                xs = tuple(x for x, *_ in results)
                assert all(
                    (q is None) == (i == len(loop.blocks)) for _, q, _, _ in results
                )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 8
