"""``triton.delta.prepare_statistics`` by operations of torch."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from torchtitan_cad.runtime.kernels.base import compute_dtype

COMPONENTS = 3


def use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes kernels take their statistics from here, without Triton and on the CPU."""
    statistics = SimpleNamespace(prepare_statistics=prepare_statistics)
    monkeypatch.setitem(sys.modules, "torchtitan_cad.runtime.triton.delta", statistics)


def prepare_statistics(dout: Tensor, lse: Tensor, delta: Tensor, *, empty_lse: float) -> tuple[Tensor, Tensor]:
    """The sum is put on the largest components of the whole row, where Triton's kernel takes them from its quarters."""
    assert all(x.is_contiguous() for x in (dout, lse, delta))
    dtype = compute_dtype(dout.dtype)
    index = dout.abs().topk(min(COMPONENTS, dout.shape[-1]), dim=-1).indices
    limit = torch.finfo(dout.dtype).max
    remaining = delta.to(dtype)
    components = []
    for factor in dout.gather(-1, index).to(dtype).unbind(-1):
        component = torch.where(factor == 0, 0.0, remaining / factor).clamp(-limit, limit).to(dout.dtype)
        remaining = remaining - factor * component.to(dtype)
        components.append(component)
    out = torch.zeros_like(dout).scatter_(-1, index, torch.stack(components, -1))
    return out, lse.float().masked_fill(lse.isinf(), empty_lse).t().contiguous()
