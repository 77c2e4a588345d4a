"""``cad.placement = "auto"``: losses and gradient norms of the run without CAD, whoever holds which tokens."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.compositions import BATCH4, CAD, COMMON, COMPOSITIONS, PP2, TP2, Composition, cad_summary, dp
from tests.integration.harness import run
from tests.integration.test_cad import check
from tests.sets import params

AUTO = "--cad.placement=auto"
HALVES = ("--cad.nano_batches=2",)
ROW3 = ("--training.local_batch_size=3",)
IN_TICKS = (*PP2, "--parallelism.pipeline_parallel_schedule=CAD1F1B")

SHORT = [
    Composition(  # of single rows the loader's homes are as good
        "fsdp2xcp2",
        nranks=4,
        args=("--parallelism.context_parallel_degree=2", "--cad.min_shard=32"),
        shared=ROW3,
        reference_nranks=2,
    ),
    Composition(
        "ignored_labels_accumulation",
        shared=("--training.dataset=packed_documents_with_ignored_labels", "--training.global_batch_size=8"),
    ),
    Composition(
        "ticks_halves_in_the_middle",
        nranks=4,
        args=(*IN_TICKS, *HALVES),
        reference_args=BATCH4,
        reference_nranks=2,
    ),
]
MATRIX = [
    *(replace(case, partial_keys=None) for case in COMPOSITIONS if case.moves and case.name != "fsdp2xcp2"),
    Composition("fsdp8", nranks=8),
    Composition("halves_by_row", args=HALVES),
    Composition("halves_by_row_fsdp2xtp2", nranks=4, args=HALVES, shared=TP2),
    Composition("halves_in_the_middle", args=HALVES, shared=ROW3),
    Composition("halves_in_the_middle_compile", args=(*HALVES, "--compile.enable"), shared=ROW3),
    Composition(
        "halves_in_the_middle_fsdp2xcp2",
        nranks=4,
        args=(*HALVES, *dp(context_parallel=2)),
        shared=ROW3,
        reference_nranks=2,
    ),
    Composition("halves_pp2_1f1b", nranks=4, args=(*PP2, *HALVES), reference_args=BATCH4, reference_nranks=2),
    Composition("ticks", nranks=4, args=IN_TICKS, reference_args=BATCH4, reference_nranks=2),
    Composition(
        "ticks_cp2", nranks=4, args=(*IN_TICKS, *dp(context_parallel=2)), reference_args=BATCH4, reference_nranks=1
    ),
]


@pytest.mark.parametrize("case", params([*SHORT, *MATRIX], SHORT), ids=lambda case: case.name)
def test_trains_like_its_reference(case: Composition) -> None:
    result = check(case, AUTO)
    worst = cad_summary(result)["placed_worst"]
    # In jobs this small the loader's homes may be as good as any.
    assert worst < 1 if case in SHORT else worst <= 1


def test_batches_with_positions_of_their_own_stay_where_they_are() -> None:
    """Training goes by the loader's positions, as that of stock torchtitan does."""
    result = check(Composition("positions", shared=("--training.dataset=packed_documents_with_positions",)), AUTO)
    for log in result.logs:
        assert log.count("CAD leaves batches on the ranks that loaded them") == 1
    assert "placed_worst" not in cad_summary(result)
    refused = run([*COMMON, *CAD, "--training.dataset=packed_documents_with_positions", "--cad.placement=balanced"])
    assert not refused.ok
    assert any("cannot deal batch key 'positions'" in log for log in refused.logs)


def test_a_resumed_run_repeats_every_bit(tmp_path: Path) -> None:
    """Though the batch after the checkpoint had been dealt when it was written."""
    job = [*COMMON, *CAD, AUTO, "--training.steps=4", "--checkpoint.enable", "--checkpoint.interval=2"]
    whole = run(job, dump_folder=tmp_path)
    assert whole.ok, whole.report()
    resumed = run([*job, "--checkpoint.load_step=2"], dump_folder=tmp_path)
    assert resumed.ok, resumed.report()
    assert resumed.steps == [3, 4]
    assert resumed.losses == whole.losses[2:]
    assert resumed.grad_norms == whole.grad_norms[2:]
