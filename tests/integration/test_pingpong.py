# SPDX-License-Identifier: BSD-3-Clause
"""``nano_batches = 2``: losses and gradients of one nano-batch, every exchange behind the other nano-batch's work."""

import functools
from collections import defaultdict
from itertools import pairwise

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.lib.jobs import compositions as c
from tests.lib.jobs.harness import RunResult, run
from tests.lib.threaded import needs_linux

matrix = pytest.mark.matrix
SHORT = ("middle_cp2",)
"""The jobs of ``HALVED`` that the short set trains; the matrix trains all."""


@functools.cache
def train(case: c.Composition, nano_batches: int, *more: str) -> RunResult:
    if TorchVersion(torch.__version__) < case.needs_torch:
        pytest.skip(
            f"stock torchtitan cannot run this with torch below {case.needs_torch}"
        )
    args = [
        *c.COMMON,
        *c.CAD,
        *case.shared,
        *case.args,
        f"--cad.nano_batches={nano_batches}",
        *more,
    ]
    return run(args, case.nranks, grads_at=2, timeout_s=600)


def check_close(one: RunResult, two: RunResult) -> None:
    assert two.validation_losses.keys() == one.validation_losses.keys()
    c.assert_trains_alike(two, one)
    c.assert_not_recompiled(two)


LONG = [pytest.mark.slow, pytest.mark.timeout(1800)]
TWINS = [
    *(
        pytest.param(case, 3, id=case.name, marks=() if case.name in SHORT else matrix)
        for case in c.HALVED
    ),
    *(
        pytest.param(case, 3, id=case.name, marks=[matrix, needs_linux])
        for case in c.HALVED_SYMMETRIC
    ),
    *(
        pytest.param(case, 20, id=f"{case.name}, 20 steps", marks=LONG)
        for case in [*c.HALVED, *c.MORE_HALVED]
    ),
]


@pytest.mark.parametrize(("case", "steps"), TWINS)
def test_two_nano_batches_train_like_one(case, steps):
    check_close(
        *(
            train(case, nano_batches, f"--training.steps={steps}")
            for nano_batches in (1, 2)
        )
    )


TWINS_TRACED = [
    *(
        pytest.param(case, 3, id=case.name, marks=matrix if case.name != "rows" else ())
        for case in c.TRACED
    ),
    *(
        pytest.param(case, 20, id=f"{case.name}, 20 steps", marks=LONG)
        for case in c.TRACED
    ),
]


