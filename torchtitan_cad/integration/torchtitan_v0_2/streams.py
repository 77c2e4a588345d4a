# SPDX-License-Identifier: BSD-3-Clause
"""How two nano-batches run: what ``cad.streams = "auto"`` means, and what "traced" needs."""

import torch
from torch.torch_version import TorchVersion
from torchtitan.config import JobConfig
from torchtitan.tools import utils

from torchtitan_cad.integration.pingpong.segment_graph import FIRST_TORCH
from torchtitan_cad.integration.topology import TICK_SCHEDULES
from torchtitan_cad.integration.torchtitan_v0_2.blocks import (
    checkpointing,
    selects_operators,
)


def check_streams(config: JobConfig) -> None:
    """Raise ValueError for ``cad.streams = "traced"`` where it cannot be; names key, value and remedy."""
    if config.cad.streams != "traced":
        return
    obstacle = _obstacle(config, utils.device_type)
    if obstacle is not None:
        raise ValueError(f"cad.streams = 'traced' {obstacle}, or cad.streams to 'auto'")


def choose_streams(
    config: JobConfig, device: torch.device, experts: bool
) -> tuple[bool, str]:
    """Tell whether to trace streams, and why; ``experts``: whether the model has any."""
    streams = config.cad.streams
    if streams != "auto":
        return streams == "traced", f"cad.streams = {streams!r}"
    if experts:
        return False, "cad.streams = 'auto': experts cannot be traced"
    if (obstacle := _obstacle(config, device.type)) is not None:
        return False, f"cad.streams = 'auto': 'traced' {obstacle}"
    if device.type != "cpu":
        return False, "cad.streams = 'auto': 'traced' has not run on GPUs yet"
    return True, "cad.streams = 'auto': nothing stands in the way"


def _obstacle(config: JobConfig, device_type: str) -> str | None:
    """Return what ``traced`` needs and does not have, and what to set."""
    compiler = config.compile
    checkpoints = config.activation_checkpoint
    parallelism = config.parallelism
    if config.cad.nano_batches != 2:
        return f"needs cad.nano_batches = 2, not {config.cad.nano_batches}; set that"
    if not compiler.enable:
        return "needs compile.enable = true, not false; set that"
    if "model" not in compiler.components:
        return f"needs 'model' in compile.components = {compiler.components}; add that"
    if compiler.backend != "inductor":
        return f"needs compile.backend = 'inductor', not {compiler.backend!r}; set that"
    if parallelism.tensor_parallel_degree > 1:
        return (
            "needs parallelism.tensor_parallel_degree = 1, not "
            f"{parallelism.tensor_parallel_degree}, with which it was never tried; set that"
        )
    if checkpoints.mode != "none" and not selects_operators(checkpointing(config)):
        return (
            f"cannot recompute exchanges, as activation_checkpoint.mode = {checkpoints.mode!r} may (with "
            f"selective_ac_option = {checkpoints.selective_ac_option!r}); set the mode to 'none', to 'selective' "
            "with selective_ac_option = 'op', or to 'full' with cad.recompute_attention = false"
        )
    if (
        parallelism.pipeline_parallel_degree > 1
        and parallelism.pipeline_parallel_schedule_csv
    ):
        return (
            "cannot run backward in two parts, as parallelism.pipeline_parallel_schedule_csv = "
            f"{parallelism.pipeline_parallel_schedule_csv!r} may; leave that out"
        )
    if (
        parallelism.pipeline_parallel_degree > 1
        and parallelism.pipeline_parallel_schedule in TICK_SCHEDULES
        and device_type != "cpu"
    ):
        return (
            "starts exchanges in another order than schedules in ticks do on a device: "
            f"parallelism.pipeline_parallel_schedule = {parallelism.pipeline_parallel_schedule!r}; set that to '1F1B'"
        )
    if TorchVersion(torch.__version__) < FIRST_TORCH:
        return (
            f"needs torch {FIRST_TORCH} or newer, not {torch.__version__}; install that"
        )
    return None
