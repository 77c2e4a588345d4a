"""Schedules in ticks: losses and gradients of the run without a pipeline, and all ranks in the same exchanges."""

import functools
from itertools import product

import pytest
from harness import RunResult, gradient_errors, run, tokenizer_folder
from test_cad import CAD, COMMON, TOLERANCE, TP2, assert_close, dp, reference

from tests.runtime.threaded import needs_compiler
from torchtitan_cad.integration.titan022.cpu import enable_cpu

CP2 = dp(context_parallel=2)
FOUR_BLOCKS = ("--model.flavor=tiny4_varlen",)
EIGHT_BLOCKS = ("--model.flavor=tiny8_varlen",)
FULL = ("--activation_checkpoint.mode=full",)
LAYER = ("--activation_checkpoint.mode=selective",)
OP = (*LAYER, "--activation_checkpoint.selective_ac_option=op")
COMPILE = ("--compile.enable",)
HALVES = ("--cad.nano_batches=2",)
"""In the middle of every row; with ``BY_ROW`` by rows."""
BY_ROW = (*HALVES, "--parallelism.pipeline_parallel_microbatch_size=2")
VALIDATION = (
    "--validation.enable",
    "--validation.freq=1",
    "--validation.steps=2",
    "--validation.local_batch_size=4",
)


def ticks(pp: int, schedule: str = "CAD1F1B") -> tuple[str, ...]:
    return (*dp(pipeline_parallel=pp), f"--parallelism.pipeline_parallel_schedule={schedule}")


INTERLEAVED, INTERLEAVED4 = (ticks(pp, "CADInterleaved1F1B") for pp in (2, 4))
# name: (arguments of the pipeline, arguments of both runs, ranks, ranks of the reference, rows per rank)
Case = tuple[tuple[str, ...], tuple[str, ...], int, int, int]
QUICK: dict[str, Case] = {
    "pp2 dp2": (ticks(2), VALIDATION, 4, 2, 4),
    # Four blocks on four stages are 1, 2, 1 and 0.
    "pp4 ac full": ((*ticks(4), *FULL), FOUR_BLOCKS, 4, 1, 4),
    "interleaved": (INTERLEAVED, FOUR_BLOCKS, 2, 1, 4),
    "halves pp2 dp2": ((*ticks(2), *HALVES), VALIDATION, 4, 2, 4),
}


def matrix() -> dict[str, Case]:
    """Stages x microbatches x data parallel x tensor parallel, and with documents that span ranks."""
    cases = {}
    for pp, rounds, data, tensor in product((2, 4), (1, 2, 4), (1, 2), (1, 2)):
        rows, args = rounds * pp, (*ticks(pp), *dp(tensor_parallel=tensor))
        cases[f"pp{pp} m{rows} dp{data} tp{tensor}"] = args, FOUR_BLOCKS, pp * data * tensor, data, rows
    for pp, rounds, data in product((2, 4), (1, 2, 4), (1, 2)):
        rows, args = rounds * pp, (*ticks(pp), *CP2)
        cases[f"pp{pp} m{rows} dp{data} cp2"] = args, FOUR_BLOCKS, pp * data * 2, data, rows
    return cases


