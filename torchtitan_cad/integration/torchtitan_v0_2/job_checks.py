# SPDX-License-Identifier: BSD-3-Clause
"""What keys of a job must be together for torchtitan to run it, with CAD or without; ``rules`` has every key's own."""

import math
import os

from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from torchtitan.config import JobConfig

from torchtitan_cad.integration.topology import (
    TICK_SCHEDULES,
    Topology,
    check_degrees,
    degrees_of,
)
from torchtitan_cad.integration.torchtitan_v0_2.blocks import (
    checkpointing,
    selects_operators,
)
from torchtitan_cad.integration.torchtitan_v0_2.rules import check_rules, has_cad
from torchtitan_cad.integration.torchtitan_v0_2.stages import V_SCHEDULES
from torchtitan_cad.planning.model.layout import MAX_TOKENS

_SPLIT_BACKWARD = (
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
"""Schedules that compute gradients of inputs and of weights apart from each other."""


def check_job(config: JobConfig, world_size: int | None) -> None:
    """Check what can be known of any job before process groups exist.

    ``world_size`` None: ranks are not known yet, and what depends on them is skipped. Raises ValueError that names the
    TOML key, the value, and what to set instead.
    """
    check_rules(config)
    if world_size is not None:
        check_degrees(config.parallelism, world_size)
        _check_unsharded(config, world_size)
    _check_batch(config, world_size)
    _check_sequences(config)
    _check_rate(config)
    _check_experts(config)
    _check_compiled(config)
    _check_profiling(config)
    _check_optimizer(config)
    _check_seed_checkpoint(config, world_size)
    _check_pipeline(config)


def launched_ranks(config: JobConfig) -> int | None:
    """Return the launcher's number of ranks; None if it is not set, or a dry run plays a job of another number."""
    ranks = os.environ.get("WORLD_SIZE", "")
    return int(ranks) if ranks and config.comm.mode == "default" else None


def _check_unsharded(config: JobConfig, world_size: int) -> None:
    """Refuse what fails without FSDP, which torchtitan uses where ranks are left to shard over."""
    parallelism = config.parallelism
    degrees = degrees_of(parallelism)
    if (
        world_size > math.prod(degrees.values())
        or parallelism.context_parallel_degree > 1
    ):
        return
    replicas = parallelism.data_parallel_replicate_degree
    others = [
        key
        for key in ("tensor_parallel_degree", "pipeline_parallel_degree")
        if degrees[key] > 1
    ]
    if replicas > 1 and others:
        raise ValueError(
            f"parallelism.data_parallel_replicate_degree = {replicas} without shards is DDP, which torchtitan does not "
            f"combine with parallelism.{others[0]} = {degrees[others[0]]}; set "
            "parallelism.data_parallel_replicate_degree to 1, so that parameters are sharded instead"
        )


def _check_batch(config: JobConfig, world_size: int | None) -> None:
    training = config.training
    parallelism = config.parallelism
    rows = training.global_batch_size
    batch = training.local_batch_size
    dp = Topology.from_job(parallelism, world_size).dp if world_size is not None else 1
    if rows > 0 and rows % (batch * dp):
        times = f" x the data-parallel degree {dp}" if dp > 1 else ""
        raise ValueError(
            f"training.global_batch_size = {rows} is not a multiple of training.local_batch_size = {batch}{times}; "
            f"set it to a multiple of {batch * dp}, or to -1 for one such batch"
        )


def _check_sequences(config: JobConfig) -> None:
    parallelism = config.parallelism
    training = config.training
    validation = config.validation
    divisor = (
        parallelism.tensor_parallel_degree * 2 * parallelism.context_parallel_degree
    )
    sections = {"training": training} | (
        {"validation": validation} if validation.enable else {}
    )
    for name, section in sections.items():
        if section.seq_len % divisor:
            raise ValueError(
                f"{name}.seq_len = {section.seq_len} is not divisible by tensor_parallel_degree x 2 x "
                f"context_parallel_degree = {divisor}; set {name}.seq_len to {-(-section.seq_len // divisor) * divisor}"
            )
        batch_tokens = section.local_batch_size * section.seq_len
        if batch_tokens > MAX_TOKENS:
            raise ValueError(
                f"{name}.local_batch_size = {section.local_batch_size} rows of {name}.seq_len = {section.seq_len} are "
                f"{batch_tokens} tokens; set either lower, so that there are at most {MAX_TOKENS}"
            )
    if validation.enable and validation.seq_len > training.seq_len:
        raise ValueError(
            f"validation.seq_len = {validation.seq_len} is more than training.seq_len = {training.seq_len}, the "
            f"positions that the model is built for; set validation.seq_len to {training.seq_len} or less"
        )


def _check_pipeline(config: JobConfig) -> None:
    parallelism = config.parallelism
    batch = config.training.local_batch_size
    pp = parallelism.pipeline_parallel_degree
    microbatch = parallelism.pipeline_parallel_microbatch_size
    if pp == 1:
        return
    if not parallelism.pipeline_parallel_schedule_csv:
        _check_schedule(config)
    if batch % microbatch:
        raise ValueError(
            f"training.local_batch_size = {batch} is not divisible by parallelism.pipeline_parallel_microbatch_size = "
            f"{microbatch}; set the latter to a divisor of {batch}"
        )
    rows = config.validation.local_batch_size
    microbatches = batch // microbatch
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
        names = " or ".join(map(repr, TICK_SCHEDULES))
        raise ValueError(
            f"{selected}: set it to {names}, or to one of torch's ({error})"
        ) from None
    overlaps = parallelism.pipeline_parallel_expert_parallel_overlap
    if has_cad(config) and schedule_class is ScheduleDualPipeV and overlaps:
        raise ValueError(
            f"parallelism.pipeline_parallel_expert_parallel_overlap = true runs forward and backward of {selected} in "
            "two threads, whose exchanges would mix; set pipeline_parallel_expert_parallel_overlap to false, or the "
            "schedule to another"
        )
    if schedule_class in _SPLIT_BACKWARD:
        _check_split_backward(config, selected)
    # In both, two consecutive stages share a rank, and torch's eval() asks the later one for gradients.
    if config.validation.enable and schedule_class in V_SCHEDULES:
        raise ValueError(
            f"validation.enable = true: {selected} of torch cannot run forward alone; set validation.enable to false, "
            "or the schedule to another"
        )


def _check_split_backward(config: JobConfig, selected: str) -> None:
    """Refuse what torch cannot run with gradients of inputs and of weights computed apart from each other."""
    apart = f"{selected} computes gradients of inputs and of weights apart, which torch cannot do"
    if compiles_model(config):
        raise ValueError(
            f"{apart} with compile.enable = true; set compile.enable to false, or the schedule to 'Interleaved1F1B'"
        )
    section = checkpointing(config) if has_cad(config) else config.activation_checkpoint
    if selects_operators(section):
        by_mode = config.activation_checkpoint.mode == "selective"
        kept = (
            "activation_checkpoint.selective_ac_option = 'op'"
            if by_mode
            else "cad.recompute_attention = false"
        )
        raise ValueError(
            f"{apart} with {kept}; set activation_checkpoint.mode to 'full' and cad.recompute_attention to true, or "
            "the schedule to 'Interleaved1F1B'"
        )


def compiles_model(config: JobConfig) -> bool:
    """Tell whether blocks of the model are compiled."""
    return config.compile.enable and "model" in config.compile.components


def _check_compiled(config: JobConfig) -> None:
    """Refuse what torchtitan can do with a compiled model alone."""
    if compiles_model(config):
        return
    remedy = "set compile.enable to true, with 'model' in compile.components"
    if config.activation_checkpoint.mode == "memory_budget":
        raise ValueError(
            f"activation_checkpoint.mode = 'memory_budget' is what the compiler does: {remedy}, or the mode to 'full'"
        )
    parallelism = config.parallelism
    if (
        parallelism.enable_async_tensor_parallel
        and parallelism.tensor_parallel_degree > 1
    ):
        raise ValueError(
            f"parallelism.enable_async_tensor_parallel = true: {remedy}, or it to false"
        )


def _check_rate(config: JobConfig) -> None:
    """Refuse a schedule of learning rates that ends before training does: rates would go on below their least."""
    total = config.lr_scheduler.total_steps
    steps = config.training.steps
    if total is not None and total < steps:
        raise ValueError(
            f"lr_scheduler.total_steps = {total} is less than training.steps = {steps}; set it to {steps} or more, or "
            "leave it out"
        )


def _check_experts(config: JobConfig) -> None:
    """Check degrees of experts as torchtitan's ``ParallelDims`` does, whether the model has experts or not."""
    parallelism = config.parallelism
    tp = parallelism.tensor_parallel_degree
    etp = parallelism.expert_tensor_parallel_degree
    if parallelism.expert_parallel_degree > 1 and etp not in (1, tp):
        raise ValueError(
            f"parallelism.expert_tensor_parallel_degree = {etp}: set it to 1, or to "
            f"parallelism.tensor_parallel_degree = {tp}"
        )


def _check_profiling(config: JobConfig) -> None:
    section = config.profiling
    profiled = section.profiler_warmup + section.profiler_active
    if section.enable_profiling and section.profile_freq < profiled:
        raise ValueError(
            f"profiling.profile_freq = {section.profile_freq} is less than profiler_warmup + profiler_active = "
            f"{profiled}; set it to {profiled} or more"
        )


def _check_optimizer(config: JobConfig) -> None:
    """Refuse what torchtitan does not combine with optimizers that step in backward."""
    if not config.optimizer.early_step_in_backward:
        return
    for key in ("pipeline_parallel_degree", "expert_parallel_degree"):
        degree = getattr(config.parallelism, key)
        if degree > 1:
            raise ValueError(
                f"optimizer.early_step_in_backward = true does not go with parallelism.{key} = {degree}; set the "
                "former to false"
            )


def _check_seed_checkpoint(config: JobConfig, world_size: int | None) -> None:
    checkpoint = config.checkpoint
    if not checkpoint.create_seed_checkpoint:
        return
    if not checkpoint.enable:
        raise ValueError(
            "checkpoint.create_seed_checkpoint = true saves nothing without checkpoint.enable = true"
        )
    if world_size not in (None, 1):
        raise ValueError(
            f"checkpoint.create_seed_checkpoint = true needs a job of one rank, not of {world_size}; start it with "
            "one, or set checkpoint.create_seed_checkpoint to false"
        )
