# SPDX-License-Identifier: BSD-3-Clause
"""The engine on threaded ranks: as exact as undivided attention, and the same bits however many chunks rows take."""

import dataclasses
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.lib.plans import random_layout, random_plan
from tests.lib.refusals import refusal
from tests.lib.rows import (
    CPU,
    SHAPES,
    TRANSPORTS,
    SquareKernel,
    Tensors,
    assert_ranks_as_exact,
    assert_same_bits,
    dense,
    execute,
    undivided,
)
from tests.lib.sets import matrix, params, seeds
from tests.lib.threaded import BUFFER_BYTES, needs_linux, thread_transports
from torchtitan_cad.planning import (
    AttentionShape,
    Plan,
    PlannerConfig,
    TokenLayout,
    make_plan,
    validate_plan,
)
from torchtitan_cad.planning.exchange import calls
from torchtitan_cad.planning.exchange.messages import RowBytes
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.kernels.select import get_kernel
from torchtitan_cad.runtime.tables import PlanTables
from torchtitan_cad.runtime.tick_engine import TickCall, TickEngine

SHAPE = SHAPES["gqa 8:2"]
LAYOUT = TokenLayout.from_segments(
    [[(0, 0, 1500)], [(1, 0, 700), (2, 0, 800)], [(3, 0, 129)], []]
)
HOME = PlannerConfig(planner="home")


