# SPDX-License-Identifier: BSD-3-Clause
"""Orders in which partials are combined, and Triton kernels under its interpreter: combining, delta, statistics."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.lib.accuracy import assert_as_exact
from tests.lib.fake_flash_attn import COMPONENTS, prepare_statistics
from tests.lib.interpreter import interpret
from tests.lib.processes import run_processes, values
from tests.lib.refusals import refusal
from tests.lib.sets import needs_triton, seeds
from torchtitan_cad.runtime import triton
from torchtitan_cad.runtime.combine import Combination
from torchtitan_cad.runtime.kernels.base import compute_dtype, row_delta
from torchtitan_cad.runtime.triton import TENSOR_BITS

CPU = torch.device("cpu")
ROWS = st.lists(st.integers(0, 8), max_size=40)


def build(*args, is_fused: bool) -> Combination:
    """Builds a combination by Triton kernels (``is_fused``) or by torch."""
    with mock.patch.object(triton, "runs_on", return_value=is_fused):
        return Combination.build(*args)


@given(ROWS)
def test_waves_and_segments_have_every_row_s_partials_in_order(targets):
    first = len(targets) // 2
    both = [
        np.array(part, dtype=np.int64) for part in (targets[:first], targets[first:])
    ]
    seen: dict[int, list[int]] = {row: [] for row in range(11)}
    waves = [index.tolist() for index in Combination.build(both, 11, CPU).index]
    for sources, rows in zip(waves[::2], waves[1::2], strict=True):
        assert len(set(rows)) == len(rows)
        for source, row in zip(sources, rows, strict=True):
            seen[row].append(source)
    assert seen == {
        row: [i for i, other in enumerate(targets) if other == row] for row in range(11)
    }
    segments = build(both, 11, CPU, is_fused=True)
    assert all(index.dtype == torch.int32 for index in segments.index)
    sources, bounds = (index.tolist() for index in segments.index)
    names = [
        (source >> TENSOR_BITS) + source % (1 << TENSOR_BITS) * first
        for source in sources
    ]
    assert seen == {row: names[bounds[row] : bounds[row + 1]] for row in range(11)}


def test_more_tensors_than_a_table_can_name_are_refused():
    with refusal():
        Combination.build([np.array([0])] * 17, 1, CPU)


CASES = [
    # dtype of the partials, heads, head dim, rows of the accumulators, rows of each call
    (torch.bfloat16, 8, 64, 7, (9, 8)),
    (torch.float16, 3, 128, 5, (4, 6)),
    (torch.float32, 2, 16, 6, (11,)),
    (torch.float64, 2, 20, 4, (5, 5)),
    (torch.bfloat16, 40, 128, 3, (3, 2)),
    (torch.bfloat16, 2, 64, 5, (0, 3)),
    (torch.bfloat16, 4, 64, 6, (3, 4, 2, 5, 1)),
    (torch.bfloat16, 2, 64, 4, (0,)),
    (torch.bfloat16, 2, 64, 4, ()),
    (torch.bfloat16, 2, 64, 0, ()),
]


def make_case(rng: np.random.Generator, case: tuple, device: torch.device) -> tuple:
    """Rows of the partials; their outs and lses as strided views of messages and of [heads, rows]. Some rows are empty,
    with poisoned outs."""
    dtype, heads, dim, num_rows, sizes = case
    # the last row has none
    targets = [rng.integers(-1, max(num_rows - 1, 1), size) for size in sizes]
    outs, lses = [], []
    for number, size in enumerate(sizes):
        message = torch.randn(size, heads * dim + 24).to(device, dtype)
        out = message[:, 8 : 8 + heads * dim].view(size, heads, dim)
        lse = 8 * torch.randn(size, heads + 3, dtype=compute_dtype(dtype))
        lse[torch.rand(size, heads + 3) < 0.3] = -torch.inf if number % 2 else torch.inf
        lse = lse[:, :heads].to(device)
        out[lse.isinf()] = torch.nan
        outs.append(out)
        lses.append(lse.t().contiguous().t() if number % 2 else lse)
    return targets, outs, lses


def interpret_and_compare(group, seed: int) -> None:
    interpret()
    compare_orders(seed, CPU)


def compare_orders(seed: int, device: torch.device) -> None:
    """Both kinds give the same sums, and merged rows as exact."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    for case in CASES:
        dtype, heads, dim, num_rows, _ = case
        targets, outs, lses = make_case(rng, case, device)
        combinations = [
            build(targets, num_rows, device, is_fused=is_fused)
            for is_fused in (False, True)
        ]
        like = torch.empty(0, heads, dim, dtype=dtype, device=device)
        want, got = (
            combination.merge([outs, lses], like) for combination in combinations
        )
        reference = combinations[0].merge(
            [[x.double() for x in xs] for xs in (outs, lses)], like.double()
        )
        for mine, theirs, exact in zip(got, want, reference, strict=True):
            assert mine.dtype == theirs.dtype
            assert_as_exact(mine, theirs, exact)
        num_partials = np.bincount(
            np.concatenate([[], *targets]).astype(int) + 1, minlength=num_rows + 1
        )[1:]
        once = torch.from_numpy(num_partials == 1).to(device)
        # a row with one partial keeps its bits
        for mine, theirs in zip(got, want, strict=True):
            assert torch.equal(mine[once], theirs[once])
        finite = [[out.nan_to_num(x) for out in outs] for x in (0.5, 1, 2)]
        narrow = [out[:, :1, : -(-dim // 2)] for out in finite[0]]
        for parts in ([narrow, finite[0]], [*finite[1:], narrow]):
            shapes = [
                (1, -(-dim // 2)) if part is narrow else (heads, dim) for part in parts
            ]
            likes = [like.new_empty(0, *shape) for shape in shapes]
            want, got = (combination.add(parts, likes) for combination in combinations)
            assert all(
                torch.equal(mine, theirs)
                for mine, theirs in zip(got, want, strict=True)
            ), case
            assert all(x.dtype == dtype for x in got)


def combine_in_place(group) -> None:
    """Partials of all rows in order become the results: rows without others keep their bits, nobody's are moved."""
    interpret()
    rng, shape, like = (
        np.random.default_rng(0),
        (6, 2, 16),
        torch.empty(0, 2, 16).bfloat16(),
    )
    targets = [rng.integers(0, 3, 4), np.arange(6), rng.integers(-1, 3, 5)]
    assert set(np.concatenate([targets[0], targets[2]])) <= {-1, 0, 1, 2}, (
        "rows 3 to 5 have one partial"
    )
    outs, grads = (
        [torch.randn(len(rows), *shape[1:]).bfloat16() for rows in targets]
        for _ in range(2)
    )
    lses = [torch.randn(2, len(rows)).t() for rows in targets]
    # one of them without keys
    lses[1][[0, 5], 0], outs[1][[0, 5], 0] = (
        torch.inf,
        torch.nan,
    )
    torch_index, index = (
        build(targets, 6, CPU, is_fused=is_fused) for is_fused in (False, True)
    )
    assert (torch_index.in_place, index.in_place) == (-1, 1)
    copied = replace(index, in_place=-1)
    before, want = outs[1].clone(), torch_index.merge([outs, lses], like)
    separate, out_of_place = (
        copied.merge([outs, lses], like),
        index.merge([outs, lses], like.float()),
    )
    assert torch.equal(outs[1].nan_to_num(7), before.nan_to_num(7)), (
        "results of another dtype are separate"
    )
    assert out_of_place[0].dtype == torch.float32
    merged = index.merge([outs, lses], like)
    assert merged[0].data_ptr() == outs[1].data_ptr()
    for mine, theirs, exact in zip(merged, separate, want, strict=True):
        assert torch.equal(mine, theirs)
        assert_as_exact(mine, exact, exact)
    want = torch_index.add([grads, grads], [like, like])
    both = [list(grads), [x.clone() for x in grads]]
    sums = index.add(both, [like, like])
    assert [x.data_ptr() for x in sums] == [of_sum[1].data_ptr() for of_sum in both]
    assert all(map(torch.equal, sums, want))


@needs_triton
def test_results_are_combined_where_they_are():
    values(run_processes(1, combine_in_place))


@needs_triton
@pytest.mark.parametrize("seed", seeds(1, 2))
def test_triton_kernels_combine_as_torch_does(seed):
    values(run_processes(1, interpret_and_compare, seed))


# Delta, and the statistics of a backward ------------------------------------------------------------------------------


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
DELTA_SHAPES = [(37, 3, 128), (9, 2, 96), (5, 1, 64), (3, 2, 5), (1, 1, 256), (0, 2, 8)]


def interpret_and_compare_deltas(group) -> None:
    interpret()
    compare_with_torch(torch.device("cpu"))


def compare_with_torch(device: torch.device) -> None:
    """Both kernels err at most twice as much as torch on the CPU in the same precision, but for some roundings."""
    from torchtitan_cad.runtime.triton import delta as kernels

    torch.manual_seed(0)
    for dtype, shape in itertools.product(DTYPES, DELTA_SHAPES):
        dout, out = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
        if len(dout):
            dout[0] = 0
            dout[-1, :, 1:] = 0  # one element
        accumulator = compute_dtype(dtype)
        exact = (dout.double() * out.double()).sum(-1)
        roundings = (
            4
            * torch.finfo(accumulator).eps
            * (dout.double() * out.double()).abs().sum(-1)
        )

        delta = kernels.row_delta(dout.to(device), out.to(device), accumulator)
        wanted = row_delta(dout, out)
        assert torch.all(
            (delta.cpu() - exact).abs() <= 2 * (wanted - exact).abs() + roundings
        )

        if dtype.itemsize > 2:
            continue
        lse = torch.randn(out.shape[:-1], dtype=accumulator)
        lse[torch.rand(lse.shape) < 0.2] = -torch.inf
        arguments = [x.to(device) for x in (dout, lse, wanted)]
        surrogate, lse_out = kernels.prepare_statistics(*arguments, empty_lse=torch.inf)
        surrogate = surrogate.cpu()
        assert ((surrogate != 0).sum(-1) <= COMPONENTS).all()
        wanted_surrogate, wanted_lse = prepare_statistics(
            dout, lse, wanted, empty_lse=torch.inf
        )
        assert torch.equal(lse_out.cpu(), wanted_lse)
        mine, theirs = (
            ((dout.double() * x.double()).sum(-1) - wanted).abs()
            for x in (surrogate, wanted_surrogate)
        )
        assert torch.all(mine <= 2 * theirs + roundings)
        if len(dout) > 30:
            check_against_rounded_out(kernels.prepare_statistics, dout[1:-1].to(device))


def check_against_rounded_out(
    prepare: Callable[..., tuple[Tensor, Tensor]], dout: Tensor
) -> None:
    """The surrogate gives the delta of an unrounded out, where the home rank can only send that of its rounded out."""
    out = torch.randn(dout.shape, dtype=torch.float64).to(dout.device)
    exact, rounded = (
        (dout.double() * x.double()).sum(-1) for x in (out, out.to(dout.dtype))
    )
    delta = exact.to(compute_dtype(dout.dtype))
    surrogate, _ = prepare(
        dout.contiguous(), torch.zeros_like(delta), delta, empty_lse=torch.inf
    )
    got = (dout.double() * surrogate.double()).sum(-1)
    assert (got - exact).abs().max() < 0.01 * (rounded - exact).abs().max()


@needs_triton
def test_interpreted_kernels_compute_what_torch_does():
    values(run_processes(1, interpret_and_compare_deltas))
