"""A trial of an attention kernel against a trusted one, on the device."""

import torch

from torchtitan_cad.runtime.kernels.base import AttentionKernel, VarlenArgs, row_delta

TOLERANCE = 0.02
"""Largest difference, relative to the largest value: a few roundings of bf16."""


def disagreement(kernel: AttentionKernel, trusted: AttentionKernel, device: torch.device, head_dim: int) -> str | None:
    """Compare ``kernel`` with ``trusted`` in two small bf16 calls like a plan's; say what differs, None if nothing."""
    generator = torch.Generator().manual_seed(0)

    def rows(count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, head_dim, generator=generator).to(device, torch.bfloat16)

    cu_q, cu_k = [0, 200, 329], [0, 500, 700]
    q, dout, k, v = rows(329, 4), rows(329, 4), rows(700, 2), rows(700, 2)
    for causal in (True, False):
        call = VarlenArgs.from_numpy(cu_q, cu_k, causal=causal, scale=head_dim**-0.5, device=device)
        out, lse = trusted.forward(q, k, v, call)
        delta = row_delta(dout, out)
        want = (out, lse, *trusted.backward(dout, q, k, v, lse, delta, call))
        got = (*kernel.forward(q, k, v, call), *kernel.backward(dout, q, k, v, lse, delta, call))
        for name, mine, theirs in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
            if mine.shape != theirs.shape:
                return f"{name} has shape {tuple(mine.shape)} instead of {tuple(theirs.shape)}"
            error = float((mine.double() - theirs.double()).abs().max() / theirs.double().abs().max())
            if not error < TOLERANCE:
                return f"{name} is off by {error:.2g} of its largest value, causal = {causal}"
    return None