@c.needs_traced
@pytest.mark.parametrize(("case", "steps"), TWINS_TRACED)
def test_traced_streams_train_alike(case, steps):
    """Segments compiled with exchanges train like one nano-batch and like those without, in no more graphs."""
    more = f"--training.steps={steps}"
    traced, opaque = train(case, 2, more), train(case, 2, "--cad.streams=opaque", more)
    for result, chosen in ((traced, "traced"), (opaque, "opaque")):
        assert all(f"Streams of nano-batches: {chosen}" in log for log in result.logs)
    check_close(train(case, 1, more), traced)
    check_close(opaque, traced)
    assert traced.graphs[-1] <= opaque.graphs[-1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_compiled_parts_under_tensor_parallelism_train_like_eager_ones():
    """One nano-batch is no reference: whole blocks, compiled, lose a gradient with TP on CPU (torch 2.13; README)."""
    args = [*c.COMMON, *c.CAD, *c.TP2, "--cad.nano_batches=2", "--training.steps=20"]
    eager, compiled = (
        run([*args, *more], 4, grads_at=2, timeout_s=600)
        for more in ((), ("--compile.enable",))
    )
    check_close(eager, compiled)


@functools.cache
def traces(*args: str, nano_batches: int = 2, nranks: int = 2) -> list[dict]:
    return run(
        [
            *c.COMMON,
            *c.CAD,
            *c.FOUR_BLOCKS,
            f"--cad.nano_batches={nano_batches}",
            *args,
        ],
        nranks,
        trace_at=2,
    ).traces


COLLECTIVES = ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_")
WAITS = {
    "start_forward": "attend_forward",
    "attend_forward": "finish_forward",
    "start_backward": "attend_backward",
    "attend_backward": "finish_backward",
}
"""Steps that start an exchange, and the step of the same nano-batch that waits for it."""


def is_compute(step: str, *, traced: bool = False) -> bool:
    """Linear work, or kernel calls of attention. In traced graphs it lies between a finish and a start."""
    return step.startswith(("pre", "post", "compute", *["start", "finish"] * traced))


@pytest.mark.parametrize(
    ("args", "recomputed"),
    [
        ((), False),
        pytest.param(("--compile.enable", "--cad.streams=opaque"), False, marks=matrix),
        pytest.param(
            ("--compile.enable", "--cad.streams=traced"),
            False,
            marks=[matrix, c.needs_traced],
        ),
        pytest.param(c.FULL, True, marks=matrix),
        pytest.param((*c.ROW1, *c.OP), False, marks=matrix),
        pytest.param(c.ATTENTION_KEPT, False, marks=matrix),
        pytest.param(c.TP2, False, marks=matrix),
        pytest.param((*c.TP2, *c.FULL), True, marks=matrix),
    ],
    ids=[
        "eager",
        "compiled",
        "traced",
        "ac_full",
        "middle_ac_op",
        "attention_kept",
        "tp2",
        "tp2_ac_full",
    ],
)
def test_the_other_nano_batch_computes_between_start_and_wait(args, recomputed):
    """It does on every rank, in forward, backward and recomputation."""
    traced = "--cad.streams=traced" in args
    for trace in traces(*args, nranks=4 if c.TP2[0] in args else 2):
        events = [tuple(event) for event in trace["events"]]
        keys = {key for _, key in events}
        assert len(keys) == 2, "one microbatch has two plans"
        waits: dict[str, int] = defaultdict(int)
        for i, (step, key) in enumerate(events):
            if step not in WAITS:
                continue
            until = events.index((WAITS[step], key), i)
            if step.startswith("start"):  # it waits where it attends first
                nano_batch = (WAITS[step].replace("attend", "attend_first"), key)
                until = (
                    min(until, events.index(nano_batch, i))
                    if nano_batch in events
                    else until
                )
            between = [
                name
                for name, other in events[i + 1 : until]
                if other != key and is_compute(name, traced=traced)
            ]
            assert between, (
                f"nothing hides the exchange from {step} to {WAITS[step]}: {events[i : until + 1]}"
            )
            waits[step] += 1
        forwards = 4 * 2 * (2 if recomputed else 1)
        assert waits == {
            **dict.fromkeys(WAITS, 4 * 2),
            "start_forward": forwards,
            "attend_forward": forwards,
        }


@matrix
@pytest.mark.parametrize(
    ("args", "nranks"),
    [(c.TP2, 2), (c.TP2, 4), ((*c.TP2, "--compile.enable"), 4)],
    ids=["nothing_moves", "eager", "compiled"],
)
def test_what_tensor_parallelism_exchanges_is_hidden_too(args, nranks):
    """All exchanges of a direction are, but for one at the model's beginning and one at its end."""
    for trace in traces(*args, nranks=nranks):
        events = [tuple(event) for event in trace["events"]]
        for direction in ("forward", "backward"):
            hidden: dict[int, list[bool]] = defaultdict(list)
            for i, (step, key) in enumerate(events):
                if step == f"tp_start {direction}":
                    until = events.index((f"tp_wait {direction}", key), i)
                    meanwhile = [
                        name
                        for name, other in events[i + 1 : until]
                        if other != key and is_compute(name)
                    ]
                    hidden[key].append(bool(meanwhile))
            first, second = (
                hidden[key] if direction == "forward" else hidden[key][::-1]
                for key in sorted(hidden)
            )
            assert first == [False] + [True, True] * 4
            assert second == [True] * 8 + [False]


@pytest.mark.parametrize(
    ("nano_batches", "calls_of"),
    [
        (1, {c.ATTENTION_KEPT: 4}),
        *(
            pytest.param(count, {c.FULL: 8, c.ATTENTION_KEPT: 4, (): 4}, marks=matrix)
            for count in (1, 2)
        ),
    ],
)
def test_attention_that_is_kept_is_not_repeated(nano_batches, calls_of):
    peaks = []
    for args, calls in calls_of.items():
        of_ranks = traces(*args, nano_batches=nano_batches)
        for trace in of_ranks:
            assert (
                sum(step == "start_forward" for step, _ in trace["events"])
                == calls * nano_batches
            )
        peaks.append(max(trace["peak_bytes"] for trace in of_ranks))
    assert all(less < more for less, more in pairwise(peaks))


@pytest.mark.parametrize(
    "args",
    [
        pytest.param(args, marks=matrix)
        for args in ((), c.FULL, c.TP2, (*c.TP2, *c.FULL))
    ],
    ids=["none", "ac_full", "tp2", "tp2_ac_full"],
)
def test_memory_hardly_grows(args):
    """The least peak of some runs: small peaks differ by a fifth, as planning and freeing come in between."""
    runs, run_again = (3, traces.__wrapped__) if args else (1, traces)
    one, two = (
        min(
            max(trace["peak_bytes"] for trace in run_again(*args, nano_batches=count))
            for _ in range(runs)
        )
        for count in (1, 2)
    )
    assert two < 1.1 * one


@pytest.mark.parametrize(
    "args", [(), pytest.param(c.FULL, marks=matrix)], ids=["none", "ac_full"]
)
def test_parameters_are_gathered_and_gradients_reduced_once_per_block(args):
    for one, two in zip(traces(*args, nano_batches=1), traces(*args), strict=True):
        for name in COLLECTIVES:
            assert two["collectives"].count(name) == one["collectives"].count(name) > 4


@matrix
@c.needs_traced
def test_traced_turns_gather_and_reduce_when_regions_do():
    opaque, traced = (
        traces(*c.COMPILE, f"--cad.streams={streams}")
        for streams in ("opaque", "traced")
    )
    for one, other in zip(opaque, traced, strict=True):
        orders = [
            [name for name in trace["collectives"] if name in COLLECTIVES]
            for trace in (one, other)
        ]
        assert orders[0] == orders[1]
        assert set(orders[0]) == set(COLLECTIVES)
