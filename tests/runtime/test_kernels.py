# SPDX-License-Identifier: BSD-3-Clause
"""The CPU kernel and the merge against dense fp64 attention; torch's varlen on the CPU."""

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from tests.lib.kernels_reference import (
    assert_results_as_exact,
    attend,
    dense_in_fp32,
    dense_in_fp64,
    offsets,
    random_qkv,
)
from tests.lib.refusals import refusal
from tests.lib.sets import params
from torchtitan_cad.integration.cpu_varlen import register_cpu_varlen
from torchtitan_cad.runtime.kernels.base import Merged, VarlenArgs
from torchtitan_cad.runtime.kernels.cpu import CpuKernel
from torchtitan_cad.runtime.kernels.merge import merge_partials
from torchtitan_cad.runtime.kernels.select import get_kernel

KERNEL = CpuKernel()


def check_results(call, q, k, v, dout):
    """Results are as exact as a dense computation in fp32; out gives the bits that delta gives."""
    out, lse, *grads = results = attend(KERNEL, q, k, v, dout, call)
    assert out.dtype == q.dtype
    assert lse.dtype == torch.promote_types(q.dtype, torch.float32)
    assert not out[lse == -torch.inf].any()
    by_out = KERNEL.backward(dout, q, k, v, Merged(lse, out=out), call)
    assert all(map(torch.equal, grads, by_out))
    independent = dense_in_fp32(q, k, v, dout, call)
    assert_results_as_exact(results, independent, dense_in_fp64(q, k, v, dout, call))


# The gradient of one of a few keys would outweigh all others, and its error is that of a single sum.
NUM_KEYS = st.just(0) | st.integers(32, 300)


@given(
    tasks=st.lists(st.tuples(st.integers(0, 200), NUM_KEYS), max_size=2),
    heads=st.sampled_from([(2, 2), (4, 1), (6, 2)]),
    dims=st.sampled_from([(16, 16), (64, 64), (24, 8), (16, 40), (192, 128)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    causal=st.booleans(),
    window=st.none() | st.sampled_from([2, 100, 128, 129, 700]),
)
def test_any_call_is_as_exact_as_a_dense_one(tasks, heads, dims, dtype, causal, window):
    """Rows without keys too; one task is as large as errors of sums need to be alike."""
    window = window if causal else None
    tasks = [(200, 333), *tasks]
    cu_q, cu_k = (offsets(lengths) for lengths in zip(*tasks, strict=True))
    dim, value_dim = dims
    options = {"causal": causal, "scale": dim**-0.5, "window": window}
    call = VarlenArgs.from_numpy(cu_q, cu_k, **options)
    rows = random_qkv(cu_q[-1], cu_k[-1], heads, dim, dtype, value_dim=value_dim)
    check_results(call, *rows)


@pytest.mark.parametrize("num_q", [1, 16, 200])
def test_one_key(num_q):
    """dq and dk are differences of two equal products, and their error that of these: sums of fewer than 200 x 64."""
    call = VarlenArgs.from_numpy([0, num_q], [0, 1], causal=False, scale=0.125)
    rows = random_qkv(num_q, 1, (1, 1), 64, torch.float64)
    results = attend(KERNEL, *rows, call)
    error = 200 * 64 * torch.finfo(torch.float64).eps
    for result, exact in zip(results, dense_in_fp64(*rows, call), strict=True):
        assert torch.allclose(result, exact, rtol=0, atol=error)


def test_a_call_without_queries():
    call = VarlenArgs.from_numpy([0, 0], [0, 9], causal=True, scale=1.0)
    check_results(call, *random_qkv(0, 9, (4, 2), 24, torch.float32))


def test_large_scores_do_not_overflow():
    call = VarlenArgs.from_numpy([0, 200], [0, 200], causal=True, scale=1.0)
    q, k, v, dout = random_qkv(200, 200, (2, 1), 16, torch.float32)
    check_results(call, q * 30, k * 10, v, dout)


def test_noncontiguous_inputs_and_autocast():
    call = VarlenArgs.from_numpy([0, 150], [0, 150], causal=True, scale=0.25)
    rows = random_qkv(150, 150, (4, 2), 16, torch.float32)
    views = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in rows]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = attend(KERNEL, *views, call)
    assert all(map(torch.equal, results, attend(KERNEL, *rows, call)))


# Merge ----------------------------------------------------------------------------------------------------------------


def test_merge_does_not_overflow():
    out = torch.ones(1, 1, 2)
    lse = torch.full((1, 1), 1e4)
    for value, score in ((3.0, 1e4), (9.0, -1e4)):
        part = torch.full((1, 1, 2), value), torch.full((1, 1), score)
        merge_partials(out, lse, *part, torch.tensor([0]))
        assert torch.equal(out, torch.full((1, 1, 2), 2.0))


# The choice of a kernel -----------------------------------------------------------------------------------------------


def test_get_kernel():
    assert {get_kernel(name, "cpu").name for name in ("auto", "cpu")} == {"cpu"}
    wrong = {"varlen": "cpu", "cpu": "cuda", "auto": "mps", "fast": "cpu"}
    for name, device in wrong.items():
        with refusal("cad.kernel", name):
            get_kernel(name, device)


# Stock torch.nn.attention.varlen on the CPU, equal to the CPU kernel bit for bit --------------------------------------


register_cpu_varlen()
register_cpu_varlen()  # a second registration does nothing

CU_Q = torch.tensor([0, 1, 200, 557], dtype=torch.int32)
CU_K = torch.tensor([0, 4, 203, 600], dtype=torch.int32)
TAKES_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
GQA = {"enable_gqa": True} if TAKES_GQA else {}


def stock(q, k, v, window: tuple[int, int]) -> Tensor:
    lengths = (CU_Q, CU_K, 357, 397)
    return varlen_attn(q, k, v, *lengths, window_size=window, scale=0.2, **GQA)


@pytest.mark.parametrize(
    "compiled", params([False, True], [False]), ids=["eager", "compiled"]
)
@pytest.mark.parametrize(
    "window", [(-1, 0), (-1, -1), (63, 0)], ids=["causal", "full", "window"]
)
def test_equals_the_cpu_kernel(window, compiled):
    *qkv, dout = random_qkv(557, 600, (4, 2), 16, torch.bfloat16)
    options = {"causal": window[1] == 0, "window": 64 if window[0] >= 0 else None}
    call = VarlenArgs.from_numpy(CU_Q.numpy(), CU_K.numpy(), scale=0.2, **options)
    out, _, *grads = attend(KERNEL, *qkv, dout, call)
    # as torchtitan passes them: views of [batch, heads, seq, dim]
    leaves = [
        x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in qkv
    ]
    torch.compiler.reset()
    function = torch.compile(stock, fullgraph=True) if compiled else stock
    got = function(*leaves, window)
    got.backward(dout)
    assert torch.equal(got, out)
    for leaf, grad in zip(leaves, grads, strict=True):
        assert torch.equal(leaf.grad, grad.bfloat16())
