"""Every parameter's gradient against a single process in fp64, relative to what undivided attention gets wrong."""

import functools

import pytest

from tests.integration.compositions import CAD, COMMON, TP2, dp
from tests.integration.harness import RunResult, gradient_errors, run
from tests.sets import params

STEP = 1
CP2 = dp(context_parallel=2)
CASES = {
    # name: (CAD arguments, ranks, data-parallel degree)
    "whole documents": ((), 2, 2),
    "whole documents, keep": (("--cad.backward=keep",), 2, 2),
    "spanning documents": (CP2, 2, 1),
    "spanning documents, keep": ((*CP2, "--cad.backward=keep"), 2, 1),
    "split keys": (("--cad.planner=test_split_keys",), 2, 2),
    "split keys, spanning, keep": ((*CP2, "--cad.planner=test_split_keys", "--cad.backward=keep"), 2, 1),
    "tensor parallel": (TP2, 4, 2),
}

SHORT = ("split keys, spanning, keep",)
"""What the short set trains; the matrix trains all."""


@functools.cache
def single_process(flavor: str, degree: int, fp64: bool) -> RunResult:
    """Undivided attention in one process, on the batches of ``degree`` data-parallel ranks.

    In fp64 it is torchtitan's model with a dense softmax; in fp32 CAD's kernel on one rank, where nothing is divided.
    """
    args = [
        *COMMON,
        *(() if fp64 else CAD),
        f"--model.flavor={flavor}",
        "--training.steps=1",
        f"--training.global_batch_size={2 * degree}",
    ]
    result = run(args, nranks=1, as_dp=degree, fp64=fp64, grads_at=STEP)
    assert result.ok, result.report()
    return result


@pytest.mark.parametrize("heads", [pytest.param("1:1", marks=pytest.mark.slow), "8:2"])
@pytest.mark.parametrize("name", params(CASES, SHORT))
def test_gradients_are_as_exact_as_undivided_attention(name: str, heads: str) -> None:
    args, nranks, degree = CASES[name]
    flavor = {"1:1": "tiny_varlen", "8:2": "tiny_varlen_8_2"}[heads]
    result = run([*COMMON, *CAD, f"--model.flavor={flavor}", "--training.steps=1", *args], nranks, grads_at=STEP)
    assert result.ok, result.report()
    reference = single_process(flavor, degree, fp64=True)
    mine = gradient_errors(result, reference)
    undivided = gradient_errors(single_process(flavor, degree, fp64=False), reference)
    assert max(undivided.values()) < 1e-5, "the references disagree"
    for parameter, error in mine.items():
        allowed = 2 * undivided[parameter]
        assert error <= allowed, f"{parameter}: {error:.2e}, twice that of undivided attention is {allowed:.2e}"
