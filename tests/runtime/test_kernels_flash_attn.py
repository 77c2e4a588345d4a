"""The flash_attn kernel on the CPU: stand-ins with the interfaces of FlashAttention-2, 3 and 4 replace the packages."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.accuracy import assert_as_exact
from tests.runtime.fake_flash_attn import CAPABILITIES, FAKES, Recorder, install
from tests.runtime.kernels_reference import (
    SPLIT_CALLS,
    check_marshalling,
    dense_backward,
    dense_in_fp64,
    random_qkv,
)
from torchtitan_cad.runtime.kernels import VarlenArgs, get_kernel
from torchtitan_cad.runtime.kernels.base import Merged, row_delta
from torchtitan_cad.runtime.kernels.cpu import CpuKernel
from torchtitan_cad.runtime.kernels.flash_attn import FlashAttnKernel

GENERATIONS = pytest.mark.parametrize("generation", FAKES)


def make_kernel(monkeypatch: pytest.MonkeyPatch, generation: int) -> tuple[FlashAttnKernel, Recorder]:
    seen = Recorder()
    install(monkeypatch, FAKES[generation](seen), capability=CAPABILITIES[generation])
    kernel = get_kernel("flash_attn", "cuda")
    assert isinstance(kernel, FlashAttnKernel)
    assert kernel.library.generation == generation
    return kernel, seen


@GENERATIONS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("len_q", "len_k", "causal"), SPLIT_CALLS)
def test_marshalling(monkeypatch, generation: int, len_q, len_k, causal: bool, dtype: torch.dtype) -> None:
    kernel, seen = make_kernel(monkeypatch, generation)
    check_marshalling(kernel, len_q, len_k, causal, dtype)
    assert set(seen.max_q) | set(seen.max_k) <= {512}  # the same for all short calls, so that nothing is compiled anew


@GENERATIONS
def test_bounds_of_long_tasks(monkeypatch, generation: int) -> None:
    kernel, seen = make_kernel(monkeypatch, generation)
    call = VarlenArgs.from_numpy([0, 3, 5], [0, 700, 1400], causal=False, scale=0.2)
    q, k, v, _ = random_qkv(5, 1400, (2, 1), 8, torch.bfloat16)
    kernel.forward(q, k, v, call)
    assert (seen.max_q, seen.max_k) == ([512], [700])


@GENERATIONS
def test_backward_takes_merged_statistics(monkeypatch, generation: int) -> None:
    """Keys of a document in two tasks: each backward gets the merged lse and delta, and gradients add up."""
    kernel, _ = make_kernel(monkeypatch, generation)
    q, k, v, dout = random_qkv(64, 192, (4, 2), 16, torch.bfloat16)
    whole = VarlenArgs.from_numpy([0, 64], [0, 192], causal=True, scale=0.25)
    out, lse = CpuKernel().forward(q, k, v, whole)
    delta = row_delta(dout, out)
    front = VarlenArgs.from_numpy([0, 64], [0, 100], causal=False, scale=0.25)
    back = VarlenArgs.from_numpy([0, 64], [0, 92], causal=True, scale=0.25)
    parts = (slice(0, 100), front), (slice(100, 192), back)

    def add_up(backward: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        dq, dk, dv = zip(*(backward(keys, part) for keys, part in parts), strict=True)
        return dq[0].float() + dq[1].float(), torch.cat(dk), torch.cat(dv)

    def in_fp32(keys: slice, part: VarlenArgs) -> tuple[Tensor, ...]:
        rows = (x.float() for x in (q, k[keys], v[keys], dout))
        return tuple(x.bfloat16() for x in dense_backward(*rows, lse, delta, part))

    got = add_up(lambda keys, part: kernel.backward(dout, q, k[keys], v[keys], Merged(lse, delta), part))
    references = dense_in_fp64(q, k, v, dout, whole)[2:]
    for grad, other, reference in zip(got, add_up(in_fp32), references, strict=True):
        assert_as_exact(grad, other, reference)


@GENERATIONS
def test_determinism_is_passed_on(monkeypatch, generation: int) -> None:
    kernel, seen = make_kernel(monkeypatch, generation)
    call = VarlenArgs.from_numpy([0, 4], [0, 4], causal=True, scale=1.0)
    q, k, v, dout = random_qkv(4, 4, (1, 1), 8, torch.bfloat16)
    statistics = torch.zeros(4, 1)
    for wanted in (False, True):
        torch.use_deterministic_algorithms(wanted)
        try:
            kernel.backward(dout, q, k, v, Merged(statistics, statistics), call)
        finally:
            torch.use_deterministic_algorithms(False)
    assert seen.deterministic == [False, True]


@GENERATIONS
@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 64), (torch.bfloat16, 20), (torch.float16, 264)])
def test_unsupported_inputs_are_refused(monkeypatch, generation: int, dtype: torch.dtype, dim: int) -> None:
    kernel, _ = make_kernel(monkeypatch, generation)
    call = VarlenArgs.from_numpy([0, 3], [0, 3], causal=True, scale=1.0)
    q, k, v, dout = random_qkv(3, 3, (1, 1), dim, dtype)
    message = rf"cad\.kernel = 'flash_attn' \(FlashAttention-{generation} .*(float32.*bfloat16|got {dim}; .*varlen)"
    with pytest.raises(ValueError, match=message):
        kernel.forward(q, k, v, call)
    with pytest.raises(ValueError, match=message):
        kernel.backward(dout, q, k, v, Merged(torch.zeros(3, 1), torch.zeros(3, 1)), call)


# Which one is taken ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "generation"), [((8, 0), 2), ((8, 6), 2), ((9, 0), 3), ((10, 0), 4), ((11, 0), 4), ((12, 0), 2)]
)
def test_the_package_fits_the_device(monkeypatch, capability: tuple[int, int], generation: int) -> None:
    install(monkeypatch, *(fake(Recorder()) for fake in FAKES.values()), capability=capability)
    kernel = get_kernel("flash_attn", "cuda")
    assert isinstance(kernel, FlashAttnKernel)
    assert kernel.library.generation == generation
    assert f"FlashAttention-{generation}" in str(kernel)


def test_missing_packages_are_named(monkeypatch) -> None:
    install(monkeypatch)
    with pytest.raises(
        ValueError,
        match=r"cad\.kernel = 'flash_attn' needs .*flash_attention_4: import of flash_attn.*install .*'varlen'",
    ):
        get_kernel("flash_attn", "cuda")


def test_a_package_for_other_devices_is_named(monkeypatch) -> None:
    install(monkeypatch, FAKES[3](Recorder()), capability=(10, 0))
    with pytest.raises(ValueError, match=r"FlashAttention-3 .* not made for compute capability 10\.0.*'varlen'"):
        get_kernel("flash_attn", "cuda")


def test_other_versions_of_a_package_are_not_called(monkeypatch) -> None:
    module = FAKES[2](Recorder())

    def older(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal): ...

    module._flash_attn_varlen_forward = older
    install(monkeypatch, module)
    with pytest.raises(ValueError, match=r"_flash_attn_varlen_forward of another version is needed"):
        get_kernel("flash_attn", "cuda")
