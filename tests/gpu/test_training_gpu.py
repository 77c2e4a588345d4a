# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan trains two replicas on one CUDA device, which exchange rows over symmetric memory, as without CAD."""

import importlib.util
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.device import ON_GPU
from torchtitan_cad.cli import main as cli

pytestmark = [*ON_GPU, pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="no torchtitan")]

STEPS = 5
TRAIN_ON_GLOO = """import torch.distributed as dist, torchtitan_cad.train as train
dist.Backend.default_device_backend_map["cuda"] = "gloo"  # NCCL refuses ranks that share a device
train.start()"""
JOB = (
    *("--job.config_file=train_configs/llama3_debug_cpu.toml", "--model.flavor=debugmodel_varlen_attn"),
    *(f"--training.steps={STEPS}", "--training.seq_len=8192", "--training.mixed_precision_param=bfloat16"),
    *("--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=1"),
    "--optimizer.lr=1e-4",
)


def train(folder: Path, *options: str) -> list[str]:
    """Loss, norm of gradients and tasks moved, of every step: what the log says."""
    with socket.socket() as free:
        free.bind(("", 0))
        variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": free.getsockname()[1], "WORLD_SIZE": 2, "LOCAL_RANK": 0}
    variables |= {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": 1, "TORCH_SYMM_MEM_DISABLE_MULTICAST": 1}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **{key: str(x) for key, x in variables.items()}}
    files = f"--model.hf_assets_path={folder}", f"--job.dump_folder={folder}"
    command = [sys.executable, "-c", TRAIN_ON_GLOO, *JOB, *files, *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [subprocess.Popen(command, env={**env, "RANK": str(rank)}, **pipes) for rank in range(2)]
    log, _ = (rank.communicate(timeout=120)[0] for rank in ranks)
    return re.findall(r"(?:loss:|grad_norm:|moved) *([\d.]+)", re.sub(r"\x1b\[[\d;]*m", "", log))


def test_two_ranks_train_as_without_cad(tmp_path: Path) -> None:
    assert cli(["prepare", "--output", str(tmp_path)]) == 0
    stock = [float(x) for x in train(tmp_path, "--parallelism.no-cad")]
    cad = [float(x) for x in train(tmp_path, "--cad.transport=symm_mem", "--cad.tolerance=0.02")]
    assert (len(stock), len(cad)) == (2 * STEPS, 3 * STEPS)
    assert cad[::3] == pytest.approx(stock[::2], rel=0.01)  # in bf16, whose sums are taken in another order
    # Stock torchtitan divides gradients of replicas once too often (patches/ddp_gradient_scale.patch).
    assert cad[1::3] == pytest.approx([2 * norm for norm in stock[1::2]], rel=0.01)
    assert max(cad[2::3]) > 0
