# SPDX-License-Identifier: BSD-3-Clause
"""Kernels that call a library, on the CPU: stand-ins with the interfaces of FlashAttention-2, 3 and 4 and of cuDNN."""

import pytest
import torch

from tests.lib.accuracy import assert_as_exact
from tests.lib.fake_flash_attn import (
    CAPABILITIES,
    NAMES,
    Recorder,
    fake_cudnn,
    fake_operator,
    install,
    make_fake,
    use_torch,
)
from tests.lib.kernels_reference import (
    attend,
    check_marshalling,
    dense_in_fp64,
    random_qkv,
)
from tests.lib.refusals import refusal
from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.runtime.kernels import cudnn, varlen
from torchtitan_cad.runtime.kernels.base import (
    Merged,
    VarlenArgs,
    row_delta,
    subtract_lse_gradient,
)
from torchtitan_cad.runtime.kernels.cpu import CpuKernel
from torchtitan_cad.runtime.kernels.fused import FusedKernel
from torchtitan_cad.runtime.kernels.select import get_kernel

KERNELS = ["varlen", "cudnn", *NAMES]
"""The numbers are the generations of FlashAttention's own packages."""
CALLS = [
    ([300, 1, 40], [300, 1, 40], True),
    ([130, 9], [257, 5], False),
    ([3, 2], [700, 700], False),
]
"""(query lengths, key lengths, causal)."""
NOT_OF_CUDNN: list[tuple[list[int], list[int], bool]] = [
    ([130, 1], [300, 1], True),
    ([40, 9], [7, 9], True),  # rows without keys in a causal task
    ([130, 20], [257, 0], False),  # a task without keys
]


def make_kernel(monkeypatch, name: str | int) -> tuple[FusedKernel, Recorder]:
    seen = Recorder()
    use_torch(monkeypatch)
    if name == "cudnn":
        monkeypatch.setattr(torch.ops, "torch_attn", fake_cudnn(seen))
        install(monkeypatch, with_cudnn=True)
        return cudnn.CudnnKernel(torch.device("cuda")), seen
    if name == "varlen":
        for op in ("_forward_op", "_backward_op"):
            monkeypatch.setattr(varlen, op, fake_operator(getattr(varlen, op), seen))
        return varlen.VarlenKernel(), seen
    install(monkeypatch, make_fake(name, seen), capability=CAPABILITIES[name])
    kernel = get_kernel("flash_attn", "cuda")
    assert kernel.library.generation == name
    return kernel, seen


@pytest.mark.parametrize(
    ("name", "call"),
    [
        (name, call)
        for name in KERNELS
        for call in (CALLS if name == "cudnn" else [*CALLS, *NOT_OF_CUDNN])
    ],
)
def test_marshalling(monkeypatch, name, call):
    kernel, seen = make_kernel(monkeypatch, name)
    check_marshalling(kernel, *call, torch.bfloat16)
    if name == "cudnn":
        assert min(seen.max_q + seen.max_k) >= 256
        assert all(seen.same_offsets) or not call[2]
    elif name != "varlen":
        # the same for all short calls, so that nothing is compiled anew
        assert {*seen.max_q, *seen.max_k} <= {512, 700}


@pytest.mark.parametrize("name", KERNELS)
def test_windows(monkeypatch, name):
    kernel, _ = make_kernel(monkeypatch, name)
    lengths = [300, 1, 40], [363, 40, 40]
    if not kernel.squares_only:
        check_marshalling(kernel, *lengths, True, torch.bfloat16, window=64)
        return
    with refusal(remedy="cad.kernel"):
        kernel.check(torch.bfloat16, AttentionShape(4, 2, 64, 2, window=64))
    with refusal("cad.kernel"):
        check_marshalling(kernel, *lengths, True, torch.bfloat16)


def test_a_log_sum_exp_has_a_gradient_where_the_output_has_none(monkeypatch):
    """Libraries take delta as a product with dout."""
    kernel, _ = make_kernel(monkeypatch, "varlen")
    call = VarlenArgs.from_numpy([0, 200], [0, 200], causal=True, scale=0.2)
    q, k, v, dout = random_qkv(200, 200, (4, 2), 32, torch.float16)
    dout[::2] = 0
    dlse = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    out, lse = kernel.forward(q, k, v, call)
    delta = row_delta(dout, out)
    moved, moved_delta = subtract_lse_gradient(dout, delta, dlse)
    grads = kernel.backward(moved, q, k, v, Merged(lse, moved_delta), call)
    exact = CpuKernel().backward(dout, q, k, v, Merged(lse, delta - dlse), call)
    references = dense_in_fp64(q, k, v, dout, call, dlse)[2:]
    for grad, other, reference in zip(grads, exact, references, strict=True):
        assert_as_exact(grad, other.half(), reference)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dims", [(24, 16), (16, 24), (192, 128)])
def test_heads_are_padded_where_the_library_takes_one_size(monkeypatch, name, dims):
    kernel, seen = make_kernel(monkeypatch, name)
    common = max(dims)
    if kernel.max_head_dim < common and name != 4:
        shape = AttentionShape(4, 2, dims[0], 2, value_dim=dims[1])
        with refusal("cad.kernel", "cudnn", remedy="cad.kernel"):
            kernel.check(torch.bfloat16, shape)
        return
    check_marshalling(kernel, *CALLS[0], torch.bfloat16, dims)
    if name in (3, 4) and dims == (192, 128):
        assert seen.dims == {dims}
    else:
        assert seen.dims == {(common, common)}


DETERMINISTIC = "are_deterministic_algorithms_enabled"


@pytest.mark.parametrize("generation", NAMES)
def test_determinism_is_passed_on(monkeypatch, generation):
    kernel, seen = make_kernel(monkeypatch, generation)
    call = VarlenArgs.from_numpy([0, 4], [0, 4], causal=True, scale=1.0)
    for wanted in (False, True):
        monkeypatch.setattr(torch, DETERMINISTIC, lambda answer=wanted: answer)
        attend(kernel, *random_qkv(4, 4, (1, 1), 8, torch.bfloat16), call)
    assert seen.deterministic == [False, True]


def test_cudnn_sums_in_any_order(monkeypatch):
    kernel, _ = make_kernel(monkeypatch, "cudnn")
    monkeypatch.setattr(torch, DETERMINISTIC, lambda: True)
    with refusal(remedy="cad.kernel"):
        kernel.check(torch.bfloat16, AttentionShape(4, 2, 64, 2))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("dtype", "dim"),
    [
        (torch.float32, 64),
        (torch.bfloat16, 20),
        (torch.float16, 264),
    ],
)
def test_unsupported_inputs_are_refused(monkeypatch, name, dtype, dim):
    kernel, _ = make_kernel(monkeypatch, name)
    with refusal("cad.kernel", kernel.name):
        kernel.check(dtype, AttentionShape(1, 1, dim, 2))


# Which one is taken ---------------------------------------------------------------------------------------------------


def test_packages_that_cannot_be_called_are_named(monkeypatch):
    """None, one for other devices, and one of another version."""
    older = make_fake(3, Recorder())
    del older._flash_attn_backward
    for modules, capability in (
        ([], (9, 0)),
        ([make_fake(3, Recorder())], (10, 0)),
        ([older], (9, 0)),
    ):
        install(monkeypatch, *modules, capability=capability)
        with refusal("cad.kernel", remedy="cad.kernel"):
            get_kernel("flash_attn", "cuda")
