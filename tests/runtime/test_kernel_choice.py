# SPDX-License-Identifier: BSD-3-Clause
"""The kernel that ``cad.kernel = "auto"`` takes on CUDA, tried on the CPU: stand-ins compute, and times are made up."""

import dataclasses
import logging
import re
from collections.abc import Callable
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import varlen as stock

from tests.lib.fake_flash_attn import FAKES, NAMES, Recorder, install
from tests.lib.processes import run_processes, values
from tests.lib.refusals import refusal
from tests.lib.rows import SquareKernel
from tests.lib.sets import params
from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.planning.intervals import concat_ranges
from torchtitan_cad.runtime.kernels import VarlenArgs, flash_attn, get_kernel, select
from torchtitan_cad.runtime.kernels.cpu import CpuKernel

CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 16, 2)
FA2, FA3, FA4 = (
    f"flash_attn, FlashAttention-{generation} ({NAMES[generation]})"
    for generation in (2, 3, 4)
)


class StandIn(CpuKernel):
    """The CPU kernel under another name."""

    def __init__(self, name: str, *, squares_only: bool = False) -> None:
        self.name = name
        self.squares_only = squares_only


Times = dict[str, float]
"""Milliseconds by kernel."""


def fake_times(monkeypatch: pytest.MonkeyPatch) -> Times:
    """Times of trials, which compute on the CPU with as few rows as it takes; to be filled by tests."""
    milliseconds: Times = {}
    trial = select.Trial
    monkeypatch.setattr(select, "VarlenKernel", lambda: StandIn("varlen"))
    monkeypatch.setattr(
        select.cudnn, "CudnnKernel", lambda: StandIn("cudnn", squares_only=True)
    )
    monkeypatch.setattr(select, "LAYERS", 1)
    monkeypatch.setattr(
        select,
        "Trial",
        lambda trusted, device, shape: trial(trusted, CPU, shape, rows=640),
    )
    monkeypatch.setattr(
        trial, "_milliseconds", lambda _, kernel: milliseconds[str(kernel)]
    )
    return milliseconds


times = pytest.fixture(fake_times)


def modules(*generations: int) -> list[ModuleType]:
    return [FAKES[generation](Recorder()) for generation in generations]


def taken(caplog: pytest.LogCaptureFixture, shape: AttentionShape = SHAPE) -> str:
    """The kernel that is taken and logged."""
    with caplog.at_level(logging.INFO):
        return str(get_kernel("auto", "cuda", shape))


RESULTS = ("out", "lse", "dq", "dk", "dv")


def test_the_fastest_is_taken(monkeypatch, caplog, times):
    install(monkeypatch, *modules(3, 4), capability=(9, 0), with_cudnn=True)
    times.update({FA3: 1.9, FA4: 2.1, "cudnn": 1.7, "varlen": 3.5})
    assert taken(caplog) == "cudnn"
    assert "cad.kernel = 'auto': cudnn; " in caplog.text
    for name, duration in times.items():
        assert f"{name} {duration} ms" in caplog.text


def test_without_times_the_newest_that_is_right_is_taken(monkeypatch, caplog, times):
    """No trial is timed, as none has a time here."""
    install(monkeypatch, *modules(2, 3), capability=(9, 0), with_cudnn=True)
    with caplog.at_level(logging.INFO):
        assert str(get_kernel("auto", "cuda", SHAPE, timed=False)) == FA3
    said = f"varlen is right; {FA3} is right; {FA2} is right; cudnn is right"
    assert said in caplog.text

    def wrong(right):
        def spoiled(*args):
            out, lse = right(*args)
            return out * 1.2, lse

        return spoiled

    spoil_library(monkeypatch, "run", wrong)
    assert str(get_kernel("auto", "cuda", SHAPE, timed=False)) == "cudnn"


@pytest.mark.parametrize("name", params(RESULTS, ["lse", "dv"]))
def test_wrong_results_are_not_taken(monkeypatch, caplog, times, name):
    """Some elements of one are wrong."""
    install(monkeypatch, *modules(3))
    is_forward = name in ("out", "lse")
    index = RESULTS.index(name) - (0 if is_forward else 2)

    def spoil(right):
        def spoiled(*args):
            results = right(*args)
            results[index].view(-1)[-9:] *= 3
            return results

        return spoiled

    spoil_library(monkeypatch, "run" if is_forward else "run_backward", spoil)
    times.update({"varlen": 3.5})
    assert taken(caplog) == "varlen"
    assert f"{name} is off" in caplog.text
    said = f"cad.kernel = 'flash_attn' cannot .*{name} is off.* set cad.kernel = 'auto'"
    with pytest.raises(ValueError, match=said):
        get_kernel("flash_attn", "cuda", SHAPE)


def test_who_is_wrong_for_many_documents_is_not_taken(monkeypatch, caplog, times):
    install(monkeypatch, *modules(4), capability=(9, 0))

    def spoil(right):
        def spoiled(q, k, v, call):
            out, lse = right(q, k, v, call)
            return out * (1.2 if len(call.cu_q_host) > 257 else 1.0), lse

        return spoiled

    spoil_library(monkeypatch, "run", spoil)
    times.update({"varlen": 3.5})
    assert taken(caplog) == "varlen"
    assert "out is off" in caplog.text


