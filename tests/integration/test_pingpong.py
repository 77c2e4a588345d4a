# SPDX-License-Identifier: BSD-3-Clause
"""``nano_batches = 2``: losses and gradients of one nano-batch, every exchange behind the other nano-batch's work."""

import functools
from collections import Counter

import pytest

from tests.lib.jobs.compositions import (
    CAD,
    CAN_TRACE,
    COMMON,
    HALVED,
    HALVED_SYMMETRIC,
    MORE_HALVED,
    TRACED,
    Composition,
    assert_not_recompiled,
    assert_trains_alike,
    name_of,
    needs_traced,
    options,
    skip_if_torch_is_too_old,
)
from tests.lib.jobs.harness import RunResult, run
from tests.lib.sets import matrix, params, slow
from tests.lib.threaded import needs_linux


@functools.cache
def train(case: Composition, *more: str, nano_batches: int = 2) -> RunResult:
    skip_if_torch_is_too_old(case)
    job = [*COMMON, *CAD, *case.job, *more]
    halves = f"--cad.nano_batches={nano_batches}"
    return run([*job, halves], case.nranks, grads_at=2, timeout_s=600)


def check_close(one: RunResult, two: RunResult) -> None:
    assert two.validation_losses.keys() == one.validation_losses.keys()
    assert_trains_alike(two, one)
    assert_not_recompiled(two)


SHORT = [case for case in HALVED if case.name == "middle_cp2_ac_full"]
SYMMETRIC = [
    pytest.param(
        case, marks=[needs_linux, *([] if "chunks" in case.name else [matrix])]
    )
    for case in HALVED_SYMMETRIC
]
MORE = [pytest.param(case, marks=slow) for case in MORE_HALVED]


@pytest.mark.parametrize(
    "case", [*params(HALVED, SHORT), *SYMMETRIC, *MORE], ids=name_of
)
def test_two_nano_batches_train_like_one(case):
    check_close(train(case, nano_batches=1), train(case))


@needs_traced
@pytest.mark.parametrize("case", params(TRACED, TRACED[:1]), ids=name_of)
def test_traced_streams_train_alike(case):
    """Segments compiled with exchanges train like one nano-batch and like those without, in no more graphs."""
    traced = train(case)
    opaque = train(case, "--cad.streams=opaque")
    for result, chosen in ((traced, "traced"), (opaque, "opaque")):
        for log in result.logs:
            assert f"Streams of nano-batches: {chosen}" in log
    check_close(train(case, nano_batches=1), traced)
    check_close(opaque, traced)
    assert traced.graphs[-1] <= opaque.graphs[-1]


@functools.cache
def traces(words: str = "", *, nano_batches: int = 2, nranks: int = 2) -> list[dict]:
    halves = f"--cad.nano_batches={nano_batches}"
    job = [*COMMON, *CAD, *options(f"four_blocks {words}"), halves]
    return run(job, nranks, trace_at=2).traces


COLLECTIVES = ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_")
WAITS = {
    "start_forward": "attend_forward",
    "attend_forward": "finish_forward",
    "start_backward": "attend_backward",
    "attend_backward": "finish_backward",
}
"""Steps that start an exchange, and the step of the same nano-batch that waits for it."""


def computes_meanwhile(
    events: list[list], key: int, begin: int, end: int, *, is_traced: bool = False
) -> bool:
    """Whether the other nano-batch has linear work, or kernel calls of attention, between two events.

    In traced graphs these lie between a finish and a start.
    """
    compute = ("pre", "post", "compute")
    if is_traced:
        compute += ("start", "finish")
    between = events[begin + 1 : end]
    return any(step.startswith(compute) and other != key for step, other in between)


EVERY_JOB = (
    "compile opaque",
    "compile traced",
    "ac_full",
    "row1 ac_op",
    "attention_kept",
    "tp2",
    "tp2 ac_full",
    "",
)


