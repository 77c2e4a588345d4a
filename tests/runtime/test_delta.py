"""The Triton kernels for delta and for the statistics of a backward: interpreted beside torch, and compiled."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from tests.runtime.interpreter import interpret
from tests.runtime.processes import run_processes, values
from tests.runtime.statistics import COMPONENTS, prepare_statistics
from tests.sets import needs_triton
from torchtitan_cad.runtime.kernels.base import compute_dtype, row_delta

pytestmark = needs_triton

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SHAPES = [(37, 3, 128), (9, 2, 96), (5, 1, 64), (3, 2, 5), (1, 1, 256), (0, 2, 8)]


def interpret_and_compare(group) -> None:
    interpret()
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

        delta = kernels.row_delta(dout.to(device), out.to(device), accumulator)
        wanted = row_delta(dout, out)
        assert torch.all((delta.cpu() - exact).abs() <= 2 * (wanted - exact).abs() + roundings)

        if dtype.itemsize > 2:
            continue
        lse = torch.randn(out.shape[:-1], dtype=accumulator)
        lse[torch.rand(lse.shape) < 0.2] = -torch.inf
        arguments = [x.to(device) for x in (dout, lse, wanted)]
        surrogate, lse_out = kernels.prepare_statistics(*arguments, empty_lse=torch.inf)
        surrogate = surrogate.cpu()
        assert ((surrogate != 0).sum(-1) <= COMPONENTS).all()
        wanted_surrogate, wanted_lse = prepare_statistics(dout, lse, wanted, empty_lse=torch.inf)
        assert torch.equal(lse_out.cpu(), wanted_lse)
        mine, theirs = (((dout.double() * x.double()).sum(-1) - wanted).abs() for x in (surrogate, wanted_surrogate))
        assert torch.all(mine <= 2 * theirs + roundings)
        if len(dout) > 30:
            check_against_rounded_out(kernels.prepare_statistics, dout[1:-1].to(device))


def check_against_rounded_out(prepare: Callable[..., tuple[Tensor, Tensor]], dout: Tensor) -> None:
    """The surrogate gives the delta of an unrounded out, where the home rank can only send that of its rounded out."""
    out = torch.randn(dout.shape, dtype=torch.float64).to(dout.device)
    exact, rounded = ((dout.double() * x.double()).sum(-1) for x in (out, out.to(dout.dtype)))
    delta = exact.to(compute_dtype(dout.dtype))
    surrogate, _ = prepare(dout.contiguous(), torch.zeros_like(delta), delta, empty_lse=torch.inf)
    got = (dout.double() * surrogate.double()).sum(-1)
    assert (got - exact).abs().max() < 0.01 * (rounded - exact).abs().max()


def test_interpreted_kernels_compute_what_torch_does() -> None:
    values(run_processes(1, interpret_and_compare))
