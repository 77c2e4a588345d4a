# SPDX-License-Identifier: BSD-3-Clause
"""``cad.placement = "auto"``: losses and gradient norms of the run without CAD, whoever holds which tokens."""

import re

import pytest

from tests.integration.test_cad import check
from tests.lib.jobs.compositions import (
    COMPILE,
    COMPOSITIONS,
    CP2,
    HALVES,
    TP2,
    Composition,
    global_batch,
    name_of,
    pp2,
    schedule,
)
from tests.lib.sets import params

AUTO = "--cad.placement=auto"
ROW3 = ("--training.local_batch_size=3",)
IN_TICKS = schedule("CAD1F1B")

SHORT = [
    Composition(
        "ignored_labels_accumulation",
        shared=(
            "--training.dataset=packed_documents_with_ignored_labels",
            *global_batch(8),
        ),
    ),
]
POSITIONS = [
    # Training goes by the loader's positions, as that of stock torchtitan does.
    Composition(
        "positions", shared=("--training.dataset=packed_documents_with_positions",)
    ),
]
OVER_STEPS = [
    Composition("cp2_accumulation", args=CP2, shared=global_batch(8), dp=1),
    Composition(
        "fsdp2xtp2_accumulation",
        args=TP2,
        shared=global_batch(16),
    ),
    Composition("halves_by_row_accumulation", args=HALVES, shared=global_batch(16)),
    Composition(
        "halves_in_the_middle_accumulation",
        args=HALVES,
        shared=(*ROW3, *global_batch(24)),
    ),
    pp2("1f1b_accumulation", *global_batch(16), reference_args=global_batch(16)),
    pp2("halves_pp2_1f1b", *HALVES),
    pp2("ticks_halves_in_the_middle", *IN_TICKS, *HALVES),
    pp2(
        "ticks_accumulation",
        *IN_TICKS,
        *global_batch(16),
        reference_args=global_batch(16),
    ),
    pp2("1f1b_alone_in_a_stage", dp=1, moves=False),
    pp2("ticks_alone_in_a_stage", *IN_TICKS, dp=1),
]
"""Steps of four microbatches and more, between which documents go."""
MATRIX = [
    # With single rows the loader's homes are as good.
    Composition(
        "fsdp2xcp2",
        args=(*CP2, "--cad.min_shard=32"),
        shared=ROW3,
    ),
    *(case for case in COMPOSITIONS if case.moves and case.name != "fsdp2xcp2"),
    Composition("fsdp8", dp=8),
    Composition("halves_by_row_fsdp2xtp2", args=HALVES, shared=TP2),
    Composition("halves_in_the_middle_compile", args=(*HALVES, *COMPILE), shared=ROW3),
    Composition(
        "halves_in_the_middle_fsdp2xcp2",
        args=(*HALVES, *CP2),
        shared=ROW3,
    ),
    pp2("ticks_cp2", *IN_TICKS, *CP2, dp=1),
]


@pytest.mark.parametrize(
    "case",
    params([*SHORT, *POSITIONS, *OVER_STEPS, *MATRIX], SHORT),
    ids=name_of,
)
def test_trains_like_its_reference(case):
    result = check(case, AUTO)
    if case in [*SHORT, *OVER_STEPS]:
        assert re.search(r"[1-9]\d* documents change their microbatch", result.logs[0])