@pytest.fixture
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets two rounds of small tasks be cut inside one."""
    monkeypatch.setattr(calls, "CUT_AT", 8)


def check_exactness(plan: Plan, tensors: Tensors, *runs: dict[str, Any]) -> None:
    """Each run, by its options of ``execute``, errs at most twice as much as undivided attention."""
    whole, reference = (
        undivided(plan.layout, plan.shape, tensors),
        dense(plan.layout, tensors, plan.shape.window),
    )
    for options in runs:
        assert_ranks_as_exact(execute(plan, tensors, **options), whole, reference)


def kinds_of_calls() -> Iterator[Any]:
    """All combinations of rows and options. In the short set are eight, among which every two values meet."""
    rows = [
        ("mha", torch.float32),
        ("gqa 8:2", torch.float32),
        ("gqa 8:2", torch.bfloat16),
        ("mla", torch.float32),
    ]
    rows += [("mla", torch.bfloat16), ("gqa 8:2", torch.float16)]
    for number, (heads, dtype) in enumerate(rows):
        for keep, symmetric, with_dlse in product((False, True), repeat=3):
            meets = (symmetric != keep) == (number in (1, 3)) and (
                with_dlse != keep
            ) == (number in (2, 3))
            short = meets and number < 4
            marks = [needs_linux] * symmetric + [matrix] * (not short)
            yield pytest.param(heads, dtype, keep, symmetric, with_dlse, marks=marks)


@pytest.mark.parametrize("seed", seeds(1, 6))
@pytest.mark.parametrize(
    ("heads", "dtype", "keep", "symmetric", "with_dlse"), kinds_of_calls()
)
@pytest.mark.usefixtures("small_cuts")
def test_any_plan_is_as_exact_as_undivided_attention(
    seed, heads, dtype, keep, symmetric, with_dlse
):
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    layout, shape = random_layout(rng, num_ranks=int(rng.integers(1, 5))), SHAPES[heads]
    plan = random_plan(rng, layout, shape, aligned=False, split_kv=True)
    validate_plan(plan)
    # as in ticks
    other = (
        None if keep else random_plan(rng, layout, shape, aligned=False, split_kv=True)
    )
    options = {"keep": keep, "symmetric": symmetric, "backward": other}
    runs = [
        {**options, "two_rounds": two_rounds, "squares_only": squares_only}
        for two_rounds, squares_only in product((False, True), repeat=2)
    ]
    check_exactness(
        plan, Tensors.random(layout, shape, dtype, with_dlse=with_dlse), *runs
    )


@pytest.mark.parametrize("window", params([1, 20, 128, 500], [20, 128]))
@pytest.mark.parametrize("keep", [False, True], ids=["resend", "keep"])
@pytest.mark.usefixtures("small_cuts")
def test_windows_are_as_exact_as_undivided_attention(window, keep):
    """Documents lie on several ranks, and halves are cut inside one."""
    rng = np.random.default_rng(window)
    torch.manual_seed(window)
    shape = dataclasses.replace(SHAPE, window=window)
    layout = random_layout(rng, num_ranks=4)
    plan = make_plan(layout, shape)
    validate_plan(plan)
    runs = [{"keep": keep, "two_rounds": two_rounds} for two_rounds in (False, True)]
    check_exactness(plan, Tensors.random(layout, shape, with_dlse=True), *runs)
    if window == 1:
        assert plan.stats.total_bytes == 0


def test_windows_of_documents_at_home_are_plain():
    layout = TokenLayout.from_segments([[(0, 0, 300), (1, 0, 50)], [(2, 0, 200)]])
    shape = dataclasses.replace(SHAPE, window=20)
    plan = make_plan(layout, shape)
    tables = PlanTables.from_exchange(
        plan.exchange(0), plan.moves_rows, CPU, 1.0, two_rounds=True
    )
    assert tables.is_plain
    assert [call.args.window for call in tables.calls] == [20]
    check_exactness(plan, Tensors.random(layout, shape), {})


def test_a_kernel_of_squares_takes_no_windows():
    engine = CoreAttentionEngine(SquareKernel(), None, rank=0, device=CPU, scale=1.0)
    plan = make_plan(
        TokenLayout.from_segments([[(0, 0, 9)]]), dataclasses.replace(SHAPE, window=4)
    )
    with refusal(remedy="cad.kernel"):
        engine.add_plan(0, plan)


@pytest.mark.parametrize("seed", seeds(2, 8))
@TRANSPORTS
def test_tile_aligned_plans_without_split_keys_are_bit_identical(seed, symmetric):
    """Every plan gives the same forward, so gradients are those of the backward plan used for both, whatever delays."""
    rng = np.random.default_rng(100 + seed)
    torch.manual_seed(seed)
    layout = random_layout(rng, num_ranks=int(rng.integers(2, 5)), max_length=900)
    tensors = Tensors.random(layout, SHAPE)
    plan, backward = (
        random_plan(rng, layout, SHAPE, aligned=True, split_kv=False) for _ in range(2)
    )
    assert plan.fingerprint() != backward.fingerprint()
    mine = execute(plan, tensors, backward=backward, symmetric=symmetric)
    whole = undivided(layout, SHAPE, tensors)
    assert_same_bits(
        [of_rank[:2] for of_rank in mine], [of_rank[:2] for of_rank in whole]
    )
    assert_same_bits(mine, execute(backward, tensors))
    assert_same_bits(mine, execute(plan, tensors, backward=backward, max_delay_s=0.005))


@pytest.mark.parametrize("moves", ["forward", "backward"])
def test_one_direction_may_stay_at_home(moves):
    torch.manual_seed(1)
    tensors = Tensors.random(LAYOUT, SHAPE)
    home, away = (
        make_plan(LAYOUT, SHAPE, HOME),
        make_plan(LAYOUT, SHAPE, PlannerConfig(split_kv=False)),
    )
    assert home.stats.total_bytes == 0 < away.stats.total_bytes
    forward, backward = (away, home) if moves == "forward" else (home, away)
    assert_same_bits(
        execute(forward, tensors, backward=backward), execute(backward, tensors)
    )


def random_plans() -> tuple[Plan, Plan]:
    """Plans for either direction."""
    rng = np.random.default_rng(0)
    forward, other = (
        random_plan(rng, LAYOUT, SHAPE, aligned=False, split_kv=True) for _ in range(2)
    )
    return forward, Plan.from_tasks(
        LAYOUT, SHAPE.for_backward(), other.config, other.tasks
    )


@pytest.mark.parametrize(
    "plans",
    [random_plans(), [make_plan(LAYOUT, SHAPE, HOME)] * 2],
    ids=["random", "home"],
)
def test_planned_bytes_are_those_that_travel(plans):
    """Nothing, if all rows are at home."""
    transports = thread_transports(LAYOUT.num_ranks)
    execute(
        plans[0],
        Tensors.random(LAYOUT, SHAPE),
        backward=plans[1],
        transports=transports,
    )
    for direction, plan in zip(("forward", "backward"), plans, strict=True):
        assert (
            sum(transport.sent[direction] for transport in transports)
            == plan.stats.total_bytes
        )


def test_a_plan_that_moves_nothing_gives_the_kernel_its_own_output(monkeypatch):
    """Its gradients have the bits of those that are computed by delta."""
    layout = TokenLayout.from_segments([[(0, 0, 300), (1, 0, 50)]])
    tensors, plan = Tensors.random(layout, SHAPE), make_plan(layout, SHAPE)
    mine = execute(plan, tensors)
    monkeypatch.setattr(PlanTables, "is_plain", False)
    others = execute(plan, tensors)
    monkeypatch.undo()
    assert all(map(torch.equal, mine[0], others[0]))
    monkeypatch.setattr("torchtitan_cad.runtime.engine.row_delta", None)  # not called
    assert all(map(torch.equal, execute(plan, tensors)[0], mine[0]))


def test_errors_name_the_plan():
    engine = CoreAttentionEngine(
        get_kernel("cpu", CPU), None, rank=0, device=CPU, scale=1.0
    )
    q = torch.zeros(3, 4, 16)
    with refusal(error=RuntimeError):
        engine.forward(q, q, q, 5)
    engine.add_plan(
        5, make_plan(TokenLayout.from_segments([[(0, 0, 2)]]), SHAPES["mha"])
    )
    with refusal():
        engine.forward(q, q, q, 5)


def test_rows_are_kept_by_plans_that_bring_few():
    """All ranks decide alike, and what is kept changes no bit."""
    torch.manual_seed(0)
    tensors, row_bytes = Tensors.random(ONE_HOME, SHAPE), RowBytes.of(SHAPE)
    plans = [
        make_plan(ONE_HOME, SHAPE, PlannerConfig(tolerance=tolerance))
        for tolerance in (0.02, 2.0)
    ]
    needed = [plan.most_rows.kept_bytes(row_bytes) for plan in plans]
    assert 0 < min(needed) < max(needed)
    for plan, of_plan in zip(plans, needed, strict=True):
        again = int(np.sum([row_bytes.forward_queries, row_bytes.keys] @ plan.rows_in))
        resent, expected = backward_bytes(plan, tensors)
        for kept_bytes in (0, min(needed) - 1, *needed):
            sent, results = backward_bytes(plan, tensors, kept_bytes=kept_bytes)
            assert_same_bits(results, expected)
            assert resent - sent == (again if kept_bytes >= of_plan else 0)


def backward_bytes(
    plan: Plan, tensors: Tensors, **options: Any
) -> tuple[int, list[list[Tensor]]]:
    """Bytes that all ranks send in backward, and the results by rank."""
    transports = thread_transports(plan.layout.num_ranks)
    results = execute(plan, tensors, transports=transports, **options)
    return sum(transport.sent["backward"] for transport in transports), results


# Rows in several chunks -----------------------------------------------------------------------------------------------


RANKS = 6
ONE_HOME = TokenLayout.from_segments([[(0, 0, 1536)], *([] for _ in range(RANKS - 1))])
"""All rows live on one rank, which gets back more than any server receives."""


def chunks_of(plan: Plan, buffer_bytes: int = BUFFER_BYTES) -> list[int]:
    """Numbers of chunks of queries and keys out, and of their results home."""
    chunks = plan.most_rows.chunks(RowBytes.of(plan.shape, keep=False), buffer_bytes)
    return [len(each) for each in dataclasses.astuple(chunks)]


@pytest.mark.parametrize("keep", [False, True], ids=["resend", "keep"])
@TRANSPORTS
def test_chunks_change_no_bit(symmetric, keep):
    """A row's partials are combined in the order in which they arrive, in however many chunks."""
    torch.manual_seed(0)
    tensors, plan = Tensors.random(ONE_HOME, SHAPE), make_plan(ONE_HOME, SHAPE)
    assert chunks_of(plan) == [1, 1, 1, 1]
    assert min(chunks_of(plan, 2**17)) > 1
    for two_rounds in (False, True):
        at_once = execute(plan, tensors, keep=keep, two_rounds=two_rounds)
        options = {"keep": keep, "symmetric": symmetric, "two_rounds": two_rounds}
        assert_same_bits(execute(plan, tensors, **options, buffer_bytes=2**17), at_once)