SLOW: dict[str, Case] = {
    **matrix(),
    "pp4 ac layer": ((*ticks(4), *LAYER), FOUR_BLOCKS, 4, 1, 4),
    "pp4 ac op": ((*ticks(4), *OP), FOUR_BLOCKS, 4, 1, 4),
    "accumulation": (ticks(2), (*FOUR_BLOCKS, "--training.global_batch_size=4"), 2, 1, 2),
    "compile": ((*ticks(2), *COMPILE), FOUR_BLOCKS, 2, 1, 4),
    "compile ac full": ((*ticks(2), *COMPILE, *FULL), FOUR_BLOCKS, 2, 1, 4),
    "interleaved pp4 m4": (INTERLEAVED4, EIGHT_BLOCKS, 4, 1, 4),
    "interleaved pp4 m8 ac full": ((*INTERLEAVED4, *FULL), EIGHT_BLOCKS, 4, 1, 8),
    "interleaved dp2": (INTERLEAVED, FOUR_BLOCKS, 4, 2, 4),
    "interleaved tp2": ((*INTERLEAVED, *TP2), FOUR_BLOCKS, 4, 1, 4),
    "interleaved cp2": ((*INTERLEAVED, *CP2), FOUR_BLOCKS, 4, 1, 4),
    "interleaved ac full": ((*INTERLEAVED, *FULL), FOUR_BLOCKS, 2, 1, 4),
    "interleaved ac layer": ((*INTERLEAVED, *LAYER), FOUR_BLOCKS, 2, 1, 4),
    "interleaved ac op": ((*INTERLEAVED, *OP), FOUR_BLOCKS, 2, 1, 4),
    "interleaved compile": ((*INTERLEAVED, *COMPILE), FOUR_BLOCKS, 2, 1, 4),
    "interleaved accumulation": (INTERLEAVED, (*FOUR_BLOCKS, "--training.global_batch_size=4"), 2, 1, 2),
    "interleaved validation": (INTERLEAVED, (*FOUR_BLOCKS, *VALIDATION), 2, 1, 4),
    "halves pp4": ((*ticks(4), *HALVES), FOUR_BLOCKS, 4, 1, 4),
    "halves pp4 ac full": ((*ticks(4), *HALVES, *FULL), FOUR_BLOCKS, 4, 1, 4),
    "halves pp4 ac layer": ((*ticks(4), *HALVES, *LAYER), FOUR_BLOCKS, 4, 1, 4),
    "halves pp4 ac op": ((*ticks(4), *HALVES, *OP), FOUR_BLOCKS, 4, 1, 4),
    "halves pp4 by row": ((*ticks(4), *BY_ROW), FOUR_BLOCKS, 4, 1, 8),
    "halves by row dp2": ((*ticks(2), *BY_ROW), FOUR_BLOCKS, 4, 2, 8),
    "halves by row tp2": ((*ticks(2), *BY_ROW, *TP2), FOUR_BLOCKS, 4, 1, 4),
    "halves cp2": ((*ticks(2), *HALVES, *CP2), FOUR_BLOCKS, 4, 1, 4),
    "halves by row cp2": ((*ticks(2), *BY_ROW, *CP2), FOUR_BLOCKS, 4, 1, 4),
    "halves accumulation": ((*ticks(2), *HALVES), (*FOUR_BLOCKS, "--training.global_batch_size=4"), 2, 1, 2),
    "halves compile": ((*ticks(2), *HALVES, *COMPILE), FOUR_BLOCKS, 2, 1, 4),
    "halves compile ac full": ((*ticks(2), *HALVES, *COMPILE, *FULL), FOUR_BLOCKS, 2, 1, 4),
    "halves interleaved": ((*INTERLEAVED, *HALVES), (*FOUR_BLOCKS, *VALIDATION), 2, 1, 4),
    "halves interleaved pp4": ((*INTERLEAVED4, *HALVES), EIGHT_BLOCKS, 4, 1, 4),
    "halves interleaved by row tp2": ((*INTERLEAVED, *BY_ROW, *TP2), FOUR_BLOCKS, 4, 1, 4),
    "halves interleaved cp2": ((*INTERLEAVED, *HALVES, *CP2), FOUR_BLOCKS, 4, 1, 4),
    "halves interleaved compile": ((*INTERLEAVED, *HALVES, *COMPILE), FOUR_BLOCKS, 2, 1, 4),
    "halves interleaved ac full": ((*INTERLEAVED, *HALVES, *FULL), FOUR_BLOCKS, 2, 1, 4),
    "halves interleaved ac op": ((*INTERLEAVED, *HALVES, *OP), FOUR_BLOCKS, 2, 1, 4),
    "halves interleaved ac layer": ((*INTERLEAVED, *HALVES, *LAYER), FOUR_BLOCKS, 2, 1, 4),
    "halves interleaved accumulation": (
        (*INTERLEAVED, *HALVES),
        (*FOUR_BLOCKS, "--training.global_batch_size=4"),
        2,
        1,
        2,
    ),
    "halves by row tp2 ac full": ((*ticks(2), *BY_ROW, *TP2, *FULL), FOUR_BLOCKS, 4, 1, 4),
    "halves by row tp2 compile": ((*ticks(2), *BY_ROW, *TP2, *COMPILE), FOUR_BLOCKS, 4, 1, 4),
    "halves interleaved by row dp2": ((*INTERLEAVED, *BY_ROW), FOUR_BLOCKS, 4, 2, 4),
}


@pytest.mark.parametrize("rows", [1, 2])
def test_one_microbatch_is_worth_a_warning(rows: int, caplog: pytest.LogCaptureFixture) -> None:
    enable_cpu()
    from torchtitan.config import ConfigManager

    args = [*CAD, "--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=CAD1F1B"]
    args += [f"--model.hf_assets_path={tokenizer_folder()}", f"--training.local_batch_size={rows}"]
    ConfigManager().parse_args(args)
    ConfigManager().parse_args([])  # leaves torchtitan as it was
    warnings = [r.message for r in caplog.records if "is one microbatch" in r.message]
    assert len(warnings) == (1 if rows == 1 else 0)
    assert all("set it to 4 or more" in warning for warning in warnings)


@functools.cache
def check(case: Case, *more: str, steps: int = 3) -> RunResult:
    args, shared, nranks, reference_nranks, rows = case
    shared = (f"--training.local_batch_size={rows}", f"--training.steps={steps}", *shared)
    result = run([*COMMON, *CAD, *shared, *args, *more], nranks, grads_at=2, trace_at=3, timeout_s=600)
    assert result.ok, result.report()
    expected = reference(reference_nranks, shared)
    assert_close(result.losses, expected.losses, "loss")
    assert_close(result.grad_norms, expected.grad_norms, "gradient norm")
    assert len(result.validation_losses) == (steps if "--validation.enable" in shared else 0)
    for step, loss in result.validation_losses.items():
        assert_close([loss], [expected.validation_losses[step]], f"validation loss of step {step}")
    worst = max(gradient_errors(result, expected).items(), key=lambda item: item[1])
    assert worst[1] < TOLERANCE, f"gradient of {worst[0]} differs by {worst[1]:.2e} of its norm"
    first, *others = [exchanges(trace["events"]) for trace in result.traces]
    assert len(others) == nranks - 1
    assert first
    assert all(events == first for events in others), "ranks differ in the order of their exchanges"
    return result


def exchanges(events: list[list]) -> list[tuple[str, int]]:
    """The engine's steps that start exchanges, with the keys of their plans."""
    starting = {f"{step}_{direction}" for step in ("start", "attend") for direction in ("forward", "backward")}
    return [(step, key) for step, key in events if step in starting]


@pytest.mark.parametrize("case", QUICK.values(), ids=QUICK.keys())
def test_trains_like_without_a_pipeline(case: Case) -> None:
    check(case)


def test_halves_take_turns_on_every_rank() -> None:
    """Also where a rank serves, an exchange is under way while the other half comes to its next step."""
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


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    "name",
    [
        "pp2 dp2",
        "interleaved",
        "halves pp2 dp2",
        "halves pp4 ac full",
        "halves cp2",
        "halves interleaved",
        "halves by row tp2",
    ],
)
def test_symmetric_memory(name: str) -> None:
    check((QUICK | SLOW)[name], "--cad.transport=symm_mem")
