# SPDX-License-Identifier: BSD-3-Clause
"""The kernel that ``cad.kernel = "auto"`` takes on CUDA, with stand-ins for packages and devices."""

import logging
import re
from types import ModuleType

import pytest
import torch
from torch.nn.attention import varlen as stock

from tests.lib.fake_flash_attn import NAMES, Recorder, install, make_fake
from tests.lib.processes import run_processes, values
from tests.lib.refusals import refusal
from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.runtime.kernels import select
from torchtitan_cad.runtime.kernels.cpu import CpuKernel
from torchtitan_cad.runtime.kernels.select import get_kernel

SHAPE = AttentionShape(4, 2, 64, 2)
FA2, FA3, FA4 = (
    f"flash_attn, FlashAttention-{generation} ({NAMES[generation]})"
    for generation in (2, 3, 4)
)


def modules(*generations: int) -> list[ModuleType]:
    return [make_fake(generation, Recorder()) for generation in generations]


OTHER_SHAPES = {
    "window": AttentionShape(4, 2, 64, 2, window=40),
    "small heads": AttentionShape(4, 2, 16, 2),
}


@pytest.mark.parametrize(
    "case",
    [
        "234, cudnn, 9.0, , 4",
        "234, cudnn, 11.0, , 4",
        "23, cudnn, 9.0, , 3",
        "23, cudnn, 10.0, , cudnn",
        "2, cudnn, 9.0, , cudnn",
        "2, cudnn, 9.0, window, 2",
        "2, , 9.0, , 2",
        "234, , 8.6, , 2",
        "234, , 12.0, , 2",
        "34, , 9.0, small heads, 3",
        ", , 9.0, , varlen",
    ],
)
def test_the_first_that_can_run_is_taken(monkeypatch, caplog, case):
    """Generations of packages, whether cuDNN is there, the device's capability, shape; and what is taken."""
    generations, has_cudnn, capability, shape, wanted = case.split(", ")
    packages = modules(*map(int, generations))
    version = tuple(map(int, capability.split(".")))
    install(monkeypatch, *packages, capability=version, with_cudnn=bool(has_cudnn))
    title = {"2": FA2, "3": FA3, "4": FA4}.get(wanted, wanted)
    with caplog.at_level(logging.INFO):
        kernel = get_kernel("auto", "cuda", OTHER_SHAPES.get(shape, SHAPE))
    assert str(kernel) == title
    assert f"cad.kernel = 'auto': {title}; " in caplog.text


def test_a_kernel_that_fails_is_left_out(monkeypatch):
    """As one whose compiler, or whose backward, cannot serve this device."""
    install(monkeypatch, *modules(3, 4), capability=(9, 0))

    def launch(kernel, *_):
        if str(kernel) == FA4:
            raise AssertionError("not on this device")

    monkeypatch.setattr(select, "_launch", launch)
    kernel, reason = select.choose_kernel("auto", "cuda", SHAPE)
    assert str(kernel) == FA3
    assert "flash_attn failed: AssertionError: not on this device" in reason


@pytest.mark.parametrize(
    ("capability", "remark"),
    [
        ((9, 0), "flash-attn-4 or FlashAttention-3"),
        ((10, 0), r"capability 10\.0 can do.* install flash-attn-4 and"),
        ((12, 0), "^None"),
    ],
)
def test_flash_attention_2_on_a_device_for_more(monkeypatch, capability, remark):
    install(monkeypatch, *modules(2), capability=capability)
    device = torch.device("cuda")
    for name in ("varlen", "flash_attn"):
        kernel = get_kernel(name, device, SHAPE)
        said = select.slower_than_possible(kernel, device)
        assert re.search(remark, str(said))
    assert select.slower_than_possible(CpuKernel(), device) is None


def test_kernels_that_are_set(monkeypatch):
    """The newest package, and cuDNN where it can be used."""
    install(monkeypatch, *modules(2, 3, 4), capability=(9, 0), with_cudnn=True)
    assert str(get_kernel("flash_attn", "cuda", SHAPE)) == FA4
    assert get_kernel("cudnn", "cuda", SHAPE).squares_only
    install(monkeypatch, capability=(8, 0))
    for name in ("flash_attn", "cudnn"):
        with refusal("cad.kernel", name, remedy="cad.kernel"):
            get_kernel(name, "cuda", SHAPE)
    monkeypatch.delattr(stock, "_CUDNN_ATTENTION_BACKEND")
    with refusal("cad.kernel", "cudnn", remedy="cad.kernel"):
        get_kernel("cudnn", "cuda", SHAPE)


def choose(group) -> list[str]:
    """What a rank takes and why, where ranks have other packages; and why it cannot take what is set."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        packages = modules(2, 4) if group.rank() == 0 else modules(3)
        install(monkeypatch, *packages, capability=(9, 0), with_cudnn=True)
        kernel, reason = select.choose_kernel("auto", "cuda", SHAPE, group)
        with pytest.raises(ValueError, match="on rank ") as refused:
            get_kernel("flash_attn", "cuda", SHAPE, group=group)
    return [str(kernel), reason, str(refused.value)]


def test_all_ranks_take_and_refuse_the_same():
    first, second = values(run_processes(2, choose))
    assert first[0] == second[0] == "cudnn"
    for text in first[1:]:
        assert f"{FA4} cannot be used on rank 1" in text
    for text in second[1:]:
        assert f"{FA3} cannot be used on rank 0" in text