@pytest.mark.parametrize("words", params(EVERY_JOB, ["attention_kept"]))
def test_the_other_nano_batch_computes_between_start_and_wait(words):
    """It does on every rank, in forward, backward and recomputation, which repeats no attention that is kept."""
    is_traced = "traced" in words
    if is_traced and not CAN_TRACE:
        pytest.skip("compiled graphs would lose the order of streams")
    for trace in traces(words, nranks=4 if "tp2" in words else 2):
        events = trace["events"]
        assert len({key for _, key in events}) == 2, "one microbatch has two plans"
        waits = Counter()
        for begin, (step, key) in enumerate(events):
            if step not in WAITS:
                continue
            wait = [WAITS[step], key]
            end = events.index(wait, begin)
            assert computes_meanwhile(events, key, begin, end, is_traced=is_traced), (
                f"nothing hides the exchange of {events[begin : end + 1]}"
            )
            waits[step] += 1
        expected = dict.fromkeys(WAITS, 4 * 2)
        if "ac_full" in words:  # recomputed
            expected |= {"start_forward": 4 * 4, "attend_forward": 4 * 4}
        assert waits == expected


def calls_of_attention(of_ranks: list[dict]) -> set[int]:
    """How often ranks begin to attend."""
    steps_of_ranks = [[step for step, _ in trace["events"]] for trace in of_ranks]
    return {steps.count("start_forward") for steps in steps_of_ranks}


@matrix
@pytest.mark.parametrize("nano_batches", [1, 2])
def test_attention_that_is_kept_takes_memory_between_none_and_all(nano_batches):
    full, kept, none = (
        traces(words, nano_batches=nano_batches)
        for words in ("ac_full", "attention_kept", "")
    )
    assert calls_of_attention(full) == {8 * nano_batches}
    assert calls_of_attention(kept) == calls_of_attention(none) == {4 * nano_batches}
    assert peak_bytes(full) < peak_bytes(kept) < peak_bytes(none)


def peak_bytes(of_ranks: list[dict]) -> int:
    return max(trace["peak_bytes"] for trace in of_ranks)


@matrix
@pytest.mark.parametrize("words", ["", "ac_full", "tp2", "tp2 ac_full"])
def test_memory_hardly_grows(words):
    """The least peak of some runs: small peaks differ by a fifth, as planning and freeing come in between."""
    run_again = traces.__wrapped__
    whole, halves = (
        min(peak_bytes(run_again(words, nano_batches=count)) for _ in range(3))
        for count in (1, 2)
    )
    assert halves < 1.1 * whole


EXPERTS = ["moe ep2", "moe ep2 ac_full"]


@pytest.mark.parametrize(
    "words",
    params(["attention_kept", "", "ac_full", *EXPERTS], ["attention_kept"]),
)
def test_parameters_are_gathered_and_gradients_reduced_once_per_block(words):
    """Tokens go to experts and come back for every half."""
    nranks = 4 if words in EXPERTS else 2
    one_batch, halves = (
        traces(words, nano_batches=count, nranks=nranks) for count in (1, 2)
    )
    for one, two in zip(one_batch, halves, strict=True):
        before = Counter(one["collectives"])
        after = Counter(two["collectives"])
        for name in COLLECTIVES:
            assert after[name] == before[name] > 4
        if words in EXPERTS:
            assert 0 < before["c10d::alltoall_base_"] < after["c10d::alltoall_base_"]


@matrix
@needs_traced
def test_traced_turns_gather_and_reduce_when_regions_do():
    by_opaque, by_traced = (
        traces(f"compile {streams}") for streams in ("opaque", "traced")
    )
    for opaque, traced in zip(by_opaque, by_traced, strict=True):
        orders = [
            [name for name in trace["collectives"] if name in COLLECTIVES]
            for trace in (opaque, traced)
        ]
        assert orders[0] == orders[1]
        assert set(orders[0]) == set(COLLECTIVES)
