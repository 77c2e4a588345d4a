"""Stock torchtitan 0.2.2, without any CAD code, trains on CPU ranks: the baseline every CAD run is compared with."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.integration.compositions import CAD, TOLERANCE
from tests.integration.harness import REPOSITORY, RunResult, run, tokenizer_folder
from torchtitan_cad.integration.titan022 import cpu

TP2 = "--parallelism.tensor_parallel_degree=2"
PP2 = "--parallelism.pipeline_parallel_degree=2"
SDPA = "--model.flavor=tiny_sdpa"  # varlen under PP needs patches/varlen_pipeline.patch


def train(*args: str, nranks: int = 2, **options: Path) -> RunResult:
    result = run(args, nranks, timeout_s=240, **options)
    assert result.ok, result.report()
    return result


@pytest.mark.matrix
def test_parallelisms_agree() -> None:
    """TP computes what one rank computes, in losses and gradient norms; PP does in losses."""
    one_rank, tensor_parallel, pipeline = train(SDPA, nranks=1), train(SDPA, TP2), train(SDPA, PP2)
    assert one_rank.losses[-1] < one_rank.losses[0] < 10
    assert tensor_parallel.losses == pytest.approx(one_rank.losses, rel=TOLERANCE)
    assert tensor_parallel.grad_norms == pytest.approx(one_rank.grad_norms, rel=TOLERANCE)
    # Gradient norms under PP: see patches/pp_gradient_scale.patch. Clipping hides the factor from the losses.
    assert pipeline.losses == pytest.approx(one_rank.losses, rel=TOLERANCE)


@pytest.mark.parametrize("args", [pytest.param((), marks=pytest.mark.matrix), CAD], ids=["stock", "cad"])
def test_resumes_exactly(args: tuple[str, ...], tmp_path: Path) -> None:
    """A run resumed from a checkpoint repeats every bit of training.

    Validation is only checked to run: torchtitan neither rewinds nor checkpoints its loader, so what a validation reads
    depends on how many the process has done. The same two runs exercise TensorBoard and the profiler, to keep the
    short set short.
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
        "--profiling.enable_profiling",
        "--profiling.profile_freq=2",
        "--profiling.profiler_warmup=0",
        "--profiling.profiler_active=1",
    )
    whole = train(*job, dump_folder=tmp_path)
    assert whole.validation_losses.keys() == {1, 2, 4}  # torchtitan also validates after the first step
    assert_tensorboard_matches(tmp_path / "tb", whole)
    traces = list((tmp_path / "profile_traces").rglob("rank*_trace.json"))
    assert {trace.name for trace in traces} == {"rank0_trace.json", "rank1_trace.json"}
    assert json.loads(traces[0].read_text())["traceEvents"]

    resumed = train(*job, "--checkpoint.load_step=2", dump_folder=tmp_path)
    assert resumed.steps == [3, 4]
    assert resumed.losses == whole.losses[2:]
    assert resumed.grad_norms == whole.grad_norms[2:]
    assert resumed.validation_losses.keys() == {4}


def assert_tensorboard_matches(folder: Path, result: RunResult) -> None:
    (events,) = folder.rglob("events.out.tfevents.*")
    accumulator = EventAccumulator(str(events)).Reload()
    for tag, expected in [
        ("loss_metrics/global_avg_loss", result.losses),
        ("grad_norm", result.grad_norms),
        ("validation_metrics/loss", list(result.validation_losses.values())),
    ]:
        logged = [event.value for event in accumulator.Scalars(tag)]
        assert logged == torch.tensor(expected, dtype=torch.float32).tolist()


@pytest.mark.matrix
def test_entry_point_under_torchrun(tmp_path: Path) -> None:
    """`torchrun -m torchtitan_cad.train` trains torchtitan's debug model on a local dataset, no test code involved."""
    (tmp_path / "c4_test").mkdir()
    (tmp_path / "c4_test" / "data.json").write_text(
        "\n".join(json.dumps({"text": "core attention " * n}) for n in range(64))
    )
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
        *("-m", "torchtitan_cad.train", "--model.name=llama3", "--model.flavor=debugmodel"),
        *("--training.dataset=c4_test", f"--training.dataset_path={tmp_path / 'c4_test'}"),
        *("--training.steps=2", "--training.seq_len=128", "--training.local_batch_size=1", "--metrics.log_freq=1"),
        *(f"--model.hf_assets_path={tokenizer_folder()}", f"--job.dump_folder={tmp_path / 'dump'}"),
    ]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env["HF_HOME"] = str(tmp_path / "hf")
    finished = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    output = finished.stdout + finished.stderr
    assert finished.returncode == 0, output
    assert "Training completed" in output


def test_late_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once torchtitan has bound its device type it is too late; the message says what to do."""
    monkeypatch.setattr(cpu, "_enabled", False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "torchtitan", ModuleType("torchtitan"))
    with pytest.raises(RuntimeError, match=r"python -m torchtitan_cad\.train"):
        cpu.enable_cpu()


def test_accelerator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_enabled", False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    profiler_init = torch.profiler.profile.__init__
    assert cpu.enable_cpu() is False
    assert torch.profiler.profile.__init__ is profiler_init


def test_device_module_names_what_is_missing() -> None:
    device = cpu._CpuDeviceModule("cpu_device")
    assert device.current_device() == 0
    assert device.memory_stats()["active_bytes.all.peak"] > 0
    device.synchronize()  # from torch.cpu
    with pytest.raises(AttributeError, match="needs an accelerator"):
        _ = device.memory
