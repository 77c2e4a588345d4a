# SPDX-License-Identifier: BSD-3-Clause
"""The CUDA kernels against dense fp64 attention: varlen, cudnn, and flash_attn with every package that is installed."""

import pytest
import torch
from torch import Tensor

from tests.lib.accuracy import assert_as_exact
from tests.lib.device import ON_GPU
from tests.lib.kernels_reference import (
    assert_results_as_exact,
    dense_in_fp32,
    dense_in_fp64,
    offsets,
    random_qkv,
    run_split,
)
from tests.runtime.test_combine import compare_with_torch
from tests.runtime.test_kernels import Document, run_group
from torchtitan_cad.runtime.kernels import (
    AttentionKernel,
    VarlenArgs,
    get_kernel,
    select,
)
from torchtitan_cad.runtime.kernels.base import Merged, row_delta

pytestmark = ON_GPU


def cuda_kernels() -> dict[str, AttentionKernel]:
    if not torch.cuda.is_available():
        return {"varlen": get_kernel("varlen", "cuda")}
    return {
        str(kernel): kernel
        for kernel, _ in select.compare_kernels(torch.device("cuda"), select._SHAPE)[0]
    }


KERNELS = cuda_kernels()
EVERY_KERNEL = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
BOTTOM_RIGHT = {
    name: kernel for name, kernel in KERNELS.items() if not kernel.squares_only
}
EVERY_BOTTOM_RIGHT = pytest.mark.parametrize(
    "kernel", BOTTOM_RIGHT.values(), ids=BOTTOM_RIGHT.keys()
)
TOLERANCE = {
    dtype: 4 * torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float16)
}
"""Kernels round to the input's dtype what no dense computation in fp32 does: probabilities, their gradients, the row's
delta and the result. That is four times half an eps, and twice in products of two such factors."""


def error(result: Tensor, reference: Tensor) -> float:
    """Largest absolute error relative to the reference's largest value, or to 0.01 if all are 0 but for rounding."""
    return float(
        (result.double() - reference).abs().max()
        / reference.abs().max().clamp_min(0.01)
    )


@EVERY_KERNEL
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (16, 2)])
@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize(
    ("len_q", "len_k", "causal"),
    [
        ([1, 77, 333], [1, 77, 333], True),
        ([130, 1, 128], [517, 300, 128], True),
        ([40, 200], [7, 0], True),
        ([130, 1, 300], [257, 700, 0], False),
        ([1, 1], [5, 9], False),
    ],
)
def test_against_dense(kernel, len_q, len_k, causal, dim, heads, dtype):
    if kernel.squares_only and (0 in len_k or (causal and len_q != len_k)):
        pytest.skip(
            "cuDNN takes tasks with keys, and squares only where they are causal"
        )
    cu_q, cu_k = offsets(len_q), offsets(len_k)
    call = VarlenArgs.from_numpy(
        cu_q, cu_k, causal=causal, scale=dim**-0.5, device="cuda"
    )
    check_against_dense(kernel, call, heads, dim, dtype)


@EVERY_BOTTOM_RIGHT
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [1, 64, 128, 1000])
def test_windows_against_dense(kernel, window, dtype):
    cu_q, cu_k = offsets([1, 77, 333, 200]), offsets([1, 77, 460, 900])
    call = VarlenArgs.from_numpy(
        cu_q, cu_k, causal=True, scale=0.125, device="cuda", window=window
    )
    check_against_dense(kernel, call, (8, 2), 64, dtype)


def check_against_dense(
    kernel: AttentionKernel,
    call: VarlenArgs,
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
) -> None:
    num_q, num_k = int(call.cu_q_host[-1]), int(call.cu_k_host[-1])
    q, k, v, dout = random_qkv(num_q, num_k, heads, dim, dtype, device="cuda")
    out, lse = kernel.forward(q, k, v, call)
    ref_out, ref_lse, *refs = dense_in_fp64(q, k, v, dout, call)
    empty = ref_lse == -torch.inf
    assert torch.equal(lse.isinf(), empty)
    assert not out[empty].any()
    assert error(out, ref_out) < TOLERANCE[dtype]
    # FlashAttention sums scores in fp32, from products of the inputs that fp32 holds exactly.
    assert_as_exact(
        lse[~empty],
        dense_in_fp32(q, k, v, dout, call)[1][~empty],
        ref_lse[~empty],
        "lse",
    )
    statistics = [
        Merged(lse, row_delta(dout, out)),
        *([] if empty.any() else [Merged(lse, out=out)]),
    ]
    for merged in statistics:
        for grad, ref in zip(
            kernel.backward(dout, q, k, v, merged, call), refs, strict=True
        ):
            assert error(grad, ref) < TOLERANCE[dtype]


@EVERY_BOTTOM_RIGHT
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_split_keys_err_at_most_twice_as_much(kernel, dtype):
    """Keys 0..300 of the rows 512..1024 of a document are apart from the rest."""
    length, dim = 1024, 64
    rows = q, k, v, dout = random_qkv(length, length, (8, 2), dim, dtype, device="cuda")
    whole = VarlenArgs.from_numpy(
        [0, length], [0, length], causal=True, scale=dim**-0.5, device="cuda"
    )
    out, lse = kernel.forward(q, k, v, whole)
    grads = kernel.backward(dout, q, k, v, Merged(lse, row_delta(dout, out)), whole)
    tasks = [
        (0, 512, 0, 512, True),
        (512, 1024, 300, 1024, True),
        (512, 1024, 0, 300, False),
    ]
    merged = [
        x.to(y.dtype)
        for x, y in zip(
            run_split(kernel, tasks, rows, dim**-0.5), (out, lse, *grads), strict=True
        )
    ]
    assert_results_as_exact(
        merged, (out, lse, *grads), dense_in_fp64(q, k, v, dout, whole)
    )


@EVERY_BOTTOM_RIGHT
def test_cuts_at_tile_boundaries_keep_the_bits(kernel):
    document = Document(
        1500, (8, 2), 128, torch.bfloat16, seed=0, kernel=kernel, device="cuda"
    )
    tasks = [(0, 0, 384), (0, 384, 512), (0, 512, 1408), (0, 1408, 1500)]
    out, lse, _ = run_group([document], tasks)
    assert torch.equal(out, document.out)
    assert torch.equal(lse, document.lse)


def test_every_kernel_passes_its_trial():
    trial = select.Trial(KERNELS["varlen"], torch.device("cuda"), select._SHAPE)
    outcomes = {name: trial.outcome(kernel) for name, kernel in KERNELS.items()}
    assert all(isinstance(outcome, float) for outcome in outcomes.values()), outcomes


def test_delta_and_surrogate_on_the_device():
    compare_with_torch(torch.device("cuda"))
