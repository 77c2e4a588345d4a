"""Stock ``torch.nn.attention.varlen`` on the CPU, eager and compiled, equal to the CPU kernel bit for bit."""

import inspect

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from tests.runtime.kernels_reference import random_qkv
from tests.sets import params
from torchtitan_cad.runtime.kernels import VarlenArgs
from torchtitan_cad.runtime.kernels.base import Merged, row_delta
from torchtitan_cad.runtime.kernels.cpu import CpuKernel
from torchtitan_cad.runtime.kernels.torch_varlen_cpu import register_cpu_varlen

register_cpu_varlen()
register_cpu_varlen()  # a second registration does nothing

CU_Q, CU_K = (torch.tensor(cu, dtype=torch.int32) for cu in ([0, 1, 200, 557], [0, 4, 203, 600]))
GQA = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def attend(q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int]) -> Tensor:
    return varlen_attn(q, k, v, CU_Q, CU_K, 357, 397, window_size=window, scale=0.2, **GQA)


@pytest.mark.parametrize("compiled", params([False, True], [False]), ids=["eager", "compiled"])
@pytest.mark.parametrize("window", [(-1, 0), (-1, -1)], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_cpu_kernel(dtype: torch.dtype, window: tuple[int, int], compiled: bool) -> None:
    q, k, v, dout = random_qkv(557, 600, (4, 2), 16, dtype)
    call = VarlenArgs.from_numpy(CU_Q.numpy(), CU_K.numpy(), causal=window == (-1, 0), scale=0.2)
    out, lse = CpuKernel().forward(q, k, v, call)
    grads = CpuKernel().backward(dout, q, k, v, Merged(lse, row_delta(dout, out)), call)
    # as torchtitan passes them: views of [batch, heads, seq, dim]
    leaves = [x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in (q, k, v)]
    torch.compiler.reset()
    function = torch.compile(attend, fullgraph=True) if compiled else attend
    got = function(*leaves, window)
    got.backward(dout)
    assert torch.equal(got, out)
    for leaf, grad in zip(leaves, grads, strict=True):
        assert torch.equal(leaf.grad, grad.to(dtype))


def test_windows_are_refused() -> None:
    q, k, v, _ = random_qkv(557, 600, (2, 2), 16, torch.float32)
    with pytest.raises(ValueError, match="window_size"):
        attend(q, k, v, (64, 0))