def test_who_ignores_windows_is_not_taken(monkeypatch, caplog, times):
    install(monkeypatch, *modules(3))
    times.update({FA3: 1.0, "varlen": 3.5})
    windows = dataclasses.replace(SHAPE, window=40)
    assert taken(caplog, windows) == FA3
    monkeypatch.setattr(flash_attn, "_window", lambda call: {})
    assert taken(caplog) == FA3
    assert taken(caplog, windows) == "varlen"
    assert f"{FA3} is wrong: out is off" in caplog.text


class DSLRuntimeError(Exception):
    """Of a package's compiler."""


def test_what_fails_is_not_taken(monkeypatch, caplog, times):
    install(monkeypatch, *modules(3))
    failing = mock.Mock(side_effect=DSLRuntimeError("no kernel image is available"))
    spoil_library(monkeypatch, "run", lambda right: failing)
    times.update({"varlen": 3.5})
    assert taken(caplog) == "varlen"
    said = f"{FA3} failed: DSLRuntimeError: no kernel image is available; "
    assert said in caplog.text
    assert "FlashAttention-2, far below what a device" in caplog.text


def spoil_library(monkeypatch: pytest.MonkeyPatch, name: str, spoil: Callable) -> None:
    """Every package's forward or backward is what ``spoil`` makes of it."""
    find = select.find_kernels

    def find_spoiled(device):
        kernels, reasons = find(device)
        for kernel in kernels:
            setattr(kernel, name, spoil(getattr(kernel, name)))
        return kernels, reasons

    monkeypatch.setattr(select, "find_kernels", find_spoiled)


def test_a_mask_that_is_aligned_otherwise_is_wrong():
    """Whole documents do not show it, so a kernel that takes more is tried with more, and cuDNN's is not."""

    class TopLeft(CpuKernel):
        def forward(self, q, k, v, call):
            if call.causal:
                cu = call.cu_q_host
                starts = call.cu_k_host[:-1]
                first = concat_ranges(starts, np.diff(cu))
                k = k[first]
                v = v[first]
                call = VarlenArgs.from_numpy(cu, cu, causal=True, scale=call.scale)
            return super().forward(q, k, v, call)

    trial = select.Trial(CpuKernel(), CPU, SHAPE, rows=640)
    assert "causal = True" in str(trial.outcome(TopLeft(), timed=False))
    assert trial.outcome(SquareKernel(), timed=False) == 0.0


@pytest.mark.parametrize(
    ("capability", "remark"),
    [
        ((9, 0), "slower than stock .* flash-attn-4 or FlashAttention-3"),
        ((10, 0), r"capability 10\.0 can do.* install flash-attn-4 and"),
        ((12, 0), "^None"),
    ],
)
def test_flash_attention_2_on_a_device_for_more(monkeypatch, capability, remark):
    install(monkeypatch, capability=capability, with_cudnn=True)
    device = torch.device("cuda")
    said = select.slower_than_possible(select.VarlenKernel(), device)
    assert re.search(remark, str(said))
    assert select.slower_than_possible(StandIn("cudnn"), device) is None


def test_kernels_that_are_set(monkeypatch, times):
    """The newest package that is right, and cuDNN where it can be used."""
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


def choose(group: dist.ProcessGroup) -> list[str]:
    """What a rank takes and why, where ranks have other packages and times; and why it cannot take what is set."""
    rank = group.rank()
    with pytest.MonkeyPatch.context() as monkeypatch:
        times = fake_times(monkeypatch)
        # FlashAttention-3 is fastest on one rank only, and FlashAttention-2 is not everywhere
        packages = modules(2, 3) if rank == 0 else modules(3)
        install(monkeypatch, *packages, capability=(9, 0), with_cudnn=True)
        times.update({FA2: 0.1, "varlen": 4.0})
        times.update({FA3: (1.0, 3.0)[rank], "cudnn": (2.0, 1.5)[rank]})
        kernel, reason = select.choose_kernel("auto", "cuda", SHAPE, group)
        if rank == 1:
            failing = mock.Mock(side_effect=RuntimeError("no kernel image"))
            spoil_library(monkeypatch, "run", lambda right: failing)
        with pytest.raises(ValueError, match="rank 1") as refused:
            get_kernel("flash_attn", "cuda", SHAPE, group=group)
    return [str(kernel), reason, str(refused.value)]


def test_all_ranks_take_and_refuse_the_same():
    not_everywhere = f"{FA2} cannot be used (rank 1)"
    for chosen, reason, refused in values(run_processes(2, choose)):
        assert chosen == "cudnn"
        said = f"cudnn 2.0 ms; {not_everywhere}; {FA3} 3.0 ms; varlen 4.0 ms"
        assert said in reason
        said = (
            f"cad.kernel = 'flash_attn' cannot be used: {not_everywhere}; {FA3} failed"
        )
        assert said in refused
        assert "no kernel image (rank 1); varlen is right" in refused
