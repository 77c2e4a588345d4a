# SPDX-License-Identifier: BSD-3-Clause
"""Schedules in ticks: losses and gradients of the run without a pipeline, and all ranks in the same exchanges."""

import functools
from itertools import product

import pytest

from tests.lib.jobs import compositions as c
from tests.lib.jobs.harness import RunResult, parse_job, run
from tests.lib.sets import params
from tests.lib.threaded import needs_linux

EIGHT_BLOCKS = ("--model.flavor=tiny8_varlen",)
NANO_BATCHES = ("--cad.nano_batches=2",)
"""Two nano-batches: nano-batches in the middle of every row, or by rows with ``BY_ROW``."""
NANO_BATCHES_BY_ROW = (*NANO_BATCHES, *c.BY_ROW)


def ticks(pp: int, name: str = "CAD1F1B") -> tuple[str, ...]:
    return (*c.dp(pipeline_parallel=pp), *c.schedule(name))


INTERLEAVED, INTERLEAVED4 = (ticks(pp, "CADInterleaved1F1B") for pp in (2, 4))
# name: (arguments of the pipeline, arguments of both runs, ranks, ranks of the reference, rows per rank)
Case = tuple[tuple[str, ...], tuple[str, ...], int, int, int]
QUICK: dict[str, Case] = {
    "pp2 dp2": (ticks(2), c.VALIDATE4, 4, 2, 4),
    # Four blocks on four stages are 1, 2, 1 and 0.
    "pp4 ac full": ((*ticks(4), *c.FULL), c.FOUR_BLOCKS, 4, 1, 4),
    "interleaved": (INTERLEAVED, c.FOUR_BLOCKS, 2, 1, 4),
    "nano-batches pp2 dp2": ((*ticks(2), *NANO_BATCHES), c.VALIDATE4, 4, 2, 4),
}
PIPELINES = {
    "pp2": (ticks(2), 2),
    "pp4": (ticks(4), 4),
    "interleaved": (INTERLEAVED, 2),
    "nano-batches": ((*ticks(2), *NANO_BATCHES), 2),
    "nano-batches pp4": ((*ticks(4), *NANO_BATCHES), 4),
    "nano-batches by row": ((*ticks(2), *NANO_BATCHES_BY_ROW), 2),
    "nano-batches interleaved": ((*INTERLEAVED, *NANO_BATCHES), 2),
    "nano-batches interleaved by row": ((*INTERLEAVED, *NANO_BATCHES_BY_ROW), 2),
}
"""Arguments and ranks."""
COMPOSED = {
    "ac full": (c.FULL, 1),
    "ac layer": (c.LAYER, 1),
    "ac op": (c.OP, 1),
    "attention kept": (c.ATTENTION_KEPT, 1),
    "compile": (c.COMPILE, 1),
    "compile ac full": ((*c.COMPILE, *c.FULL), 1),
    "tp2": (c.TP2, 2),
    "tp2 ac full": ((*c.TP2, *c.FULL), 2),
    "tp2 compile": ((*c.TP2, *c.COMPILE), 2),
    "cp2": (c.CP2, 2),
}
"""What every pipeline is composed with: arguments, and ranks for each of its own."""


def matrix() -> dict[str, Case]:
    """Stages x microbatches x data parallel x tensor parallel, and with documents that span ranks."""
    cases = {}
    for pp, rounds, data, (name, args) in product(
        (2, 4), (1, 2, 4), (1, 2), {"tp1": (), "tp2": c.TP2, "cp2": c.CP2}.items()
    ):
        ranks, rows = pp * data * (1 if name == "tp1" else 2), rounds * pp
        cases[f"pp{pp} m{rows} dp{data} {name}"] = (
            (*ticks(pp), *args),
            c.FOUR_BLOCKS,
            ranks,
            data,
            rows,
        )
    return cases


SLOW: dict[str, Case] = matrix()
for (pipeline, (args, ranks)), (what, (more, times)) in product(
    PIPELINES.items(), COMPOSED.items()
):
    in_the_middle = "nano-batches" in pipeline and "by row" not in pipeline
    refused = (what.startswith("tp2") and in_the_middle) or (
        what == "tp2 compile" and "nano-batches" not in pipeline
    )
    if ranks * times <= 4 and not refused:
        SLOW[f"{pipeline} {what}"] = (*args, *more), c.FOUR_BLOCKS, ranks * times, 1, 4
for pipeline, (args, ranks) in PIPELINES.items():
    if ranks == 2:
        SLOW[f"{pipeline} dp2"] = args, c.FOUR_BLOCKS, 4, 2, 8
        SLOW[f"{pipeline} accumulation"] = (
            args,
            (*c.FOUR_BLOCKS, *c.global_batch(8)),
            2,
            1,
            4,
        )
        SLOW[f"{pipeline} validation"] = args, (*c.FOUR_BLOCKS, *c.VALIDATE4), 2, 1, 4
