# SPDX-License-Identifier: BSD-3-Clause
"""Dense fp64 attention and random calls, for the kernel tests."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.lib.accuracy import assert_as_exact
from torchtitan_cad.runtime.kernels.base import (
    Merged,
    VarlenArgs,
    row_delta,
)
from torchtitan_cad.runtime.kernels.cpu import CpuKernel

NAMES = ("out", "lse", "dq", "dk", "dv", "dshared")
Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""out [Tq, Hq, D], lse [Tq, Hq], dq, dk, dv."""


def dense_attention(q, k, v, call) -> tuple[Tensor, Tensor]:
    """out [Tq, Hq, D] and lse [Tq, Hq] in the dtype of q, differentiable; the seq x seq matrix is formed."""
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, 1)
    v = v.repeat_interleave(group, 1)
    outs = [q[:0, :, :1].expand(-1, -1, v.shape[2])]
    lses = [q[:0, :, 0]]
    for task in range(len(call.q_start)):
        queries = slice(*call.cu_q_host[task : task + 2].tolist())
        keys = slice(*call.cu_k_host[task : task + 2].tolist())
        scores = torch.einsum("qhd,khd->qhk", q[queries], k[keys]) * call.scale
        num_q, _, num_k = scores.shape
        if call.causal:
            visible = torch.ones(num_q, num_k, dtype=torch.bool, device=q.device).tril(
                num_k - num_q
            )
            if call.window is not None:
                visible = visible.triu(num_k - num_q + 1 - call.window)
            scores = scores.masked_fill(~visible.unsqueeze(1), -torch.inf)
        lse = scores.logsumexp(-1)
        probs = (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()
        outs.append(torch.einsum("qhk,khd->qhd", probs, v[keys]))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def dense_in_fp64(q, k, v, dout, call, dlse: Tensor | None = None) -> Results:
    """The reference, differentiated by autograd."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, lse = dense_attention(*leaves, call)
    of_lse = torch.zeros_like(lse) if dlse is None else dlse.double()
    return out.detach(), lse.detach(), *gradients(leaves, (out, lse), dout, of_lse)


def gradients(
    leaves: Sequence[Tensor], results: tuple[Tensor, Tensor], dout, dlse
) -> tuple[Tensor, ...]:
    """Of q, k and v, from those of out and lse; zeros if there are no tasks."""
    of_results = (dout.to(results[0].dtype), dlse)
    return torch.autograd.grad(results, leaves, of_results, materialize_grads=True)


def dense_in_fp32(q, k, v, dout, call) -> Results:
    """A kernel's results, computed otherwise and in fp32; out is rounded if the inputs are fp16 or bf16.

    Kernels take delta = rowsum(dout * out) of the rounded out, and sum it in another order than the product of dout and
    v, from which it is subtracted. Autograd's two agree to the bit where a row sees one key. What a kernel's delta
    differs by, summed here one head dim after another, is a gradient of the log-sum-exp.
    """
    dtype = torch.float32 if q.dtype == torch.float64 else q.dtype
    leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
    out, lse = dense_attention(*leaves, call)
    rounded = out.detach().to(dtype)
    exact_delta = (dout.double() * out.detach().double()).sum(-1)
    products = dout.float() * rounded.float()
    delta = sum(products.unbind(-1), torch.zeros_like(lse))
    dlse = (exact_delta - delta).float()
    return rounded, lse.detach(), *gradients(leaves, (out, lse), dout, dlse)


def attend(kernel, q, k, v, dout, call) -> Results:
    """A kernel's results of one call that holds all keys of its queries."""
    out, lse = kernel.forward(q, k, v, call)
    merged = Merged(lse, row_delta(dout, out))
    return out, lse, *kernel.backward(dout, q, k, v, merged, call)


def random_qkv(
    num_q: int,
    num_k: int,
    heads: tuple[int, int],
    dim,
    dtype,
    seed=0,
    device: str = "cpu",
    value_dim: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [num_q, Hq, D], k and v [num_k, Hkv, D or Dv], dout like out; no value has more digits than fp32."""
    generator = torch.Generator().manual_seed(seed)
    out_dim = value_dim or dim
    shapes = [
        (num_q, heads[0], dim),
        (num_k, heads[1], dim),
        (num_k, heads[1], out_dim),
        (num_q, heads[0], out_dim),
    ]
    q, k, v, dout = (
        torch.randn(s, generator=generator, dtype=torch.float64)
        .float()
        .to(device, dtype)
        for s in shapes
    )
    return q, k, v, dout


def offsets(lengths: Sequence[int]) -> list[int]:
    """[0, l0, l0 + l1, ...]."""
    return [0, *itertools.accumulate(lengths)]


def assert_results_as_exact(
    results: Sequence[Tensor],
    independent: Sequence[Tensor],
    reference: Sequence[Tensor],
):
    """``assert_as_exact`` of all five, and of the gradient of a shared part."""
    names = NAMES[: len(results)]
    for name, *three in zip(names, results, independent, reference, strict=True):
        assert_as_exact(*three, name)


def check_marshalling(
    kernel,
    len_q: Sequence[int],
    len_k: Sequence[int],
    causal,
    dtype,
    dims: tuple[int, int] = (32, 32),
    window=None,
):
    """A kernel whose library computes as the CPU kernel does passes it the right arguments: their order, layouts,
    dtypes, the alignment of the mask and the marks of empty rows."""
    cu_q = offsets(len_q)
    cu_k = offsets(len_k)
    call = VarlenArgs.from_numpy(cu_q, cu_k, causal=causal, scale=0.2, window=window)
    q, k, v, dout = random_qkv(
        cu_q[-1], cu_k[-1], (4, 2), dims[0], dtype, value_dim=dims[1]
    )
    out, lse = kernel.forward(q, k, v, call)
    cpu_out, cpu_lse, *cpu_grads = attend(CpuKernel(), q, k, v, dout, call)
    assert torch.equal(out, cpu_out)
    assert torch.equal(lse.masked_fill(lse.isinf(), -torch.inf), cpu_lse)
    references = dense_in_fp64(q, k, v, dout, call)[2:]
    strided = dout.transpose(0, 1).contiguous().transpose(0, 1)
    for merged in (Merged(lse, row_delta(dout, out)), Merged(lse, out=out)):
        grads = kernel.backward(strided, q, k, v, merged, call)
        for grad, other, reference in zip(grads, cpu_grads, references, strict=True):
            assert grad.dtype == dtype
            assert_as_exact(grad, other.to(dtype), reference)
