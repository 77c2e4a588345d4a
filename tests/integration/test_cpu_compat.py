# SPDX-License-Identifier: BSD-3-Clause
"""Stock torchtitan 0.2.2 on CPU ranks, with which every run with CAD is compared, and what makes it possible."""

import json
import subprocess
import sys

import pytest
import torch

from tests.lib.jobs.compositions import (
    DEFAULTS,
    FAST,
    PLACED,
    PROFILED,
    SLOW,
    TOLERANCE,
    global_batch,
)
from tests.lib.jobs.harness import read_scalars, run
from tests.lib.jobs.launched import TORCHRUN, launched
from tests.lib.refusals import check_refusal, refusal
from torchtitan_cad.integration import cpu as any_cpu
from torchtitan_cad.integration.torchtitan_v0_2 import cpu

EXPERTS = (
    "--model.name=qwen3",
    "--model.flavor=tiny_moe",
    "--parallelism.expert_parallel_degree=2",
)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "args",
    [
        (),
        (*DEFAULTS, *global_batch(8)),
        (*DEFAULTS, *EXPERTS, "--cad.nano_batches=2"),
    ],
    ids=["stock", "cad", "experts"],
)
def test_resumes_exactly(args, tmp_path):
    """A run resumed from a checkpoint repeats every bit of training, though the batch after it had been redistributed
    already, and though other plans would take the least time.

    Validation is only checked to run: torchtitan does not checkpoint its loader. The same two runs exercise TensorBoard
    and the profiler, to keep the short set short.
    """
    job = (
        *args,
        "--training.steps=4",
        "--checkpoint.enable",
        "--checkpoint.interval=2",
        "--validation.enable",
        "--validation.freq=2",
        "--validation.steps=2",
        "--metrics.enable_tensorboard",
        *PROFILED,
    )
    whole = run(job, timeout_s=240, dump_folder=tmp_path, link=FAST)
    # torchtitan also validates after the first step
    assert whole.validation_losses.keys() == {
        1,
        2,
        4,
    }
    scalars = read_scalars(tmp_path / "tb")
    for tag, expected in (
        ("loss_metrics/global_avg_loss", whole.losses),
        ("grad_norm", whole.grad_norms),
        ("validation_metrics/loss", [*whole.validation_losses.values()]),
    ):
        assert scalars[tag] == torch.tensor(expected, dtype=torch.float32).tolist()
    traces = list((tmp_path / "profile_traces").rglob("rank*_trace.json"))
    assert {trace.name for trace in traces} == {"rank0_trace.json", "rank1_trace.json"}
    assert json.loads(traces[0].read_text())["traceEvents"]

    resumed = run(
        [*job, "--checkpoint.load_step=2"],
        timeout_s=240,
        dump_folder=tmp_path,
        link=SLOW,
    )
    assert resumed.steps == [3, 4]
    assert resumed.losses == whole.losses[2:]
    assert resumed.grad_norms == whole.grad_norms[2:]
    assert resumed.validation_losses.keys() == {4}


@pytest.mark.matrix
@pytest.mark.parametrize(
    "switches",
    [("cad", "no-cad"), ("no-cad", "cad")],
    ids=["saved with", "saved without"],
)
def test_checkpoints_are_the_same_with_and_without_cad(switches, tmp_path):
    job = (
        *PLACED,
        *global_batch(8),
        "--training.steps=4",
        "--checkpoint.enable",
        "--checkpoint.interval=2",
    )
    others = ((), ("--checkpoint.load_step=2",))
    whole, resumed = (
        run([*job, f"--parallelism.{switch}", *args], dump_folder=tmp_path)
        for switch, args in zip(switches, others, strict=True)
    )
    assert resumed.steps == [3, 4]
    assert resumed.losses == pytest.approx(whole.losses[2:], rel=TOLERANCE)
    assert resumed.grad_norms == pytest.approx(whole.grad_norms[2:], rel=TOLERANCE)


@pytest.mark.matrix
def test_entry_point_under_torchrun_without_cad(tmp_path):
    with launched(
        ["--parallelism.no-cad", "--training.steps=2"], tmp_path, launcher=TORCHRUN
    ) as job:
        returncode, _ = job.finish(180)
    assert returncode == 0, "\n".join(job.lines)
    assert any("Training completed" in line for line in job.lines)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="has an accelerator")
def test_late_call_is_refused():
    """Once torchtitan has bound its device type it is too late; the message says what to do."""
    code = f"import torchtitan, {cpu.__name__} as cpu; cpu.enable_cpu()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    (*_, line) = done.stderr.splitlines()
    check_refusal(line, "enable_cpu()", remedy="torchtitan_cad.train")


@pytest.mark.parametrize(
    ("experts", "ranks", "alignment"), [(1, 1, 8), (3, 2, 8), (8, 4, 16), (2, 3, 32)]
)
def test_tokens_are_ordered_by_experts_into_aligned_slots(experts, ranks, alignment):
    rng = torch.Generator().manual_seed(experts)
    counts = torch.randint(0, 40, (ranks * experts,), generator=rng) * torch.randint(
        0, 2, (ranks * experts,), generator=rng
    )
    owners = [
        e
        for e, count in zip(list(range(experts)) * ranks, counts.tolist(), strict=True)
        for _ in range(count)
    ]
    expected: list[int] = []
    sizes = []
    for expert in range(experts):
        mine = [token for token, owner in enumerate(owners) if owner == expert]
        sizes.append(max(1, -(-len(mine) // alignment)) * alignment)
        expected += mine + [-1] * (sizes[-1] - len(mine))
    slots = len(expected) + alignment
    indices, got_sizes, ends = cpu._generate_permute_indices(
        counts, experts, ranks, slots, alignment
    )
    assert indices.tolist() == expected + [-1] * alignment
    assert got_sizes.tolist() == sizes
    assert ends.tolist() == [sum(sizes[: i + 1]) for i in range(experts)]
    assert {x.dtype for x in (indices, got_sizes, ends)} == {torch.int32}


def test_integers_are_counted():
    cpu.enable_cpu()
    values = torch.randint(0, 61, (4096,))
    counts = torch.histc(values, bins=61, min=0, max=61)
    assert counts.dtype == torch.int64
    assert torch.equal(counts, torch.bincount(values, minlength=61))
    floats = torch.rand(64)
    assert torch.histc(floats, bins=4).sum() == 64


def test_device_module_names_what_is_missing():
    device = any_cpu._CpuDeviceModule("cpu_device")
    assert device.current_device() == 0
    assert device.memory_stats()["active_bytes.all.peak"] > 0
    device.synchronize()  # from torch.cpu
    with refusal("torch.cpu", error=AttributeError):
        _ = device.memory
