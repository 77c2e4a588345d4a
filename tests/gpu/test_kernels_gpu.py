# SPDX-License-Identifier: BSD-3-Clause
"""The CUDA kernels against dense fp64 attention: varlen, cudnn, and flash_attn with every package that is installed."""

import pytest
import torch

from tests.lib.accuracy import assert_as_exact
from tests.lib.device import ON_GPU, cuda_kernels
from tests.lib.kernels_reference import (
    attend,
    dense_in_fp32,
    dense_in_fp64,
    offsets,
    random_qkv,
)
from tests.runtime.test_combine import compare_with_torch
from torchtitan_cad.runtime.kernels.base import Merged, VarlenArgs

pytestmark = ON_GPU

KERNELS = cuda_kernels()
EVERY_KERNEL = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
TOLERANCE = {
    dtype: 4 * torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float16)
}
"""Kernels round to the input's dtype what no dense computation in fp32 does: probabilities, their gradients, the row's
delta and the result. That is four times half an eps, and twice in products of two such factors."""


def error(result, reference) -> float:
    """Largest absolute error relative to the reference's largest value, or to 0.01 if all are 0 but for rounding."""
    largest = reference.abs().max().clamp_min(0.01)
    return float((result.double() - reference).abs().max() / largest)


@EVERY_KERNEL
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (16, 2)])
@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize(
    ("len_q", "len_k", "causal", "window"),
    [
        ([1, 77, 333], [1, 77, 333], True, None),
        # FlashAttention-4 has code of its own for more than 256 tasks
        ([5] * 300, [5] * 300, True, None),
        ([130, 1, 128], [517, 300, 128], True, None),
        ([40, 200], [7, 0], True, None),
        ([130, 1, 300], [257, 700, 0], False, None),
        ([1, 1], [5, 9], False, None),
        *(
            ([1, 77, 333, 200], [1, 77, 460, 900], True, window)
            for window in (1, 64, 128, 1000)
        ),
    ],
)
def test_against_dense(kernel, len_q, len_k, causal, window, dim, heads, dtype):
    if kernel.squares_only and (0 in len_k or (causal and len_q != len_k)):
        pytest.skip(
            "cuDNN takes tasks with keys, and squares only where they are causal"
        )
    if dim == 16 and "FlashAttention-4" in str(kernel):
        pytest.skip("its gradients of such heads are wrong on Hopper: it refuses them")
    cu_q = offsets(len_q)
    cu_k = offsets(len_k)
    options = {"causal": causal, "scale": dim**-0.5, "window": window}
    call = VarlenArgs.from_numpy(cu_q, cu_k, device="cuda", **options)
    rows = random_qkv(cu_q[-1], cu_k[-1], heads, dim, dtype, device="cuda")
    out, lse, *grads = attend(kernel, *rows, call)
    exact_out, exact_lse, *exact_grads = dense_in_fp64(*rows, call)
    empty = exact_lse == -torch.inf
    assert torch.equal(lse.isinf(), empty)
    assert not out[empty].any()
    # FlashAttention sums scores in fp32, from products of the inputs that fp32 holds exactly.
    independent = dense_in_fp32(*rows, call)[1]
    assert_as_exact(*(x[~empty] for x in (lse, independent, exact_lse)), "lse")
    results = [out, *grads]
    exact = [exact_out, *exact_grads]
    if not empty.any():
        *qkv, dout = rows
        results += kernel.backward(dout, *qkv, Merged(lse, out=out), call)
        exact += exact_grads
    for result, reference in zip(results, exact, strict=True):
        assert error(result, reference) < TOLERANCE[dtype]


@EVERY_KERNEL
def test_cuts_at_tile_boundaries_keep_the_bits(kernel):
    if kernel.squares_only:
        pytest.skip("cuDNN takes squares only where they are causal")
    q, k, v, _ = random_qkv(1500, 1500, (8, 2), 128, torch.bfloat16, device="cuda")
    options = {"causal": True, "scale": 0.1, "device": "cuda"}
    whole = VarlenArgs.from_numpy([0, 1500], [0, 1500], **options)
    ends = [384, 512, 1408, 1500]
    pieces = VarlenArgs.from_numpy([0, *ends], offsets(ends), **options)
    seen_k, seen_v = (torch.cat([x[:end] for end in ends]) for x in (k, v))
    results = kernel.forward(q, seen_k, seen_v, pieces)
    assert all(map(torch.equal, results, kernel.forward(q, k, v, whole)))


def test_delta_and_surrogate_on_the_device():
    compare_with_torch(torch.device("cuda"))
