# SPDX-License-Identifier: BSD-3-Clause
"""The engine on threaded ranks: as exact as undivided attention, and the same bits however many chunks rows take."""

import dataclasses
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from tests.lib.plans import random_layout, random_plan
from tests.lib.refusals import refusal
from tests.lib.rows import (
    CPU,
    SHAPES,
    Tensors,
    assert_ranks_as_exact,
    assert_same_bits,
    dense,
    execute,
    undivided,
)
from tests.lib.sets import params, seeds
from tests.lib.shapes import backward_shape
from tests.lib.tables import check_plan
from tests.lib.threaded import BUFFER_BYTES, thread_transports
from torchtitan_cad.planning import (
    AttentionShape,
    Plan,
    PlannerConfig,
    TokenLayout,
    make_plan,
)
from torchtitan_cad.planning.exchange import calls
from torchtitan_cad.planning.exchange.messages import RowBytes
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.kernels.select import get_kernel
from torchtitan_cad.runtime.tick_engine import TickCall, TickEngine

SHAPE = SHAPES["gqa 8:2"]
LAYOUT = TokenLayout.from_segments(
    [[(0, 0, 1500)], [(1, 0, 700), (2, 0, 800)], [(3, 0, 129)], []]
)
HOME = PlannerConfig(planner="home")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random_plans(rng, layout, shape, *, aligned: bool = False) -> list[Plan]:
    """One for forward and one for backward; plans of aligned cuts do not split keys."""
    return [
        random_plan(rng, layout, shape, aligned=aligned, split_kv=not aligned)
        for _ in range(2)
    ]


def check_exactness(plan, tensors, *runs: dict[str, Any]):
    """Each run, by its options of ``execute``, errs at most twice as much as undivided attention."""
    whole = undivided(plan.layout, plan.shape, tensors)
    reference = dense(plan.layout, tensors, plan.shape.window)
    for options in runs:
        assert_ranks_as_exact(execute(plan, tensors, **options), whole, reference)


