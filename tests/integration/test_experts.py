# SPDX-License-Identifier: BSD-3-Clause
"""qwen3 with experts under CAD, each composition against a run without.

Stock torchtitan's varlen attention does not take the sharded heads that qwen3 gives it under TP; runner.py lets it.
Where experts compute in bf16, in grouped matrix products, the reference divides them as the run does.
"""

import pytest

from tests.integration.test_cad import check
from tests.lib.jobs.compositions import (
    CAD,
    COMMON,
    COMPILE,
    CP2,
    FULL,
    OP,
    PLACED,
    RESEND,
    ROW1,
    TP2,
    Composition,
    dp,
    global_batch,
)
from tests.lib.jobs.harness import run

matrix = pytest.mark.matrix
MOE = ("--model.name=qwen3", "--model.flavor=tiny_moe")
GROUPED = ("--model.name=qwen3", "--model.flavor=tiny_moe_grouped")
EP2, ETP2 = dp(expert_parallel=2), dp(expert_tensor_parallel=2)
ROUTED_IN_TURN = ("--debug.moe_force_load_balance",)

SHORT = "ep2"
COMPOSITIONS = [
    Composition("fsdp2", shared=MOE),
    Composition("ep2", args=EP2, shared=MOE),
    Composition("ep2_grouped", shared=(*GROUPED, *EP2)),
    Composition("ep2_placed", args=(*EP2, *PLACED), shared=MOE),
    Composition("ep2_ac_full_resend", args=(*EP2, *FULL, *RESEND), shared=MOE),
    Composition(
        "ep2_ac_op_accumulation", args=(*EP2, *OP), shared=(*MOE, *global_batch(12))
    ),
    Composition("ep2_compile", shared=(*GROUPED, *EP2, *COMPILE)),
    Composition("ep2xcp2", nranks=4, args=(*EP2, *CP2), shared=MOE, reference_nranks=2),
    Composition("cp2", args=CP2, shared=MOE, reference_nranks=1),
    Composition(
        "hsdp2x2_ep2", nranks=4, args=EP2, shared=(*MOE, *dp(data_parallel_replicate=2))
    ),
    Composition("fsdp2xtp2", nranks=4, shared=(*MOE, *TP2)),
    Composition("ep2xtp2", nranks=4, shared=(*MOE, *TP2, *EP2)),
    Composition("ep2xtp2_etp2", nranks=4, shared=(*MOE, *TP2, *EP2, *ETP2)),
]


def marked(cases: list[Composition], short: str) -> list[object]:
    return [
        pytest.param(case, id=case.name, marks=() if case.name == short else matrix)
        for case in cases
    ]


@pytest.mark.parametrize("case", marked(COMPOSITIONS, SHORT))
def test_experts_train_like_without_cad(case):
    """Gradients, losses, and the biases that balance experts."""
    result = check(case, "--cad.transport=collective")
    assert sum(name.endswith("expert_bias") for name in result.grads) == 2


HALVED = [
    Composition("rows_ep2", args=EP2, shared=MOE),
    Composition("middle_ep2", args=EP2, shared=(*MOE, *ROW1)),
    # Rounding sends a token of this batch to another expert, one of two whose scores are equal but for it.
    Composition(
        "middle_ep2xcp2",
        args=(*EP2, *CP2),
        shared=(*MOE, *ROW1, *ROUTED_IN_TURN),
        reference_nranks=1,
    ),
    Composition(
        "rows_ep2_ac_op_accumulation", args=(*EP2, *OP), shared=(*MOE, *global_batch(8))
    ),
    Composition("rows_ep2_ac_full_resend", args=(*EP2, *FULL, *RESEND), shared=MOE),
    Composition("rows_ep2_compile", args=COMPILE, shared=(*MOE, *EP2)),
    Composition("rows_ep2_compile_ac_op", args=(*COMPILE, *OP), shared=(*MOE, *EP2)),
    # The replicas of a router drift apart under TP (torchtitan 0.2.2), and gradients of other tokens are then added.
    Composition(
        "rows_ep2xtp2_etp2", nranks=4, shared=(*MOE, *TP2, *EP2, *ETP2, *ROUTED_IN_TURN)
    ),
]


@pytest.mark.parametrize("case", marked(HALVED, "rows_ep2"))
def test_halves_with_experts_train_like_without_cad(case):
    check(case, "--cad.nano_batches=2")


@matrix
@pytest.mark.parametrize("args", [(), FULL], ids=["none", "ac_full"])
def test_experts_of_both_halves_are_gathered_and_reduced_once(args):
    one, two = (traces(count, *args) for count in (1, 2))
    for name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):
        assert [trace["collectives"].count(name) for trace in two] == [
            trace["collectives"].count(name) for trace in one
        ]
    for before, after in zip(one, two, strict=True):
        sent = "c10d::alltoall_base_"
        assert after["collectives"].count(sent) > before["collectives"].count(sent) > 0


def traces(nano_batches: int, *args: str) -> list[dict]:
    job = [
        *COMMON,
        *CAD,
        *MOE,
        *dp(expert_parallel=2),
        f"--cad.nano_batches={nano_batches}",
        *args,
    ]
    return run(job, 4, trace_at=2).traces
