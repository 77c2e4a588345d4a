"""``cad.streams``: whether the exchanges of two nano-batches are part of the compiled graphs."""

import torch
from torch.torch_version import TorchVersion
from torchtitan.config import JobConfig

from torchtitan_cad.integration.pingpong.turn import FIRST_TORCH
from torchtitan_cad.integration.titan022.blocks import checkpointing, selects_operators


def check_streams(config: JobConfig) -> None:
    """Raise ValueError for ``cad.streams = "traced"`` where it cannot be; names key, value and remedy."""
    if config.cad.streams == "traced" and (obstacle := _obstacle(config)) is not None:
        raise ValueError(f"cad.streams = 'traced' {obstacle}, or cad.streams to 'auto'")


def choose_streams(config: JobConfig, device: torch.device) -> tuple[bool, str]:
    """Tell whether to trace streams, and why."""
    streams = config.cad.streams
    if streams != "auto":
        return streams == "traced", f"cad.streams = {streams!r}"
    if (obstacle := _obstacle(config)) is not None:
        return False, f"cad.streams = 'auto': 'traced' {obstacle}"
    if device.type != "cpu":
        return False, "cad.streams = 'auto': 'traced' has not run on GPUs yet"
    return True, "cad.streams = 'auto': nothing stands in the way"


def _obstacle(config: JobConfig) -> str | None:
    """Return what ``traced`` needs and does not have, and what to set."""
    compiler, checkpoints, parallelism = config.compile, config.activation_checkpoint, config.parallelism
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
            f"{parallelism.tensor_parallel_degree}, whose collectives run elsewhere; set that"
        )
    if checkpoints.mode != "none" and not selects_operators(checkpointing(config)):
        return (
            f"cannot recompute exchanges, as activation_checkpoint.mode = {checkpoints.mode!r} may (with "
            f"selective_ac_option = {checkpoints.selective_ac_option!r}); set the mode to 'none', to 'selective' "
            "with selective_ac_option = 'op', or to 'full' with cad.recompute_attention = false"
        )
    if parallelism.pipeline_parallel_degree > 1 and parallelism.pipeline_parallel_schedule_csv:
        return (
            "cannot run backward in two parts, as parallelism.pipeline_parallel_schedule_csv = "
            f"{parallelism.pipeline_parallel_schedule_csv!r} may; leave that out"
        )
    if TorchVersion(torch.__version__) < FIRST_TORCH:
        return f"needs torch {FIRST_TORCH} or newer, not {torch.__version__}; install that"
    return None
