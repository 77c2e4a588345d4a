# SPDX-License-Identifier: BSD-3-Clause
"""Dense fp64 attention and random calls, for the kernel tests."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.lib.accuracy import assert_as_exact
from torchtitan_cad.runtime.kernels import AttentionKernel, VarlenArgs
from torchtitan_cad.runtime.kernels.base import Merged, row_delta
from torchtitan_cad.runtime.kernels.cpu import CpuKernel
from torchtitan_cad.runtime.kernels.merge import merge_partials

NAMES = ("out", "lse", "dq", "dk", "dv", "dshared")
Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""out [Tq, Hq, D], lse [Tq, Hq], dq, dk, dv."""


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, call: VarlenArgs
) -> tuple[Tensor, Tensor]:
    """out [Tq, Hq, D] and lse [Tq, Hq] in the dtype of q, differentiable; the seq x seq matrix is formed."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    outs, lses = [q[:0, :, :1].expand(-1, -1, v.shape[2])], [q[:0, :, 0]]
    for task in range(len(call.q_start)):
        queries = slice(*call.cu_q_host[task : task + 2].tolist())
        keys = slice(*call.cu_k_host[task : task + 2].tolist())
        scores = torch.einsum("qhd,khd->qhk", q[queries], k[keys]) * call.scale
        num_q, _, num_k = scores.shape
        if call.causal:
            visible = torch.ones(num_q, num_k, dtype=torch.bool, device=q.device).tril(
                num_k - num_q
            )
            visible = (
                visible
                if call.window is None
                else visible.triu(num_k - num_q + 1 - call.window)
            )
            scores = scores.masked_fill(~visible.unsqueeze(1), -torch.inf)
        lse = scores.logsumexp(-1)
        probs = (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()
        outs.append(torch.einsum("qhk,khd->qhd", probs, v[keys]))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def dense_in_fp64(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    call: VarlenArgs,
    dlse: Tensor | None = None,
) -> Results:
    """The reference, differentiated by autograd."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    out, lse = dense_attention(q, k, v, call)
    results, gradients = (
        ([out], [dout.double()])
        if dlse is None
        else ([out, lse], [dout.double(), dlse.double()])
    )
    dq, dk, dv = torch.autograd.grad(
        results, (q, k, v), gradients, materialize_grads=True
    )
    return out.detach(), lse.detach(), dq, dk, dv


def dense_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    call: VarlenArgs,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in the dtype of q from the statistics of (merged) rows, as kernels compute them."""
    heads = k.shape[1]
    qg, dg, shift, delta = (x.unflatten(1, (heads, -1)) for x in (q, dout, lse, delta))
    shift = shift.masked_fill(shift == -torch.inf, 0)
    dq, dk, dv = (torch.zeros_like(x) for x in (qg, k, v))
    for task in range(len(call.q_start)):
        rows = slice(*call.cu_q_host[task : task + 2].tolist())
        keys = slice(*call.cu_k_host[task : task + 2].tolist())
        num_q, num_k = rows.stop - rows.start, keys.stop - keys.start
        probs = torch.einsum("qhgd,khd->hgqk", qg[rows], k[keys]) * call.scale
        probs = (probs - shift[rows].permute(1, 2, 0).unsqueeze(-1)).exp()
        if call.causal:
            probs = probs.tril(num_k - num_q)
            probs = (
                probs
                if call.window is None
                else probs.triu(num_k - num_q + 1 - call.window)
            )
        dprobs = torch.einsum("qhgd,khd->hgqk", dg[rows], v[keys])
        dscores = (
            probs * (dprobs - delta[rows].permute(1, 2, 0).unsqueeze(-1)) * call.scale
        )
        dq[rows] = torch.einsum("hgqk,khd->qhgd", dscores, k[keys])
        dk[keys] = torch.einsum("hgqk,qhgd->khd", dscores, qg[rows])
        dv[keys] = torch.einsum("hgqk,qhgd->khd", probs, dg[rows])
    return dq.flatten(1, 2), dk, dv


def dense_in_fp32(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, call: VarlenArgs
) -> Results:
    """A kernel's results, computed otherwise and in fp32; out is rounded if the inputs are fp16 or bf16."""
    dtype = torch.float32 if q.dtype == torch.float64 else q.dtype
    q, k, v, dout = (x.float() for x in (q, k, v, dout))
    out, lse = dense_attention(q, k, v, call)
    out = out.to(dtype)
    return (
        out,
        lse,
        *dense_backward(q, k, v, dout, lse, (dout * out.float()).sum(-1), call),
    )