@pytest.mark.parametrize("seed", seeds(2, 60))
@needs_linux
@pytest.mark.usefixtures("small_cuts")
def test_hosts_and_chunks_change_no_bit(seed):
    """Rows go over memory inside hosts of one to four ranks, and in messages between them, into the same buffers."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    hosts = np.repeat(range(3), rng.permutation(4)[:3] + 1).tolist()
    if seed % 2:
        rng.shuffle(hosts)
    layout = random_layout(rng, num_ranks=len(hosts), max_length=100)
    plan, backward = (
        random_plan(rng, layout, SHAPE, aligned=False, split_kv=True) for _ in range(2)
    )
    tensors = Tensors.random(layout, SHAPE)
    keep = seed % 4 < 2
    options = {
        "keep": keep,
        "two_rounds": seed % 8 < 4,
        "backward": None if keep else backward,
    }
    expected = execute(plan, tensors, **options)
    for buffer_bytes in (BUFFER_BYTES, 512 * int(rng.integers(4, 50))):
        assert_same_bits(
            execute(plan, tensors, **options, hosts=hosts, buffer_bytes=buffer_bytes),
            expected,
        )


@pytest.mark.parametrize("chunks", ["one", "several"])
@pytest.mark.parametrize("two_rounds", [False, True])
@needs_linux
def test_combining_own_results_early_changes_no_bit(monkeypatch, two_rounds, chunks):
    """They wait for those that return in fp32, whatever the dtype."""
    rng = np.random.default_rng(3)
    torch.manual_seed(3)
    layout = random_layout(rng, num_ranks=4, max_length=300)
    plan = random_plan(rng, layout, SHAPE, aligned=False, split_kv=True)
    tensors = Tensors.random(layout, SHAPE, torch.bfloat16)
    monkeypatch.setattr(calls, "MOST_UNCOMBINED", 1000)
    late = execute(plan, tensors, symmetric=True, two_rounds=two_rounds)
    monkeypatch.setattr(calls, "MOST_UNCOMBINED", 0)
    buffer_bytes = 2**14 if chunks == "several" else BUFFER_BYTES
    assert_same_bits(
        execute(
            plan,
            tensors,
            symmetric=True,
            two_rounds=two_rounds,
            buffer_bytes=buffer_bytes,
        ),
        late,
    )


# What pipelines in ticks refuse; that they compute every microbatch is in tests/integration/test_ticks.py ------------


def tick_engine() -> TickEngine:
    shape, kernel = AttentionShape(4, 2, 8, 4), get_kernel("cpu", CPU)
    return TickEngine(
        shape,
        torch.float32,
        kernel=kernel,
        transport=None,
        rank=0,
        device=CPU,
        scale=1.0,
    )


def test_what_falls_out_of_step_is_an_error():
    q, kv = torch.randn(4, 4, 8), torch.randn(4, 2, 8)
    mine = [TickCall(forward=True, keys=(0,), mine=True)]
    engine = tick_engine()
    with refusal(error=RuntimeError):
        engine.forward(q, kv, kv, 5)
    engine.begin_tick(mine, microbatch=6)
    with refusal(error=RuntimeError):
        engine.begin_tick(mine, microbatch=6)
    with refusal(error=RuntimeError):
        engine.forward(q, kv, kv, 5)
    with refusal(error=RuntimeError):
        engine.forward(q.bfloat16(), kv.bfloat16(), kv.bfloat16(), 6)
    with refusal(error=RuntimeError):
        engine.end_tick()
    engine = tick_engine()
    engine.begin_tick([TickCall(forward=False, keys=(0,), mine=True)], microbatch=6)
    with refusal(error=RuntimeError):
        engine.forward(q, kv, kv, 6)


def test_the_second_half_cannot_go_first():
    q, kv = torch.randn(4, 4, 8), torch.randn(4, 2, 8)
    plan = make_plan(
        TokenLayout.from_segments([[(0, 0, 4)]]), AttentionShape(4, 2, 8, 4)
    )
    first_try, engine = tick_engine(), tick_engine()
    for each in (first_try, engine):
        each.add_plan(2, plan)
        each.add_plan(3, plan)
        each.begin_tick([TickCall(forward=True, keys=(2, 3), mine=True)], microbatch=6)
    with refusal(error=RuntimeError):
        first_try.begin_forward(q, kv, kv, 7)
    first, second = (engine.begin_forward(q, kv, kv, key).send() for key in (6, 7))
    assert (first.key, second.key) == (2, 3)
    with refusal(error=RuntimeError):
        second.attend()
