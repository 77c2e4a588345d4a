# SPDX-License-Identifier: BSD-3-Clause
"""``cad.placement = "auto"``: losses and gradient norms of the run without CAD, whoever holds which tokens."""

import re

import pytest

from tests.integration.test_cad import check
from tests.lib.jobs import compositions as c
from tests.lib.sets import params

AUTO = "--cad.placement=auto"
HALVES = ("--cad.nano_batches=2",)
ROW3 = ("--training.local_batch_size=3",)
IN_TICKS = c.schedule("CAD1F1B")

SHORT = [
    c.Composition(
        "ignored_labels_accumulation",
        shared=(
            "--training.dataset=packed_documents_with_ignored_labels",
            *c.global_batch(8),
        ),
    ),
]
OVER_STEPS = [
    c.Composition(
        "cp2_accumulation", args=c.CP2, shared=c.global_batch(8), reference_nranks=1
    ),
    c.Composition(
        "fsdp2xtp2_accumulation",
        nranks=4,
        args=c.TP2,
        shared=c.global_batch(16),
        reference_nranks=2,
    ),
    c.Composition("halves_by_row_accumulation", args=HALVES, shared=c.global_batch(16)),
    c.Composition(
        "halves_in_the_middle_accumulation",
        args=HALVES,
        shared=(*ROW3, *c.global_batch(24)),
    ),
    c.pp2("1f1b_accumulation", *c.global_batch(16), reference_args=c.global_batch(16)),
    c.pp2("halves_pp2_1f1b", *HALVES),
    c.pp2("ticks_halves_in_the_middle", *IN_TICKS, *HALVES),
    c.pp2(
        "ticks_accumulation",
        *IN_TICKS,
        *c.global_batch(16),
        reference_args=c.global_batch(16),
    ),
    c.pp2("1f1b_alone_in_a_stage", nranks=2, reference_nranks=1, moves=False),
    c.pp2("ticks_alone_in_a_stage", *IN_TICKS, nranks=2, reference_nranks=1),
]
"""Steps of four microbatches and more, between which documents go."""
MATRIX = [
    # With single rows the loader's homes are as good.
    c.Composition(
        "fsdp2xcp2",
        nranks=4,
        args=(*c.CP2, "--cad.min_shard=32"),
        shared=ROW3,
        reference_nranks=2,
    ),
    *(case for case in c.COMPOSITIONS if case.moves and case.name != "fsdp2xcp2"),
    c.Composition("fsdp8", nranks=8),
    c.Composition("halves_by_row", args=HALVES),
    c.Composition("halves_by_row_fsdp2xtp2", nranks=4, args=HALVES, shared=c.TP2),
    c.Composition("halves_in_the_middle", args=HALVES, shared=ROW3),
    c.Composition(
        "halves_in_the_middle_compile", args=(*HALVES, *c.COMPILE), shared=ROW3
    ),
    c.Composition(
        "halves_in_the_middle_fsdp2xcp2",
        nranks=4,
        args=(*HALVES, *c.CP2),
        shared=ROW3,
        reference_nranks=2,
    ),
    c.pp2("ticks", *IN_TICKS),
    c.pp2("ticks_cp2", *IN_TICKS, *c.CP2, reference_nranks=1),
]


@pytest.mark.parametrize(
    "case", params([*SHORT, *OVER_STEPS, *MATRIX], SHORT), ids=lambda case: case.name
)
def test_trains_like_its_reference(case):
    result = check(case, AUTO)
    worst = c.cad_summary(result)["placed_worst"]
    # In jobs this small the loader's homes may be as good as any.
    assert worst < 1 if case in SHORT else worst <= 1
    if case in [*SHORT, *OVER_STEPS]:
        assert re.search(r"[1-9]\d* documents change their microbatch", result.logs[0])


@pytest.mark.matrix
def test_positions_of_the_loader_travel_with_their_tokens():
    """Training goes by the loader's positions, as that of stock torchtitan does."""
    result = check(
        c.Composition(
            "positions", shared=("--training.dataset=packed_documents_with_positions",)
        ),
        AUTO,
    )
    assert "placed_worst" in c.cad_summary(result)