SLOW |= {
    "interleaved pp4 m4": (INTERLEAVED4, EIGHT_BLOCKS, 4, 1, 4),
    "interleaved pp4 m8 ac full": ((*INTERLEAVED4, *c.FULL), EIGHT_BLOCKS, 4, 1, 8),
    "nano-batches pp4": ((*ticks(4), *NANO_BATCHES), c.FOUR_BLOCKS, 4, 1, 4),
    "nano-batches interleaved pp4": (
        (*INTERLEAVED4, *NANO_BATCHES),
        EIGHT_BLOCKS,
        4,
        1,
        4,
    ),
}

SHORT = ("nano-batches pp2 dp2",)
"""Cases that the short set trains; the matrix adds the rest of ``QUICK``, the slow set those of ``SLOW``."""
TRACED = (
    "nano-batches compile",
    "nano-batches interleaved compile",
    "nano-batches by row compile",
)
"""Cases of ``SLOW`` that run with traced streams as well."""


@pytest.mark.parametrize("rows", [1, 2])
def test_one_microbatch_is_worth_a_warning(rows, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WORLD_SIZE", "2")
    parse_job(
        tmp_path,
        *c.dp(pipeline_parallel=2),
        *c.schedule("CAD1F1B"),
        f"--training.local_batch_size={rows}",
    )
    warnings = [r.message for r in caplog.records if "is one microbatch" in r.message]
    assert len(warnings) == (1 if rows == 1 else 0)
    assert all("set it to 4 or more" in warning for warning in warnings)


@functools.cache
def check(case: Case, *more: str, steps: int = 3) -> RunResult:
    args, shared, nranks, reference_nranks, rows = case
    shared = (
        f"--training.local_batch_size={rows}",
        f"--training.steps={steps}",
        *shared,
    )
    result = run(
        [*c.COMMON, *c.CAD, *shared, *args, *more],
        nranks,
        grads_at=2,
        trace_at=3,
        timeout_s=600,
    )
    c.assert_trains_alike(result, c.reference(reference_nranks, shared))
    assert len(result.validation_losses) == (
        steps if "--validation.enable" in shared else 0
    )
    first, *others = [exchanges(trace["events"]) for trace in result.traces]
    assert len(others) == nranks - 1
    assert first
    assert all(events == first for events in others), (
        "ranks differ in the order of their exchanges"
    )
    return result


def exchanges(events: list[list]) -> list[tuple[str, int]]:
    """The engine's steps that start exchanges, with the keys of their plans."""
    starting = {
        f"{step}_{direction}"
        for step in ("start", "attend")
        for direction in ("forward", "backward")
    }
    return [(step, key) for step, key in events if step in starting]


@pytest.mark.parametrize("name", params(QUICK, SHORT))
def test_trains_like_without_a_pipeline(name):
    check(QUICK[name])


def test_nano_batches_take_turns_on_every_rank():
    """An exchange is under way while the other nano-batch comes to its next step, also where a rank only serves."""
    for trace in check(QUICK["nano-batches pp2 dp2"]).traces:
        order = exchanges(trace["events"])
        for call in zip(*[iter(order)] * 4, strict=True):
            direction = call[0][0].removeprefix("start_")
            assert [step for step, _ in call] == [f"start_{direction}"] * 2 + [
                f"attend_{direction}"
            ] * 2
            keys = [call[0][1], call[1][1]]
            assert [key for _, key in call] == keys * 2
            assert keys[1] - keys[0] == (1 if direction == "forward" else -1)
        steps = [
            (step, key)
            for step, key in trace["events"]
            if step.startswith(("start", "attend", "finish"))
        ]
        for i, (step, key) in enumerate(steps):
            if not step.startswith("finish"):
                assert steps[i + 1][1] != key, (
                    f"{step} is followed by {steps[i + 1]} of the same nano-batch"
                )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SLOW)
def test_more_compositions_train_like_without_a_pipeline(name):
    check(SLOW[name], steps=20 if "nano-batches" in name else 3)


@c.needs_traced
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", TRACED)
def test_traced_streams_train_alike(name):
    """They do as one nano-batch, the segments of two and a run without a pipeline."""
    traced, opaque, one = (
        check(SLOW[name], *more, steps=20)
        for more in (
            ("--cad.streams=traced",),
            ("--cad.streams=opaque",),
            ("--cad.nano_batches=1",),
        )
    )
    assert all("Streams of nano-batches: traced" in log for log in traced.logs)
    for other in (opaque, one):
        c.assert_trains_alike(traced, other)


@pytest.mark.slow
@needs_linux
@pytest.mark.parametrize(
    "name",
    [
        *QUICK,
        "nano-batches pp4 ac full",
        "nano-batches cp2",
        "nano-batches interleaved dp2",
        "nano-batches by row tp2",
    ],
)
def test_symmetric_memory(name):
    check((SLOW | QUICK)[name], "--cad.transport=symm_mem")