def random_qkv(
    num_q: int,
    num_k: int,
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
    seed: int = 0,
    device: str = "cpu",
    value_dim: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [num_q, Hq, D], k and v [num_k, Hkv, D or Dv], dout like out; no value has more digits than fp32."""
    generator, out_dim = torch.Generator().manual_seed(seed), value_dim or dim
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


Task = tuple[int, int, int, int, bool]
"""First query and end, first key and end, and whether the task is causal."""


def run_split(
    kernel: AttentionKernel, tasks: Sequence[Task], rows: Sequence[Tensor], scale: float
) -> tuple[Tensor, ...]:
    """Merged out and lse, and the summed gradients of all tasks of ``rows`` (q, k, v, dout), each run as a call."""
    q, k, v, dout = rows
    dtype = torch.promote_types(q.dtype, torch.float32)
    out, lse = (
        q.new_zeros(*q.shape[:2], v.shape[2], dtype=dtype),
        q.new_full(q.shape[:2], -torch.inf, dtype=dtype),
    )
    calls = []
    for q_start, q_end, kv_start, kv_end, causal in tasks:
        cu_q, cu_k = [0, q_end - q_start], [0, kv_end - kv_start]
        call = VarlenArgs.from_numpy(
            cu_q, cu_k, causal=causal, scale=scale, device=q.device, q_start=[q_start]
        )
        calls.append((slice(q_start, q_end), slice(kv_start, kv_end), call))
    for queries, keys, call in calls:
        index = torch.arange(queries.start, queries.stop, device=q.device)
        merge_partials(
            out, lse, *kernel.forward(q[queries], k[keys], v[keys], call), index
        )
    out = out.to(q.dtype)
    delta = row_delta(dout, out)
    grads = [torch.zeros_like(x, dtype=dtype) for x in (q, k, v)]
    for queries, keys, call in calls:
        merged = Merged(lse[queries], delta[queries])
        parts = kernel.backward(
            dout[queries], q[queries], k[keys], v[keys], merged, call
        )
        for grad, part, where in zip(grads, parts, (queries, keys, keys), strict=True):
            grad[where] += part
    return out, lse, *grads


def assert_results_as_exact(
    results: Sequence[Tensor],
    independent: Sequence[Tensor],
    reference: Sequence[Tensor],
) -> None:
    """``assert_as_exact`` of all five, and of the gradient of a shared part."""
    for name, mine, other, exact in zip(
        NAMES[: len(results)], results, independent, reference, strict=True
    ):
        assert_as_exact(mine, other, exact, name)


def check_marshalling(
    kernel: AttentionKernel,
    len_q: Sequence[int],
    len_k: Sequence[int],
    causal: bool,
    dtype: torch.dtype,
    dims: tuple[int, int] = (32, 32),
    window: int | None = None,
) -> None:
    """A kernel whose library computes as the CPU kernel does passes it the right arguments: their order, layouts,
    dtypes, the alignment of the mask and the marks of empty rows."""
    cu_q, cu_k, cpu = offsets(len_q), offsets(len_k), CpuKernel()
    call = VarlenArgs.from_numpy(cu_q, cu_k, causal=causal, scale=0.2, window=window)
    q, k, v, dout = random_qkv(
        cu_q[-1], cu_k[-1], (4, 2), dims[0], dtype, value_dim=dims[1]
    )
    out, lse = kernel.forward(q, k, v, call)
    cpu_out, cpu_lse = cpu.forward(q, k, v, call)
    assert torch.equal(out, cpu_out)
    assert torch.equal(lse.masked_fill(lse.isinf(), -torch.inf), cpu_lse)
    references = dense_in_fp64(q, k, v, dout, call)[2:]
    merged = Merged(lse, row_delta(dout, out))
    strided = dout.transpose(0, 1).contiguous().transpose(0, 1)
    plain = cpu.backward(dout, q, k, v, merged, call)
    for grad, other, reference in zip(
        kernel.backward(strided, q, k, v, merged, call), plain, references, strict=True
    ):
        assert grad.dtype == dtype
        assert_as_exact(grad, other.to(dtype), reference)
    with_out = kernel.backward(dout, q, k, v, Merged(lse, out=out), call)
    for grad, other, reference in zip(with_out, plain, references, strict=True):
        assert_as_exact(grad, other.to(dtype), reference)
