# SPDX-License-Identifier: BSD-3-Clause
"""Checks of a job's config, made on every rank before anything is built, and what ``cad.streams = "auto"`` means."""

import math
import os

import torch
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from torch.torch_version import TorchVersion
from torchtitan.config import JobConfig
from torchtitan.tools.logging import logger

from torchtitan_cad.integration.config import Cad
from torchtitan_cad.integration.pingpong.turn import FIRST_TORCH
from torchtitan_cad.integration.titan022.blocks import checkpointing, selects_operators
from torchtitan_cad.integration.titan022.models import ADAPTERS, adapter_of
from torchtitan_cad.integration.topology import TICK_SCHEDULES, Topology
from torchtitan_cad.planning.model.batch import halves_by_row
from torchtitan_cad.runtime.kernels.select import KERNELS
from torchtitan_cad.runtime.transport.build import TRANSPORTS

SUPPORTED_MODELS = tuple(ADAPTERS)
_SPLIT_BACKWARD = (ScheduleDualPipeV, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble)
"""Schedules that compute gradients of inputs and of weights apart from each other."""


def validate(config: JobConfig, world_size: int | None = None) -> None:
    """Check everything that can be known before process groups exist, of a config with ``parallelism.cad`` on.

    ``world_size`` is by default the launcher's WORLD_SIZE, or the NGPU of torchtitan's dry runs; what depends on it is
    skipped if that is not set. Raises ValueError that names the TOML key, the value, and what to set instead.
    """
    cad: Cad = config.cad
    if adapter_of(config.model.name) is None:
        raise ValueError(
            f"parallelism.cad = true is not supported with model.name = {config.model.name!r}: set it to one of "
            f"{', '.join(SUPPORTED_MODELS)} or a TrainSpec whose class derives from theirs, or parallelism.cad to false"
        )
    cad.planner_config()
    cad.read_profile()
    _ = cad.buffer_bytes
    _one_of("cad.transport", cad.transport, TRANSPORTS)
    if cad.transport == "nvshmem" and config.parallelism.enable_async_tensor_parallel:
        raise ValueError(
            "cad.transport = 'nvshmem' does not go with parallelism.enable_async_tensor_parallel = true, as torch's "
            "symmetric memory has one backend in a process; set cad.transport to 'auto'"
        )
    _one_of("cad.kernel", cad.kernel, KERNELS)
    _one_of("cad.backward", cad.backward, ("resend", "keep"))
    _one_of("cad.placement", cad.placement, ("auto", "balanced", "loader"))
    _one_of("cad.documents", cad.documents, ("eos", "row", "positions"))
    cad.check_eos_id()
    _one_of("cad.nano_batches", cad.nano_batches, (1, 2))
    _one_of("cad.streams", cad.streams, ("auto", "traced", "opaque"))
    checkpoints = config.activation_checkpoint
    if not cad.recompute_attention and (
        checkpoints.mode == "memory_budget"
        or (checkpoints.mode == "selective" and checkpoints.selective_ac_option != "op")
    ):
        raise ValueError(
            f"cad.recompute_attention = false does not go with activation_checkpoint.mode = {checkpoints.mode!r} and "
            f"selective_ac_option = {checkpoints.selective_ac_option!r}; set activation_checkpoint.mode to 'full'"
        )
    if not 0 < cad.heartbeat_seconds < math.inf:
        raise ValueError(f"cad.heartbeat_seconds = {cad.heartbeat_seconds}: set a positive number, such as 1.0")
    if world_size is None:
        world_size = launched_ranks(config)
    for key, degree in _degrees(config).items():
        _check_positive(f"parallelism.{key}", degree)
    if world_size is not None:
        _check_world_size(config, world_size)
        _check_groups(cad, Topology.from_job(config.parallelism, world_size))
        _check_unsharded(config, world_size)
    _check_untried(config)
    _check_batch(config)
    _check_sequences(config)
    _check_pipeline(config)
    _check_ticks(config)
    _check_nano_batches(config)
    _check_streams(config)


def _check_untried(config: JobConfig) -> None:
    """Refuse what changes the model or the ranks in ways that no test with CAD has seen (docs/models.md)."""
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


def launched_ranks(config: JobConfig) -> int | None:
    """Return the launcher's number of ranks, or that of the job that a dry run plays; None if it is not set."""
    if config.comm.mode == "default":
        ranks = os.environ.get("WORLD_SIZE", "")
        return int(ranks) if ranks else None
    ranks = os.environ.get("NGPU", "")
    if not ranks.isdecimal():
        raise ValueError(
            f"comm.mode = {config.comm.mode!r} plays one rank of a larger job: set the environment variable NGPU "
            f"(it is {ranks!r}) to its number of ranks, or comm.mode to 'default'"
        )
    return int(ranks)


def _one_of(key: str, value: object, allowed: tuple) -> None:
    if value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(f"{key} = {value!r}: set {key} to one of: {choices}")


