"""Schedules in ticks: losses and gradients of the run without a pipeline, and all ranks in the same exchanges."""

import functools
from pathlib import Path

import pytest

from tests.integration.compositions import CAD, COMMON, assert_trains_alike, dp, needs_traced, reference, schedule
from tests.integration.harness import RunResult, parse_job, run
from tests.integration.tick_compositions import QUICK, SLOW, Case
from tests.runtime.threaded import needs_linux
from tests.sets import params

SHORT = ("interleaved", "halves pp2 dp2")
"""Cases that the short set trains; the matrix adds the rest of ``QUICK``, the slow set those of ``SLOW``."""
TRACED = ("halves compile", "halves interleaved compile", "halves by row compile")
"""Cases of ``SLOW`` that run with traced streams as well."""


@pytest.mark.parametrize("rows", [1, 2])
def test_one_microbatch_is_worth_a_warning(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    parse_job(tmp_path, *dp(pipeline_parallel=2), *schedule("CAD1F1B"), f"--training.local_batch_size={rows}")
    warnings = [r.message for r in caplog.records if "is one microbatch" in r.message]
    assert len(warnings) == (1 if rows == 1 else 0)
    assert all("set it to 4 or more" in warning for warning in warnings)


@functools.cache
def check(case: Case, *more: str, steps: int = 3) -> RunResult:
    args, shared, nranks, reference_nranks, rows = case
    shared = (f"--training.local_batch_size={rows}", f"--training.steps={steps}", *shared)
    result = run([*COMMON, *CAD, *shared, *args, *more], nranks, grads_at=2, trace_at=3, timeout_s=600)
    assert_trains_alike(result, reference(reference_nranks, shared))
    assert len(result.validation_losses) == (steps if "--validation.enable" in shared else 0)
    first, *others = [exchanges(trace["events"]) for trace in result.traces]
    assert len(others) == nranks - 1
    assert first
    assert all(events == first for events in others), "ranks differ in the order of their exchanges"
    return result


def exchanges(events: list[list]) -> list[tuple[str, int]]:
    """The engine's steps that start exchanges, with the keys of their plans."""
    starting = {f"{step}_{direction}" for step in ("start", "attend") for direction in ("forward", "backward")}
    return [(step, key) for step, key in events if step in starting]


@pytest.mark.parametrize("name", params(QUICK, SHORT))
def test_trains_like_without_a_pipeline(name: str) -> None:
    check(QUICK[name])


def test_halves_take_turns_on_every_rank() -> None:
    """An exchange is under way while the other half comes to its next step, also where a rank only serves."""
    for trace in check(QUICK["halves pp2 dp2"]).traces:
        order = exchanges(trace["events"])
        for call in zip(*[iter(order)] * 4, strict=True):
            direction = call[0][0].removeprefix("start_")
            assert [step for step, _ in call] == [f"start_{direction}"] * 2 + [f"attend_{direction}"] * 2
            keys = [call[0][1], call[1][1]]
            assert [key for _, key in call] == keys * 2
            assert keys[1] - keys[0] == (1 if direction == "forward" else -1)
        steps = [(step, key) for step, key in trace["events"] if step.startswith(("start", "attend", "finish"))]
        for i, (step, key) in enumerate(steps):
            if not step.startswith("finish"):
                assert steps[i + 1][1] != key, f"{step} is followed by {steps[i + 1]} of the same half"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SLOW)
def test_more_compositions_train_like_without_a_pipeline(name: str) -> None:
    check(SLOW[name], steps=20 if "halves" in name else 3)


@needs_traced
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", TRACED)
def test_traced_streams_train_alike(name: str) -> None:
    """They do as one nano-batch, the regions of two and a run without a pipeline."""
    traced, opaque, one = (
        check(SLOW[name], *more, steps=20)
        for more in (("--cad.streams=traced",), ("--cad.streams=opaque",), ("--cad.nano_batches=1",))
    )
    assert all("Streams of nano-batches: traced" in log for log in traced.logs)
    for other in (opaque, one):
        assert_trains_alike(traced, other)


@pytest.mark.slow
@needs_linux
@pytest.mark.parametrize(
    "name",
    [*QUICK, "halves pp4 ac full", "halves cp2", "halves interleaved dp2", "halves by row tp2"],
)
def test_symmetric_memory(name: str) -> None:
    check((SLOW | QUICK)[name], "--cad.transport=symm_mem")
