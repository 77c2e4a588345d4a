"""The Triton kernels for delta and the surrogate of out: interpreted beside torch, and compiled without a GPU."""

import importlib.util
import itertools
import os
import sys

import pytest
import torch

from tests.runtime.processes import run_processes, values
from torchtitan_cad.runtime.kernels.base import compute_dtype, row_delta
from torchtitan_cad.runtime.kernels.varlen import surrogate_out

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SHAPES = [(37, 3, 128), (9, 2, 96), (5, 1, 64), (3, 2, 5), (1, 1, 256), (0, 2, 8)]


def interpret_and_compare(group) -> None:
    assert "triton" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"
    compare_with_torch(torch.device("cpu"))


def compare_with_torch(device: torch.device) -> None:
    """Both kernels err at most twice as much as torch on the CPU in the same precision, but for some roundings."""
    from torchtitan_cad.runtime.triton import delta as kernels

    torch.manual_seed(0)
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        dout, out = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
        if len(dout):
            dout[0] = 0
            dout[-1, :, 1:] = 0  # one element
        accumulator = compute_dtype(dtype)
        exact = (dout.double() * out.double()).sum(-1)
        roundings = 4 * torch.finfo(accumulator).eps * (dout.double() * out.double()).abs().sum(-1)

        delta = torch.full(out.shape[:-1], torch.nan, dtype=accumulator, device=device)
        kernels.row_delta(dout.to(device), out.to(device), delta)
        wanted = row_delta(dout, out)
        assert torch.all((delta.cpu() - exact).abs() <= 2 * (wanted - exact).abs() + roundings)

        surrogate = torch.full_like(out, torch.nan, device=device)
        kernels.surrogate_out(dout.to(device), wanted.to(device), surrogate, components=3)
        surrogate = surrogate.cpu()
        assert ((surrogate != 0).sum(-1) <= 3).all()
        mine, theirs = (
            ((dout.double() * x.double()).sum(-1) - wanted).abs() for x in (surrogate, surrogate_out(dout, wanted))
        )
        assert torch.all(mine <= 2 * theirs + roundings)


def test_interpreted_kernels_compute_what_torch_does() -> None:
    values(run_processes(1, interpret_and_compare))


def compile_for(group, capability: int, folder: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = folder
    from tests.runtime.triton_code import ptx
    from torchtitan_cad.runtime.triton import delta as kernels

    types, block = {"dout": "*bf16", "out": "*bf16", "delta": "*fp32", "num_rows": "i32"}, {"DIM": 128}
    block |= {"BLOCK_ROWS": kernels.TILE // 128, "BLOCK_DIM": 128}
    code = ptx(kernels._row_delta, capability, types, block, ["dout", "out", "delta"])
    assert "ld.global.v4" in code or "ld.global.v2.b64" in code, "loads are not 16 bytes wide"
    types = {name: types[name] for name in ("dout", "delta", "out", "num_rows")}
    limits = {"LIMIT": torch.finfo(torch.bfloat16).max, "COMPONENTS": 3}
    code = ptx(kernels._surrogate_out, capability, types, limits | block, ["dout", "out", "delta"])
    assert "st.global.v4" in code or "st.global.v2.b64" in code, "stores are not 16 bytes wide"
    assert "st.local" not in code, "registers spill"


@pytest.mark.parametrize("capability", [90])
def test_kernels_compile_without_a_gpu(capability: int, tmp_path) -> None:
    values(run_processes(1, compile_for, capability, str(tmp_path), timeout_s=240))
