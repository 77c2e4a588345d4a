# SPDX-License-Identifier: BSD-3-Clause
"""Combining partials, delta and statistics: Triton kernels under its interpreter give what torch gives."""

import itertools
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from tests.lib.accuracy import assert_as_exact
from tests.lib.fake_flash_attn import COMPONENTS, prepare_statistics
from tests.lib.interpreter import interpret
from tests.lib.processes import run_processes, values
from tests.lib.sets import needs_triton
from torchtitan_cad.runtime import triton
from torchtitan_cad.runtime.combine import Combination
from torchtitan_cad.runtime.kernels.base import compute_dtype, row_delta

CPU = torch.device("cpu")


def build(*args, is_fused: bool) -> Combination:
    """Builds a combination by Triton kernels (``is_fused``) or by torch."""
    with mock.patch.object(triton, "runs_on", return_value=is_fused):
        return Combination.build(*args)


CASES = [
    # dtype of the partials, heads, head dim, rows of the accumulators, rows of each call
    (torch.bfloat16, 8, 64, 7, (9, 8)),
    (torch.float64, 2, 20, 4, (5, 5)),
    (torch.bfloat16, 40, 128, 3, (3, 2)),
    (torch.bfloat16, 4, 64, 6, (3, 4, 2, 4, 1)),
    (torch.float16, 2, 16, 6, (4, 6, 0)),
    (torch.float32, 3, 20, 5, (5,)),
    (torch.bfloat16, 2, 64, 4, ()),
]


def make_case(rng, case: tuple, device) -> tuple:
    """Rows of the partials; their outs and lses as strided views of messages and of [heads, rows]. Some rows are empty,
    with poisoned outs."""
    dtype, heads, dim, num_rows, sizes = case
    # the last row has none, unless a tensor has partials of all rows in order
    targets = [
        np.arange(num_rows)
        if size == num_rows
        else rng.integers(-1, max(num_rows - 1, 1), size)
        for size in sizes
    ]
    outs = []
    lses = []
    for number, size in enumerate(sizes):
        message = torch.randn(size, heads * dim + 24).to(device, dtype)
        out = message[:, 8 : 8 + heads * dim].view(size, heads, dim)
        lse = 8 * torch.randn(size, heads + 3, dtype=compute_dtype(dtype))
        lse[torch.rand(size, heads + 3) < 0.3] = -torch.inf if number % 2 else torch.inf
        lse = lse[:, :heads].to(device)
        out[lse.isinf()] = torch.nan
        outs.append(out.contiguous() if size == num_rows else out)
        lses.append(lse.t().contiguous().t() if number % 2 else lse)
    return targets, outs, lses


def compare_orders(seed, device):
    """Both kinds give the same sums, and merged rows as exact; Triton's in place where it can."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    for case in CASES:
        dtype, heads, dim, num_rows, _ = case
        targets, outs, lses = make_case(rng, case, device)
        by_torch, by_triton = (
            build(targets, num_rows, device, is_fused=is_fused)
            for is_fused in (False, True)
        )
        like = torch.empty(0, heads, dim, dtype=dtype, device=device)
        want = by_torch.merge([outs, lses], like)
        precise = [[x.double() for x in xs] for xs in (outs, lses)]
        reference = by_torch.merge(precise, like.double())
        whole = [[out.nan_to_num(x) for out in outs] for x in (0.5, 1, 2)]
        got = by_triton.merge([outs, lses], like)
        is_in_place = any(got[0].data_ptr() == x.data_ptr() for x in outs)
        assert is_in_place == (0 < num_rows in map(len, targets))
        counts = [
            sum((rows == row).sum() for rows in targets) for row in range(num_rows)
        ]
        has_one = torch.tensor(counts, device=device) == 1
        for result, other, exact in zip(got, want, reference, strict=True):
            assert result.dtype == other.dtype
            assert_as_exact(result, other, exact)
            # a row with one partial keeps its bits
            assert torch.equal(result[has_one], other[has_one])
        half = -(-dim // 2)
        part = [out[:, :1, :half] for out in whole[0]]
        like_part = like[:, :1, :half]
        # copied, as their rows are not dense
        odd = [[out[..., ::2] for out in outs] for outs in whole[:2]]
        for parts, likes in (
            (odd, [like[..., ::2]] * 2),
            ([part, whole[0]], [like_part, like]),
            ([*whole[1:], part], [like, like, like_part]),
        ):
            want, got = (x.add(parts, likes) for x in (by_torch, by_triton))
            assert all(map(torch.equal, got, want)), case
            assert all(x.dtype == dtype for x in got)


# Delta, and the statistics of a backward ------------------------------------------------------------------------------


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
DELTA_SHAPES = [(37, 3, 128), (9, 2, 96), (3, 2, 5), (0, 2, 8)]


def delta_in_fp64(dout, out) -> Tensor:
    return (dout.double() * out.double()).sum(-1)


def interpret_and_compare(group):
    interpret()
    compare_orders(0, CPU)
    compare_with_torch(CPU)


def compare_with_torch(device):
    """Both kernels err at most twice as much as torch on the CPU in the same precision, but for some roundings."""
    from torchtitan_cad.runtime.triton import delta as kernels

    torch.manual_seed(0)
    for dtype, shape in itertools.product(DTYPES, DELTA_SHAPES):
        dout = torch.randn(shape).to(dtype)
        out = torch.randn(shape).to(dtype)
        dout[:1] = 0
        dout[-1:, :, 1:] = 0  # one element
        accumulator = compute_dtype(dtype)
        exact = delta_in_fp64(dout, out)
        eps = torch.finfo(accumulator).eps
        roundings = 4 * eps * delta_in_fp64(dout.abs(), out.abs())

        delta = kernels.row_delta(dout.to(device), out.to(device), accumulator)
        by_torch = row_delta(dout, out)
        bound = 2 * (by_torch - exact).abs() + roundings
        assert torch.all((delta.cpu() - exact).abs() <= bound)

        if dtype.itemsize > 2:
            continue
        lse = torch.randn(out.shape[:-1], dtype=accumulator)
        lse[torch.rand(lse.shape) < 0.2] = -torch.inf
        arguments = [x.to(device) for x in (dout, lse, by_torch)]
        results = kernels.prepare_statistics(*arguments, empty_lse=torch.inf)
        surrogate, lse_out = (x.cpu() for x in results)
        assert ((surrogate != 0).sum(-1) <= COMPONENTS).all()
        others = prepare_statistics(dout, lse, by_torch, empty_lse=torch.inf)
        assert torch.equal(lse_out, others[1])
        error, error_of_torch = (
            (delta_in_fp64(dout, x) - by_torch).abs() for x in (surrogate, others[0])
        )
        assert torch.all(error <= 2 * error_of_torch + roundings)


@needs_triton
def test_interpreted_kernels_compute_what_torch_does():
    values(run_processes(1, interpret_and_compare))