def _check_positive(key: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{key} = {value}: set a positive integer")


def _check_batch(config: JobConfig) -> None:
    training = config.training
    _check_positive("training.local_batch_size", training.local_batch_size)
    if training.global_batch_size > 0 and training.global_batch_size % training.local_batch_size:
        raise ValueError(
            f"training.global_batch_size = {training.global_batch_size} is not a multiple of "
            f"training.local_batch_size = {training.local_batch_size}; "
            "set it to a multiple of that times the data-parallel degree, or to -1"
        )


def _check_sequences(config: JobConfig) -> None:
    parallelism, training, validation = config.parallelism, config.training, config.validation
    divisor = parallelism.tensor_parallel_degree * 2 * parallelism.context_parallel_degree
    sections = {"training": training} | ({"validation": validation} if validation.enable else {})
    for name, section in sections.items():
        if section.seq_len % divisor:
            raise ValueError(
                f"{name}.seq_len = {section.seq_len} is not divisible by tensor_parallel_degree x 2 x "
                f"context_parallel_degree = {divisor}; set {name}.seq_len to {-(-section.seq_len // divisor) * divisor}"
            )
    if validation.enable and validation.seq_len > training.seq_len:
        raise ValueError(
            f"validation.seq_len = {validation.seq_len} is more than training.seq_len = {training.seq_len}, the "
            f"positions that the model is built for; set validation.seq_len to {training.seq_len} or less"
        )


def _check_pipeline(config: JobConfig) -> None:
    parallelism, batch = config.parallelism, config.training.local_batch_size
    pp, microbatch = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_microbatch_size
    _check_positive("parallelism.pipeline_parallel_microbatch_size", microbatch)
    if pp == 1:
        return
    if config.comm.mode != "default":  # torchtitan's own dry runs end with an error inside torch
        raise ValueError(
            f"parallelism.pipeline_parallel_degree = {pp}: comm.mode = {config.comm.mode!r} cannot play a pipeline, "
            "whose stages ask each other for shapes; set parallelism.pipeline_parallel_degree to 1"
        )
    if not parallelism.pipeline_parallel_schedule_csv:
        _check_schedule(config)
    if batch % microbatch:
        raise ValueError(
            f"training.local_batch_size = {batch} is not divisible by parallelism.pipeline_parallel_microbatch_size = "
            f"{microbatch}; set the latter to a divisor of {batch}"
        )
    rows, microbatches = config.validation.local_batch_size, batch // microbatch
    if config.validation.enable and rows % microbatches:
        raise ValueError(
            f"validation.local_batch_size = {rows} does not split into the pipeline's {microbatches} microbatches; "
            f"set it to a multiple of {microbatches}"
        )


def _check_schedule(config: JobConfig) -> None:
    parallelism = config.parallelism
    schedule = parallelism.pipeline_parallel_schedule
    if schedule in TICK_SCHEDULES:
        return
    selected = f"parallelism.pipeline_parallel_schedule = {schedule!r}"
    try:
        schedule_class = get_schedule_class(schedule)
    except ValueError as error:
        ours = " or ".join(map(repr, TICK_SCHEDULES))
        raise ValueError(f"{selected}: set it to {ours}, or to one of torch's ({error})") from None
    if schedule_class is ScheduleDualPipeV and parallelism.pipeline_parallel_expert_parallel_overlap:
        raise ValueError(
            f"parallelism.pipeline_parallel_expert_parallel_overlap = true runs forward and backward of {selected} in "
            "two threads, whose exchanges would mix; set pipeline_parallel_expert_parallel_overlap to false, or the "
            "schedule to another"
        )
    if schedule_class in _SPLIT_BACKWARD:
        _check_split_backward(config, selected)
    # In both, two consecutive stages share a rank, and torch's eval() asks the later one for gradients.
    if config.validation.enable and schedule_class in (ScheduleDualPipeV, ScheduleZBVZeroBubble):
        raise ValueError(
            f"validation.enable = true: {selected} of torch cannot run forward alone; set validation.enable to false, "
            "or the schedule to another"
        )


def _check_split_backward(config: JobConfig, selected: str) -> None:
    """Refuse what torch cannot run with gradients of inputs and of weights computed apart from each other."""
    apart = f"{selected} computes gradients of inputs and of weights apart, which torch cannot do"
    if _compiles_model(config):
        raise ValueError(
            f"{apart} with compile.enable = true; set compile.enable to false, or the schedule to 'Interleaved1F1B'"
        )
    if selects_operators(checkpointing(config)):
        by_mode = config.activation_checkpoint.mode == "selective"
        kept = "activation_checkpoint.selective_ac_option = 'op'" if by_mode else "cad.recompute_attention = false"
        raise ValueError(
            f"{apart} with {kept}; set activation_checkpoint.mode to 'full' and cad.recompute_attention to true, or "
            "the schedule to 'Interleaved1F1B'"
        )


def _check_ticks(config: JobConfig) -> None:
    """Check what schedules in ticks cannot do. As in torchtitan, the schedule has no meaning without a pipeline."""
    parallelism, training, validation = config.parallelism, config.training, config.validation
    schedule, pp = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree
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
    microbatches = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
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
    parallelism, batch = config.parallelism, config.training.local_batch_size
    if config.cad.nano_batches == 1 or parallelism.tensor_parallel_degree == 1:
        return
    rows = {"training.local_batch_size": batch}
    if parallelism.pipeline_parallel_degree > 1:
        rows = {"parallelism.pipeline_parallel_microbatch_size": parallelism.pipeline_parallel_microbatch_size}
    if config.validation.enable:
        microbatches = batch // parallelism.pipeline_parallel_microbatch_size
        parts = microbatches if parallelism.pipeline_parallel_degree > 1 else 1
        rows["validation.local_batch_size"] = config.validation.local_batch_size // parts
    for key, count in rows.items():
        if not halves_by_row(count):
            raise ValueError(
                f"cad.nano_batches = 2 with parallelism.tensor_parallel_degree = {parallelism.tensor_parallel_degree} "
                f"halves microbatches by rows, but {key} makes them {count} rows; "
                f"set {key} such that they are even, or cad.nano_batches to 1"
            )


def _degrees(config: JobConfig) -> dict[str, int]:
    parallelism = config.parallelism
    return {
        "data_parallel_replicate_degree": parallelism.data_parallel_replicate_degree,
        "context_parallel_degree": parallelism.context_parallel_degree,
        "tensor_parallel_degree": parallelism.tensor_parallel_degree,
        "pipeline_parallel_degree": parallelism.pipeline_parallel_degree,
    }


def _check_world_size(config: JobConfig, world_size: int) -> None:
    degrees, shard = _degrees(config), config.parallelism.data_parallel_shard_degree
    product = math.prod(degrees.values())
    if world_size % product or (shard > 0 and product * shard != world_size):
        listed = ", ".join(f"parallelism.{key} = {degree}" for key, degree in degrees.items())
        raise ValueError(
            f"{listed}, parallelism.data_parallel_shard_degree = {shard} do not multiply to the {world_size} ranks of "
            "this job; set parallelism.data_parallel_shard_degree to -1 and the others to divisors of the rank count"
        )


def _check_unsharded(config: JobConfig, world_size: int) -> None:
    """Refuse what fails without FSDP, which torchtitan uses where ranks are left to shard over."""
    degrees, parallelism = _degrees(config), config.parallelism
    if world_size > math.prod(degrees.values()) or parallelism.context_parallel_degree > 1:
        return
    tp, replicas = parallelism.tensor_parallel_degree, parallelism.data_parallel_replicate_degree
    others = [key for key in ("tensor_parallel_degree", "pipeline_parallel_degree") if degrees[key] > 1]
    if replicas > 1 and others:
        raise ValueError(
            f"parallelism.data_parallel_replicate_degree = {replicas} without shards is DDP, which torchtitan does not "
            f"combine with parallelism.{others[0]} = {degrees[others[0]]}; set "
            "parallelism.data_parallel_replicate_degree to 1, so that parameters are sharded instead"
        )
    whole_blocks = _compiles_model(config) and config.cad.nano_batches == 1
    if tp > 1 and whole_blocks and torch.__version__.startswith("2.13."):
        raise ValueError(
            f"compile.enable = true with parallelism.tensor_parallel_degree = {tp} and no ranks to shard over fails in "
            f"backward with torch {torch.__version__}; set compile.enable to false or cad.nano_batches to 2"
        )


def _compiles_model(config: JobConfig) -> bool:
    return config.compile.enable and "model" in config.compile.components


def _check_groups(cad: Cad, topology: Topology) -> None:
    cad.planner_config(topology)
    stages = f"pipeline parallel {topology.pp} x " if topology.across_stages else ""
    if cad.rank_speeds is not None and len(cad.rank_speeds) != topology.group_size:
        raise ValueError(
            f"cad.rank_speeds has {len(cad.rank_speeds)} entries for CAD groups of {topology.group_size} ranks "
            f"({stages}data parallel {topology.dp} x context parallel {topology.cp}): set one per rank, or leave it out"
        )


def _check_streams(config: JobConfig) -> None:
    """Raise ValueError for ``cad.streams = "traced"`` where it cannot be; names key, value and remedy."""
    if config.cad.streams == "traced" and (obstacle := _obstacle(config)) is not None:
        raise ValueError(f"cad.streams = 'traced' {obstacle}, or cad.streams to 'auto'")


def choose_streams(config: JobConfig, device: torch.device, experts: bool) -> tuple[bool, str]:
    """Tell whether to trace streams, and why; ``experts``: whether the model has any."""
    streams = config.cad.streams
    if streams != "auto":
        return streams == "traced", f"cad.streams = {streams!r}"
    if experts:
        return False, "cad.streams = 'auto': experts cannot be traced"
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
