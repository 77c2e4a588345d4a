"""Dense fp64 attention and random calls, for the kernel tests."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_cad.runtime.kernels import CallArgs


def dense_attention(q: Tensor, k: Tensor, v: Tensor, call: CallArgs) -> tuple[Tensor, Tensor]:
    """out [Tq, Hq, D] and lse [Tq, Hq] in the dtype of q, differentiable; the seq x seq matrix is formed."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    outs, lses = [q[:0]], [q[:0, :, 0]]
    for task in range(call.num_tasks):
        queries = slice(*call.cu_q_host[task : task + 2].tolist())
        keys = slice(*call.cu_k_host[task : task + 2].tolist())
        scores = torch.einsum("qhd,khd->qhk", q[queries], k[keys]) * call.scale
        num_q, _, num_k = scores.shape
        if call.causal:
            visible = torch.ones(num_q, num_k, dtype=torch.bool, device=q.device).tril(num_k - num_q)
            scores = scores.masked_fill(~visible.unsqueeze(1), -torch.inf)
        lse = scores.logsumexp(-1)
        probs = (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()
        outs.append(torch.einsum("qhk,khd->qhd", probs, v[keys]))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def dense_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, call: CallArgs
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """out, lse and (dq, dk, dv) in fp64."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    out, lse = dense_attention(q, k, v, call)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout.double())
    return out.detach(), lse.detach(), (dq, dk, dv)


def random_qkv(
    num_q: int, num_k: int, heads: tuple[int, int], dim: int, dtype: torch.dtype, seed: int = 0, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [num_q, Hq, D], k and v [num_k, Hkv, D], dout like q."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_q, heads[0], dim), (num_k, heads[1], dim), (num_k, heads[1], dim), (num_q, heads[0], dim)]
    q, k, v, dout = (torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype) for s in shapes)
    return q, k, v, dout


def offsets(lengths: Sequence[int]) -> list[int]:
    """[0, l0, l0 + l1, ...]."""
    sums = [0]
    for length in lengths:
        sums.append(sums[-1] + length)
    return sums


def error(result: Tensor, reference: Tensor) -> float:
    """Largest absolute error relative to the reference's largest value."""
    if reference.numel() == 0:
        return 0.0
    scale = reference.double().abs().max().clamp_min(1e-30)
    return float((result.double() - reference.double()).abs().max() / scale)
