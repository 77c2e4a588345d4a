# SPDX-License-Identifier: BSD-3-Clause
"""Parts of `python -m bench.gpu` by themselves: what they find, and how the driver is asked for partitions."""

import pytest

from bench.gpu import ordering, partition, sending
from bench.gpu.parts import PARTS, Part
from bench.gpu.process import Outcome, run_part
from torchtitan_cad.planning import make_plan


def dry_run(name: str) -> Outcome:
    (part,) = (part for part in PARTS if part.name == name)
    return run_part(part, "cpu", 300, None)


@pytest.mark.matrix
def test_rows_are_there_with_their_word():
    """And if the word is posted first, that is found."""
    outcome = dry_run("ordering")
    assert outcome.status == "done", outcome.output
    batches = [
        (ordering.CPU.batch * rows, 8 * words)
        for rows, words in ordering.CPU.row_shapes
    ]
    assert outcome.figures["rows"] == sum(rows for rows, _ in batches)
    assert outcome.figures["bytes_checked"] == sum(
        rows * row_bytes for rows, row_bytes in batches
    )
    assert outcome.figures["mismatches"] == 0

    fault = Part(
        "fault", "a planted fault", "tests.bench.fake_parts:posts_too_early", 300
    )
    outcome = run_part(fault, "cpu", 300, None)
    assert outcome.status == "failed"
    assert outcome.figures["mismatches"] == ordering.CPU.batch * len(
        ordering.CPU.row_shapes
    )
    first = outcome.figures["first_mismatches"][0]
    assert (first["round"], first["row"], first["mended"]) == (1, 0, False)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_plans_of_uneven_documents(num_ranks):
    """Rank 0 is late at home, and a plan that moves rows evens it out, in one chunk of the default buffers."""
    from torchtitan_cad.planning.exchange.messages import buffer_bytes
    from torchtitan_cad.planning.model.shape import RowBytes

    layout = partition.uneven_layout(num_ranks, partition.CUDA.tokens)
    assert layout.tokens_per_rank.tolist() == [partition.CUDA.tokens] * num_ranks
    plan = make_plan(layout, partition.CUDA.shape, partition.CUDA.config)
    assert plan.moves_rows
    assert plan.stats.max_over_mean_before / plan.stats.max_over_mean > 1.5
    for rank in range(num_ranks):
        chunks = plan.exchange(rank).most.chunks(
            RowBytes.of(plan.shape, keep=False), buffer_bytes()
        )
        assert {
            len(of_kind)
            for of_kind in (chunks.queries_out, chunks.keys_out, chunks.queries_home)
        } == {1}


def test_the_put_kernel_is_launched_as_a_variant_says():
    before = sending.put.PROGRAMS, sending.put.WARPS
    variant = sending.VARIANTS[0]._replace(programs=40, warps=32)
    with sending.configured(variant):
        assert (sending.put.PROGRAMS, sending.put.WARPS) == (40, 32)
    with sending.configured(sending.VARIANTS[-1]):
        assert before == (sending.put.PROGRAMS, sending.put.WARPS)
    assert before == (sending.put.PROGRAMS, sending.put.WARPS)
