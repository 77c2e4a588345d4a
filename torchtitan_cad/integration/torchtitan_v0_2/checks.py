# SPDX-License-Identifier: BSD-3-Clause
"""Checks of a job's config, made on every rank before anything is built, and what ``cad.streams = "auto"`` means."""

import torch
from torch.torch_version import TorchVersion
from torchtitan.config import JobConfig
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from torchtitan_cad.integration.choices import check_values
from torchtitan_cad.integration.config import Cad
from torchtitan_cad.integration.pingpong.segment_graph import FIRST_TORCH
from torchtitan_cad.integration.topology import TICK_SCHEDULES, Topology
from torchtitan_cad.integration.torchtitan_v0_2.blocks import (
    checkpointing,
    selects_operators,
)
from torchtitan_cad.integration.torchtitan_v0_2.job_checks import (
    check_job,
    compiles_model,
    launched_ranks,
)
from torchtitan_cad.integration.torchtitan_v0_2.models import ADAPTERS, adapter_of
from torchtitan_cad.integration.torchtitan_v0_2.rules import has_cad
from torchtitan_cad.planning.model.batch import divides_by_row

SUPPORTED_MODELS = tuple(ADAPTERS)


def validate(config: JobConfig, world_size: int | None = None) -> None:
    """Check everything of a config, with CAD or without, that can be known before process groups exist.

    ``world_size`` is by default the launcher's WORLD_SIZE; what depends on it is
    skipped if that is not set. Raises ValueError that names the TOML key, the value, and what to set instead.
    """
    if has_cad(config) and adapter_of(config.model.name) is None:
        raise ValueError(
            f"parallelism.cad = true is not supported with model.name = {config.model.name!r}: set it to one of "
            f"{', '.join(SUPPORTED_MODELS)} or a TrainSpec whose class derives from theirs and keeps its "
            "get_attention_masks, or parallelism.cad to false"
        )
    if world_size is None:
        world_size = launched_ranks(config)
    check_job(config, world_size)
    if has_cad(config):
        _check_cad(config, world_size)


def _check_cad(config: JobConfig, world_size: int | None) -> None:
    cad: Cad = config.cad
    check_values(cad)
    if cad.transport == "nvshmem" and config.parallelism.enable_async_tensor_parallel:
        raise ValueError(
            "cad.transport = 'nvshmem' does not go with parallelism.enable_async_tensor_parallel = true, as torch's "
            "symmetric memory has one backend in a process; set cad.transport to 'auto'"
        )
    cad.check_eos_id()
    checkpoints = config.activation_checkpoint
    if not cad.recompute_attention and (
        checkpoints.mode == "memory_budget"
        or (checkpoints.mode == "selective" and checkpoints.selective_ac_option != "op")
    ):
        raise ValueError(
            f"cad.recompute_attention = false does not go with activation_checkpoint.mode = {checkpoints.mode!r} and "
            f"selective_ac_option = {checkpoints.selective_ac_option!r}; set activation_checkpoint.mode to 'full'"
        )
    _check_streams(config)
    if world_size is not None:
        topology = Topology.from_job(config.parallelism, world_size)
        cad.check_groups(topology)
        _check_compiled_shards(config, topology)
    _check_untried(config)
    _check_ticks(config)
    _check_nano_batches(config)


def _check_untried(config: JobConfig) -> None:
    """Refuse what changes the model or the ranks in ways that no test with CAD has seen (docs/compatibility.md)."""
    if config.model.converters:
        raise ValueError(
            f"model.converters = {config.model.converters!r}: no test has tried CAD with converters, such as those of "
            "float8 and MX; leave model.converters out, or set parallelism.cad to false"
        )
    if config.fault_tolerance.enable:
        raise ValueError(
            "fault_tolerance.enable = true: the ranks of a CAD group serve each other and cannot come and go; set "
            "fault_tolerance.enable to false, or parallelism.cad to false"
        )


