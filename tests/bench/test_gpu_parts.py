# SPDX-License-Identifier: BSD-3-Clause
"""Parts of `python -m bench.gpu` by themselves: what they find, and the plans that they run."""

import numpy as np
import pytest

from bench.gpu import ordering, partition, sending
from bench.gpu.parts import PARTS, Part
from bench.gpu.process import run_part
from torchtitan_cad.planning import make_plan
from torchtitan_cad.planning.exchange.messages import buffer_bytes
from torchtitan_cad.planning.model.shape import RowBytes


@pytest.mark.matrix
def test_rows_are_there_with_their_word():
    """And if the word is posted first, that is found."""
    (part,) = (part for part in PARTS if part.name == "ordering")
    outcome = run_part(part, "cpu", 300, None)
    assert outcome.status == "done", outcome.output
    rows = [ordering.CPU.batch * rows for rows, _ in ordering.CPU.row_shapes]
    row_bytes = [8 * words for _, words in ordering.CPU.row_shapes]
    assert outcome.figures["rows"] == sum(rows)
    assert outcome.figures["bytes_checked"] == np.dot(rows, row_bytes)
    assert outcome.figures["mismatches"] == 0

    function = "tests.bench.fake_parts:posts_too_early"
    fault = run_part(Part("fault", "a planted fault", function, 300), "cpu", 300, None)
    assert fault.status == "failed"
    assert fault.figures["mismatches"] == ordering.CPU.batch * len(rows)
    first = fault.figures["first_mismatches"][0]
    assert (first["round"], first["row"], first["mended"]) == (1, 0, False)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_plans_of_uneven_documents(num_ranks):
    """Rank 0 is late at home, and a plan that moves rows evens it out, in one chunk of the default buffers."""
    layout = partition.uneven_layout(num_ranks, partition.CUDA.tokens)
    assert layout.tokens_per_rank.tolist() == [partition.CUDA.tokens] * num_ranks
    plan = make_plan(layout, partition.CUDA.shape, partition.CUDA.config)
    assert plan.moves_rows
    assert plan.stats.max_over_mean_before / plan.stats.max_over_mean > 1.5
    row_bytes = RowBytes.of(plan.shape, keep=False)
    chunks = plan.most_rows.chunks(row_bytes, buffer_bytes())
    for of_kind in (chunks.queries_out, chunks.keys_out, chunks.queries_home):
        assert len(of_kind) == 1


def test_the_put_kernel_is_launched_as_a_variant_says():
    before = sending.put.PROGRAMS, sending.put.WARPS
    variant = sending.VARIANTS[0]._replace(programs=40, warps=32)
    with sending.configured(variant):
        assert (sending.put.PROGRAMS, sending.put.WARPS) == (40, 32)
    with sending.configured(sending.VARIANTS[-1]):
        assert before == (sending.put.PROGRAMS, sending.put.WARPS)
    assert before == (sending.put.PROGRAMS, sending.put.WARPS)