@pytest.mark.parametrize("seed", seeds(8, 60))
def test_any_plan_is_as_exact_as_undivided_attention(seed):
    """Plan, rows, and how rows are kept are drawn; either direction may stay at home."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    shape = SHAPES[rng.choice(list(SHAPES))]
    dtype = DTYPES[rng.integers(len(DTYPES))]
    keep, with_dlse = rng.random(2) < 0.5
    layout = random_layout(rng, num_ranks=int(rng.integers(1, 5)))
    plan, other = random_plans(rng, layout, shape)
    check_plan(plan)
    stays = rng.random()
    if stays < 0.2:
        plan = make_plan(layout, shape, HOME)
    elif stays < 0.4:
        other = make_plan(layout, shape, HOME)
    # plans differ as in ticks
    options = {"keep": keep, "backward": None if keep else other}
    runs = [{**options, "squares_only": squares_only} for squares_only in (False, True)]
    tensors = Tensors.random(layout, shape, dtype, with_dlse=with_dlse)
    check_exactness(plan, tensors, *runs)


@pytest.mark.parametrize("window", params([1, 20, 128, 500], [20, 128]))
def test_windows_are_as_exact_as_undivided_attention(window):
    """Documents lie on several ranks."""
    rng = np.random.default_rng(window)
    torch.manual_seed(window)
    shape = dataclasses.replace(SHAPE, window=window)
    layout = random_layout(rng, num_ranks=4, max_length=400)
    plan = make_plan(layout, shape)
    check_plan(plan)
    tensors = Tensors.random(layout, shape, with_dlse=True)
    check_exactness(plan, tensors, {"keep": window == 20})


@pytest.mark.parametrize("seed", seeds(1, 8))
def test_tile_aligned_plans_without_split_keys_are_bit_identical(seed):
    """Every plan gives the same forward, so gradients are those of the backward plan used for both."""
    rng = np.random.default_rng(100 + seed)
    torch.manual_seed(seed)
    layout = random_layout(rng, num_ranks=int(rng.integers(2, 5)), max_length=900)
    tensors = Tensors.random(layout, SHAPE)
    plan, backward = random_plans(rng, layout, SHAPE, aligned=True)
    results = execute(plan, tensors, backward=backward)
    whole = undivided(layout, SHAPE, tensors)
    assert_same_bits([x[:2] for x in results], [x[:2] for x in whole])
    assert_same_bits(results, execute(backward, tensors))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (SHAPE, torch.float32),
        (SHAPES["mla"], torch.float64),
        (AttentionShape(3, 3, 11, 2, value_dim=5, shared_dim=3), torch.bfloat16),
    ],
    ids=str,
)
def test_planned_bytes_are_those_that_travel(shape, dtype):
    shape = dataclasses.replace(shape, dtype_bytes=dtype.itemsize)
    forward, other = random_plans(np.random.default_rng(0), LAYOUT, shape)
    backward = Plan.from_tasks(LAYOUT, backward_shape(shape), other.config, other.tasks)
    transports = thread_transports(LAYOUT.num_ranks)
    tensors = Tensors.random(LAYOUT, shape, dtype)
    execute(forward, tensors, backward=backward, transports=transports)
    for direction, plan in (("forward", forward), ("backward", backward)):
        sent = sum(transport.sent[direction] for transport in transports)
        assert sent == plan.stats.total_bytes > 0


def test_errors_name_the_plan():
    engine = CoreAttentionEngine(
        get_kernel("cpu", CPU), None, rank=0, device=CPU, scale=1.0
    )
    q = torch.zeros(3, 4, 16)
    with refusal(error=RuntimeError):
        engine.begin_forward(q, q, q, 5).run()
    engine.add_plan(
        5, make_plan(TokenLayout.from_segments([[(0, 0, 2)]]), SHAPES["mha"])
    )
    with refusal():
        engine.begin_forward(q, q, q, 5).run()


def test_rows_are_kept_by_plans_that_bring_few():
    """All ranks decide alike, and what is kept changes no bit."""
    torch.manual_seed(0)
    layout = TokenLayout.from_segments([[(0, 0, 768)], *[[]] * 3])
    tensors = Tensors.random(layout, SHAPE)
    row_bytes = RowBytes.of(SHAPE)
    plan = make_plan(layout, SHAPE)
    needed = plan.most_rows.kept_bytes(row_bytes)
    query_rows, key_rows = (int(needs.rows_in.sum()) for needs in plan.needs)
    again = query_rows * row_bytes.forward_queries + key_rows * row_bytes.keys
    sent = []
    results = []
    for kept_bytes in (0, needed - 1, needed):
        transports = thread_transports(layout.num_ranks)
        options = {"kept_bytes": kept_bytes, "transports": transports}
        results.append(execute(plan, tensors, **options))
        sent.append(sum(x.sent["backward"] for x in transports))
        assert_same_bits(results[-1], results[0])
    assert sent[0] == sent[1] == sent[2] + again > sent[2]


# Rows by every way, in one chunk or several ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(2, 60))
def test_ways_and_chunks_change_no_bit(monkeypatch, seed):
    """Over shared memory, or memory inside hosts of one to four ranks and messages between them, into the same buffers;
    a row's partials are combined in the order in which they arrive, own ones maybe before others return.
    """
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    hosts = np.repeat(range(3), rng.permutation(4)[:3] + 1).tolist()
    rng.shuffle(hosts)
    layout = random_layout(rng, num_ranks=len(hosts), max_length=60)
    plan, backward = random_plans(rng, layout, SHAPE)
    tensors = Tensors.random(layout, SHAPE, DTYPES[seed % 2])
    keep = seed % 4 < 2
    options = {"keep": keep, "backward": None if keep else backward}
    expected = execute(plan, tensors, **options)
    row_bytes = RowBytes.of(SHAPE, keep=False)
    small = 512 * int(rng.integers(4, 50))
    chunks = plan.most_rows.chunks(row_bytes, small)
    while max(map(len, dataclasses.astuple(chunks))) == 1:
        small //= 2
        chunks = plan.most_rows.chunks(row_bytes, small)
    for way, buffer_bytes in product((None, hosts), (BUFFER_BYTES, small)):
        monkeypatch.setattr(calls, "MOST_UNCOMBINED", int(rng.choice([0, 1000])))
        results = execute(
            plan, tensors, **options, hosts=way, buffer_bytes=buffer_bytes
        )
        assert_same_bits(results, expected)


# What pipelines in ticks refuse; that they compute every microbatch is in tests/integration/test_ticks.py ------------


def tick_engine() -> TickEngine:
    return TickEngine(
        AttentionShape(4, 2, 8, 4),
        torch.float32,
        kernel=get_kernel("cpu", CPU),
        transport=None,
        rank=0,
        device=CPU,
        scale=1.0,
    )


def one_call(forward: bool) -> list[TickCall]:
    return [TickCall(forward=forward, keys=(0,), attends=True)]


ROWS = torch.zeros(4, 4, 8), torch.zeros(4, 2, 8), torch.zeros(4, 2, 8)
HALVES = tuple(x.bfloat16() for x in ROWS)


def test_what_falls_out_of_step_is_an_error():
    engine = tick_engine()
    with refusal(error=RuntimeError):
        engine.begin_forward(*ROWS, 5).run()
    engine.begin_tick(one_call(forward=True), microbatch=6)
    for step in (
        lambda: engine.begin_tick(one_call(forward=True), microbatch=6),
        lambda: engine.begin_forward(*ROWS, 5).run(),
        lambda: engine.begin_forward(*HALVES, 6).run(),
        engine.end_tick,
    ):
        with refusal(error=RuntimeError):
            step()
    engine = tick_engine()
    engine.begin_tick(one_call(forward=False), microbatch=6)
    with refusal(error=RuntimeError):
        engine.begin_forward(*ROWS, 6).run()