def _check_ticks(config: JobConfig) -> None:
    """Check what schedules in ticks cannot do. As in torchtitan, the schedule has no meaning without a pipeline."""
    parallelism = config.parallelism
    training = config.training
    validation = config.validation
    schedule = parallelism.pipeline_parallel_schedule
    pp = parallelism.pipeline_parallel_degree
    if schedule not in TICK_SCHEDULES or pp == 1:
        return
    selected = f"with parallelism.pipeline_parallel_schedule = {schedule!r}"
    if config.cad.shadow:
        raise ValueError(
            f"cad.shadow = true trains as torchtitan does, which is not possible {selected}; set the schedule to "
            "'1F1B', or cad.shadow to false"
        )
    if config.cad.backward == "keep":
        raise ValueError(
            f"cad.backward = 'keep' is not possible {selected}: backward meets other microbatches than forward did; "
            "set cad.backward to 'resend'"
        )
    if parallelism.pipeline_parallel_schedule_csv:
        raise ValueError(
            f"parallelism.pipeline_parallel_schedule_csv = {parallelism.pipeline_parallel_schedule_csv!r} has no "
            f"meaning {selected}; leave it out"
        )
    if config.activation_checkpoint.mode == "memory_budget":
        raise ValueError(
            f"activation_checkpoint.mode = 'memory_budget' is not available {selected}: ranks that serve must know "
            "which attention is recomputed; set activation_checkpoint.mode to 'full', 'selective' or 'none'"
        )
    microbatches = (
        training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    )
    if microbatches == 1:
        logger.warning(
            f"training.local_batch_size = {training.local_batch_size} is one microbatch, so the {pp} stages take turns "
            f"{selected}; set it to {2 * pp * parallelism.pipeline_parallel_microbatch_size} or more, or "
            "parallelism.pipeline_parallel_microbatch_size lower"
        )
    if schedule == "CADInterleaved1F1B" and microbatches % pp:
        raise ValueError(
            f"training.local_batch_size = {training.local_batch_size} makes {microbatches} microbatches, not a "
            f"multiple of parallelism.pipeline_parallel_degree = {pp}, {selected}; set it to a multiple of "
            f"{pp * parallelism.pipeline_parallel_microbatch_size}, or the schedule to 'CAD1F1B'"
        )
    if validation.enable:
        for key in ("local_batch_size", "seq_len"):
            if getattr(validation, key) != getattr(training, key):
                raise ValueError(
                    f"validation.{key} = {getattr(validation, key)} differs from training.{key} = "
                    f"{getattr(training, key)} {selected}; set validation.{key} to {getattr(training, key)}"
                )


def _check_nano_batches(config: JobConfig) -> None:
    """Under TP, ranks hold contiguous parts of every row, which cannot be halved in the middle without moving them."""
    parallelism = config.parallelism
    batch = config.training.local_batch_size
    if config.cad.nano_batches == 1 or parallelism.tensor_parallel_degree == 1:
        return
    rows = {"training.local_batch_size": batch}
    if parallelism.pipeline_parallel_degree > 1:
        rows = {
            "parallelism.pipeline_parallel_microbatch_size": parallelism.pipeline_parallel_microbatch_size
        }
    if config.validation.enable:
        microbatches = batch // parallelism.pipeline_parallel_microbatch_size
        parts = microbatches if parallelism.pipeline_parallel_degree > 1 else 1
        rows["validation.local_batch_size"] = (
            config.validation.local_batch_size // parts
        )
    for key, count in rows.items():
        if not divides_by_row(count):
            raise ValueError(
                f"cad.nano_batches = 2 with parallelism.tensor_parallel_degree = {parallelism.tensor_parallel_degree} "
                f"halves microbatches by rows, but {key} makes them {count} rows; "
                f"set {key} such that they are even, or cad.nano_batches to 1"
            )


def _check_compiled_shards(config: JobConfig, topology: Topology) -> None:
    """Refuse what torch 2.13 cannot compile where no ranks are left to shard over."""
    has_shards = topology.dp * topology.cp > 1
    if topology.tp == 1 or has_shards or not compiles_model(config):
        return
    if torch.__version__.startswith("2.13."):
        raise ValueError(
            f"compile.enable = true with parallelism.tensor_parallel_degree = {topology.tp} and no ranks to shard over "
            f"fails in backward with torch {torch.__version__}; set compile.enable to false"
        )


def _check_streams(config: JobConfig) -> None:
    """Raise ValueError for ``cad.streams = "traced"`` where it cannot be; names key, value and remedy."""
    if config.cad.streams != "traced":
        return
    if obstacle := _obstacle(config, utils.device_type):
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
