"""The varlen kernel's marshalling, on the CPU: stand-ins that behave like FlashAttention-2 replace its raw ops."""

import pytest
import torch
from torch import Tensor

from tests.accuracy import assert_as_exact
from tests.runtime import statistics
from tests.runtime.kernels_reference import SPLIT_CALLS, check_marshalling, random_qkv
from torchtitan_cad.runtime.kernels import VarlenArgs
from torchtitan_cad.runtime.kernels import varlen as varlen_module
from torchtitan_cad.runtime.kernels.base import Merged, row_delta
from torchtitan_cad.runtime.kernels.cpu import CpuKernel
from torchtitan_cad.runtime.kernels.varlen import VarlenKernel


class FakeFlashAttention:
    """Raw ops with the signatures, layouts and conventions of torch's FlashAttention-2.

    LSE is [Hq, Tq] with +inf for rows without keys; the backward derives delta from ``out``.
    """

    def __init__(self, op: torch._ops.OpOverload, has_num_splits: bool = False) -> None:
        self._schema = op._schema
        self.names = [a.name for a in op._schema.arguments]
        self.has_num_splits = has_num_splits
        self.seen: dict[str, object] = {}

    def _bind(self, args: tuple, kwargs: dict) -> dict:
        assert set(kwargs) <= set(self.names)
        self.seen = dict(zip(self.names, args, strict=False)) | kwargs
        for name in ("query", "key", "value", "logsumexp", "grad_out", "out"):
            assert name not in self.seen or self.seen[name].is_contiguous()
        return self.seen

    def _call(self, a: dict) -> VarlenArgs:
        assert a["cum_seq_q"].dtype == a["cum_seq_k"].dtype == torch.int32
        assert a["dropout_p"] == 0.0
        assert a["max_q"] >= int(a["cum_seq_q"].diff().max())
        assert a["max_k"] == int(a["cum_seq_k"].diff().max())
        assert (a["window_size_left"], a["window_size_right"]) == (-1, 0 if a["is_causal"] else -1)
        return VarlenArgs.from_numpy(
            a["cum_seq_q"].numpy(), a["cum_seq_k"].numpy(), causal=a["is_causal"], scale=a["scale"]
        )


class FakeForward(FakeFlashAttention):
    def __call__(self, *args, **kwargs) -> tuple[Tensor, ...]:
        a = self._bind(args, kwargs)
        out, lse = CpuKernel().forward(a["query"], a["key"], a["value"], self._call(a))
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        return out, lse.t().contiguous(), torch.empty(0), torch.empty(0), torch.empty(0)


class FakeBackward(FakeFlashAttention):
    def __call__(self, *args, **kwargs) -> tuple[Tensor, ...]:
        a = self._bind(args, kwargs)
        assert a["logsumexp"].shape == (a["query"].shape[1], a["query"].shape[0])
        assert not torch.isneginf(a["logsumexp"]).any()
        lse = a["logsumexp"].masked_fill(a["logsumexp"] == torch.inf, -torch.inf).t()
        delta = row_delta(a["grad_out"], a["out"])
        grads = CpuKernel().backward(a["grad_out"], a["query"], a["key"], a["value"], Merged(lse, delta), self._call(a))
        return tuple(g.to(a["query"].dtype) for g in grads)


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeForward, FakeBackward]:
    forward = FakeForward(torch.ops.aten._flash_attention_forward.default)
    backward = FakeBackward(torch.ops.aten._flash_attention_backward.default)
    monkeypatch.setattr(varlen_module, "_forward_op", forward)
    monkeypatch.setattr(varlen_module, "_backward_op", backward)
    statistics.use_torch(monkeypatch)
    return forward, backward


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("len_q", "len_k", "causal"), SPLIT_CALLS)
def test_marshalling(ops: tuple[FakeForward, FakeBackward], len_q, len_k, causal: bool, dtype: torch.dtype) -> None:
    check_marshalling(VarlenKernel(), len_q, len_k, causal, dtype)
    if ops[0].seen:
        assert ops[0].seen.get("num_splits") == (1 if "num_splits" in ops[0].names else None)


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 64), (torch.bfloat16, 20), (torch.bfloat16, 264)])
def test_unsupported_inputs_are_refused(dtype: torch.dtype, dim: int) -> None:
    call = VarlenArgs.from_numpy([0, 3], [0, 3], causal=True, scale=1.0)
    q, k, v, dout = random_qkv(3, 3, (1, 1), dim, dtype)
    with pytest.raises(ValueError, match=r"cad\.kernel = 'varlen'"):
        VarlenKernel().forward(q, k, v, call)
    with pytest.raises(ValueError, match=r"cad\.kernel = 'varlen'"):
        VarlenKernel().backward(dout, q, k, v, Merged(torch.zeros(3, 1), torch.zeros(3, 1)), call)


# The surrogate of out -------------------------------------------------------------------------------------------------


def surrogate_out(dout: Tensor, delta: Tensor) -> Tensor:
    return statistics.prepare_statistics(dout, torch.zeros_like(delta), delta, empty_lse=torch.inf)[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [8, 64, 128])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_surrogate_out_errs_less_than_the_rounded_out(dtype: torch.dtype, dim: int, scale: float) -> None:
    """``exact`` is the delta of an unrounded out; the surrogate's errs like a sum in fp32.

    The home rank can only send the one of its rounded out.
    """
    generator = torch.Generator().manual_seed(dim)
    dout = (torch.randn(500, 4, dim, generator=generator) * scale).to(dtype)
    out = torch.randn(500, 4, dim, generator=generator, dtype=torch.float64)
    exact, rounded = (dout.double() * out).sum(-1), (dout.double() * out.to(dtype).double()).sum(-1)
    surrogate = surrogate_out(dout, exact.float())
    assert surrogate.dtype == dtype
    got = (dout.double() * surrogate.double()).sum(-1)
    terms = dout.float() * out.float()
    scale = terms.double().abs().sum(-1)
    assert_as_exact((got / scale).float(), (terms.sum(-1) / scale).float(), exact / scale)
    if dtype != torch.float32:
        assert (got - exact).abs().max() < 0.01 * (rounded - exact).abs().max()
