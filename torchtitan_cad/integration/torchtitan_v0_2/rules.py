# SPDX-License-Identifier: BSD-3-Clause
"""What keys of a job may be, torchtitan's as well as CAD's: for training and ``doctor`` alike.

torchtitan meets what is refused here with an assertion that names no key, with an error of the library below, or only
after steps of training.
"""

import math
import os
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from torchtitan.config import JobConfig
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.tools import utils

from torchtitan_cad.integration.topology import TICK_SCHEDULES
from torchtitan_cad.integration.torchtitan_v0_2.blocks import (
    checkpointing,
    selects_operators,
)
from torchtitan_cad.integration.torchtitan_v0_2.models import (
    ADAPTERS,
    adapter_of,
    has_experts,
)
from torchtitan_cad.integration.torchtitan_v0_2.stages import V_SCHEDULES
from torchtitan_cad.planning.model.batch import divides_by_row

Refusal = tuple[str, bool, str]
"""A key with its table, as in TOML; whether its value is wrong; and what to do, in words that follow key and value."""

_SPLIT_BACKWARD = (
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
"""Schedules that compute gradients of inputs and of weights apart from each other."""
_OPTIMIZERS = ("Adam", "AdamW")
_SCHEDULE = "parallelism.pipeline_parallel_schedule"
_IN_TICKS = "schedules in ticks"

_COUNTS = (
    "checkpoint.interval",
    "comm.init_timeout_seconds",
    "comm.train_timeout_seconds",
    "lr_scheduler.total_steps",
    "metrics.log_freq",
    "parallelism.context_parallel_degree",
    "parallelism.data_parallel_replicate_degree",
    "parallelism.expert_parallel_degree",
    "parallelism.expert_tensor_parallel_degree",
    "parallelism.pipeline_parallel_degree",
    "parallelism.pipeline_parallel_layers_per_stage",
    "parallelism.pipeline_parallel_microbatch_size",
    "parallelism.tensor_parallel_degree",
    "profiling.profiler_active",
    "training.dataloader.prefetch_factor",
    "training.gc_freq",
    "training.local_batch_size",
    "training.seq_len",
    "training.steps",
    "validation.dataloader.prefetch_factor",
    "validation.freq",
    "validation.local_batch_size",
    "validation.seq_len",
)
_AMOUNTS = (
    "lr_scheduler.warmup_steps",
    "optimizer.eps",
    "optimizer.lr",
    "optimizer.weight_decay",
    "parallelism.pipeline_parallel_first_stage_less_layers",
    "parallelism.pipeline_parallel_last_stage_less_layers",
    "profiling.profiler_warmup",
    "training.dataloader.num_workers",
    "training.max_norm",
    "validation.dataloader.num_workers",
)
_FRACTIONS = (
    "activation_checkpoint.memory_budget",
    "lr_scheduler.decay_ratio",
    "lr_scheduler.min_lr_factor",
    "optimizer.beta1",
    "optimizer.beta2",
)
_BOUNDS = (
    (_COUNTS, 1, 2**31 - 1),
    (_AMOUNTS, 0, math.inf),
    (_FRACTIONS, 0, 1),
)
"""Keys, and the least and the most that they may be if they are set."""


def read_key(config: JobConfig, key: str) -> Any:
    """Return the value of a key such as ``training.dataloader.num_workers``; AttributeError if there is none."""
    return attrgetter(key)(config)


def as_toml(value: Any) -> str:
    """Write a value as a user does: ``true``, not ``True``."""
    return str(value).lower() if isinstance(value, bool) else repr(value)


def launched_ranks(config: JobConfig) -> int | None:
    """Return the launcher's number of ranks; None if it is not set, or a dry run plays a job of another number."""
    ranks = os.environ.get("WORLD_SIZE", "")
    return int(ranks) if ranks and config.comm.mode == "default" else None


def has_cad(config: JobConfig) -> bool:
    return getattr(config.parallelism, "cad", False)


def check_bounds(config: JobConfig) -> None:
    """Raise ValueError for the first number out of its bounds; the line names key, value and bounds."""
    for keys, least, most in _BOUNDS:
        for key in keys:
            value = read_key(config, key)
            if value is not None and not least <= value <= most:
                raise ValueError(
                    f"{key} = {value}: set a number from {least} to {most}"
                )
    if config.training.max_norm == 0:
        raise ValueError(
            "training.max_norm = 0: every gradient would be 0; set a positive number, or inf to clip nothing"
        )


def check(config: JobConfig, refusals: Iterable[Refusal]) -> None:
    """Raise ValueError for the first refusal of a job; the line names key, value and remedy."""
    for key, is_wrong, remedy in refusals:
        if is_wrong:
            raise ValueError(f"{key} = {as_toml(read_key(config, key))}: {remedy}")


def of_any_job(config: JobConfig, ranks: int | None) -> Iterator[Refusal]:
    """Yield what no job may have, with CAD or without.

    Numbers are within their bounds. ``ranks`` None: what depends on them is left out.
    """
    parallelism = config.parallelism
    shards = parallelism.data_parallel_shard_degree
    yield (
        "parallelism.data_parallel_shard_degree",
        shards != -1 and shards < 1,
        "set a positive integer, or -1 for all ranks that are left",
    )
    yield from _of_batches(config, ranks)
    yield from _of_features(config)
    replicas = parallelism.data_parallel_replicate_degree
    tp = parallelism.tensor_parallel_degree
    pp = parallelism.pipeline_parallel_degree
    yield (
        "parallelism.data_parallel_replicate_degree",
        replicas > 1 and tp * pp > 1 and ranks == replicas * tp * pp,
        "without shards it is DDP, which torchtitan does not combine with parallelism.tensor_parallel_degree or "
        "pipeline_parallel_degree; set it to 1, so that parameters are sharded instead",
    )
    if pp > 1:
        yield from _of_pipelines(config)


def _of_batches(config: JobConfig, ranks: int | None) -> Iterator[Refusal]:
    training = config.training
    validation = config.validation
    parallelism = config.parallelism
    parts = parallelism.tensor_parallel_degree * parallelism.context_parallel_degree
    dp = (ranks or 0) // (parts * parallelism.pipeline_parallel_degree)
    batch = training.local_batch_size * max(1, dp)
    rows = training.global_batch_size
    yield (
        "training.global_batch_size",
        rows == 0 or (rows > 0 and rows % batch != 0),
        "set a multiple of training.local_batch_size times the data-parallel degree, or -1 for one such batch",
    )
    evenly = "set a multiple of 2 x tensor_parallel_degree x context_parallel_degree"
    yield "training.seq_len", training.seq_len % (2 * parts) != 0, evenly
    if validation.enable:
        yield "validation.seq_len", validation.seq_len % (2 * parts) != 0, evenly
        yield (
            "validation.seq_len",
            validation.seq_len > training.seq_len,
            "set it to training.seq_len or less, the positions that the model is built for",
        )


def _of_features(config: JobConfig) -> Iterator[Refusal]:
    parallelism = config.parallelism
    checkpoint = config.checkpoint
    profiling = config.profiling
    compiles = compiles_model(config)
    to_compile = "set compile.enable to true, with 'model' in compile.components"
    yield (
        "activation_checkpoint.mode",
        config.activation_checkpoint.mode == "memory_budget" and not compiles,
        f"it is what the compiler does: {to_compile}, or it to 'full'",
    )
    yield (
        "parallelism.enable_async_tensor_parallel",
        parallelism.enable_async_tensor_parallel
        and parallelism.tensor_parallel_degree > 1
        and not compiles,
        f"{to_compile}, or it to false",
    )
    yield (
        "training.enable_cpu_offload",
        config.training.enable_cpu_offload and utils.device_type == "cpu",
        "set it to false: CPU ranks have nothing to offload to",
    )
    yield (
        "lr_scheduler.total_steps",
        (config.lr_scheduler.total_steps or math.inf) < config.training.steps,
        "set it to training.steps or more, or leave it out",
    )
    yield (
        "profiling.profile_freq",
        profiling.enable_profiling
        and profiling.profile_freq
        < profiling.profiler_warmup + profiling.profiler_active,
        "set it to profiler_warmup + profiler_active or more",
    )
    yield (
        "checkpoint.last_save_in_hf",
        checkpoint.last_save_in_hf and not checkpoint.last_save_model_only,
        "set checkpoint.last_save_model_only to true, or this to false",
    )
    yield (
        "checkpoint.initial_load_in_hf",
        checkpoint.initial_load_in_hf and not checkpoint.initial_load_model_only,
        "set checkpoint.initial_load_model_only to true, or this to false",
    )
    yield (
        "checkpoint.initial_load_in_hf_quantized",
        checkpoint.enable
        and checkpoint.initial_load_in_hf_quantized
        and not checkpoint.initial_load_in_hf,
        "set checkpoint.initial_load_in_hf to true, or this to false",
    )
    is_alone = checkpoint.enable and launched_ranks(config) in (None, 1)
    yield (
        "checkpoint.create_seed_checkpoint",
        checkpoint.create_seed_checkpoint and not is_alone,
        "needs checkpoint.enable = true and a job of one rank; set those, or this to false",
    )


def compiles_model(config: JobConfig) -> bool:
    """Tell whether blocks of the model are compiled."""
    return config.compile.enable and "model" in config.compile.components


def _of_pipelines(config: JobConfig) -> Iterator[Refusal]:
    parallelism = config.parallelism
    schedule = _schedule_class(config)
    rows = config.training.local_batch_size
    microbatches = rows // parallelism.pipeline_parallel_microbatch_size
    yield (
        "training.local_batch_size",
        rows % parallelism.pipeline_parallel_microbatch_size != 0,
        "set parallelism.pipeline_parallel_microbatch_size to a divisor of it",
    )
    if schedule in _SPLIT_BACKWARD:
        section = config.activation_checkpoint
        cannot = "torch cannot compute gradients of inputs and of weights apart"
        yield (
            _SCHEDULE,
            compiles_model(config),
            f"{cannot} with compile.enable = true; set that to false, or the schedule to 'Interleaved1F1B'",
        )
        yield (
            _SCHEDULE,
            selects_operators(checkpointing(config) if has_cad(config) else section),
            f"{cannot} where activation_checkpoint.selective_ac_option = 'op' or cad.recompute_attention = false keep "
            "some; set activation_checkpoint.mode to 'full' and cad.recompute_attention to true, or the schedule to "
            "'Interleaved1F1B'",
        )
    if config.validation.enable:
        # Two consecutive stages share a rank, and torch's eval() asks the later one for gradients.
        yield (
            _SCHEDULE,
            schedule in V_SCHEDULES,
            "torch cannot run forward alone in it; set validation.enable to false, or the schedule to another",
        )
        yield (
            "validation.local_batch_size",
            config.validation.local_batch_size % microbatches != 0,
            "set a multiple of the microbatches of training, training.local_batch_size / "
            "parallelism.pipeline_parallel_microbatch_size",
        )
    yield (
        _SCHEDULE,
        parallelism.pipeline_parallel_schedule in TICK_SCHEDULES
        and not has_cad(config),
        "needs parallelism.cad = true; set that, or the schedule to one of torchtitan's, such as '1F1B'",
    )


def _schedule_class(config: JobConfig) -> Any:
    """Return torch's class of the schedule; None in ticks, or of a file. Raises ValueError if torch has none."""
    parallelism = config.parallelism
    name = parallelism.pipeline_parallel_schedule
    if name in TICK_SCHEDULES or parallelism.pipeline_parallel_schedule_csv:
        return None
    try:
        return get_schedule_class(name)
    except ValueError:
        listed = " or ".join(map(repr, TICK_SCHEDULES))
        raise ValueError(
            f"{_SCHEDULE} = {name!r}: set it to one of torch's, such as '1F1B', or to {listed}"
        ) from None


def of_cad(config: JobConfig, ranks: int | None) -> Iterator[Refusal]:
    """Yield what no job with CAD may have."""
    cad = config.cad
    parallelism = config.parallelism
    section = config.activation_checkpoint
    tp = parallelism.tensor_parallel_degree
    pp = parallelism.pipeline_parallel_degree
    yield (
        "model.name",
        adapter_of(config.model.name) is None,
        f"not supported with parallelism.cad = true; set it to one of {', '.join(ADAPTERS)} or a TrainSpec whose class "
        "derives from theirs and keeps its get_attention_masks, or parallelism.cad to false",
    )
    yield (
        "comm.mode",
        config.comm.mode != "default",
        "a dry run cannot play CAD's exchanges; set it to 'default', or parallelism.cad to false",
    )
    yield (
        "cad.transport",
        cad.transport == "nvshmem" and parallelism.enable_async_tensor_parallel,
        "does not go with parallelism.enable_async_tensor_parallel = true, as torch's symmetric memory has one backend "
        "in a process; set it to 'auto'",
    )
    by_layer = section.mode == "selective" and not selects_operators(section)
    yield (
        "cad.recompute_attention",
        not cad.recompute_attention and (by_layer or section.mode == "memory_budget"),
        "does not go with activation_checkpoint.mode = 'memory_budget', nor with 'selective' but by 'op'; set the mode "
        "to 'full'",
    )
    yield (
        "compile.enable",
        compiles_model(config)
        and tp > 1
        and ranks == tp * pp
        and torch.__version__.startswith("2.13."),
        "with tensor parallelism and no ranks to shard over it fails in backward with torch 2.13; set it to false",
    )
    yield (
        "model.converters",
        bool(config.model.converters),
        "no test has tried CAD with converters, such as those of float8 and MX; leave them out, or set parallelism.cad "
        "to false",
    )
    yield (
        "fault_tolerance.enable",
        config.fault_tolerance.enable,
        "the ranks of a CAD group serve each other and cannot come and go; set it or parallelism.cad to false",
    )
    if cad.nano_batches == 2 and tp > 1:
        yield from _of_halved_rows(config)
    if pp > 1:
        yield from _of_cad_in_pipelines(config)


def _of_halved_rows(config: JobConfig) -> Iterator[Refusal]:
    key = "training.local_batch_size"
    microbatches = 1
    if config.parallelism.pipeline_parallel_degree > 1:
        key = "parallelism.pipeline_parallel_microbatch_size"
        microbatches = config.training.local_batch_size // read_key(config, key)
    remedy = (
        "cad.nano_batches = 2 with tensor parallelism halves by rows; set an even number of rows a microbatch, or "
        "cad.nano_batches to 1"
    )
    yield key, not divides_by_row(read_key(config, key)), remedy
    rows = config.validation.local_batch_size // microbatches
    is_odd = config.validation.enable and not divides_by_row(rows)
    yield "validation.local_batch_size", is_odd, remedy


def _of_cad_in_pipelines(config: JobConfig) -> Iterator[Refusal]:
    parallelism = config.parallelism
    training = config.training
    schedule = parallelism.pipeline_parallel_schedule
    pp = parallelism.pipeline_parallel_degree
    microbatches = (
        training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    )
    yield (
        "parallelism.pipeline_parallel_expert_parallel_overlap",
        parallelism.pipeline_parallel_expert_parallel_overlap
        and schedule == "DualPipeV",
        f"runs forward and backward of DualPipeV in two threads, whose exchanges would mix; set it to false, or "
        f"{_SCHEDULE} to another",
    )
    yield (
        "training.local_batch_size",
        schedule == "CADInterleaved1F1B" and microbatches % pp != 0,
        f"set a multiple of parallelism.pipeline_parallel_degree times the microbatch size, or {_SCHEDULE} to "
        "'CAD1F1B'",
    )
    if schedule in TICK_SCHEDULES:
        yield from _of_ticks(config)


def _of_ticks(config: JobConfig) -> Iterator[Refusal]:
    training = config.training
    validation = config.validation
    yield (
        "cad.shadow",
        config.cad.shadow,
        f"trains as torchtitan does, which has no {_IN_TICKS}; set {_SCHEDULE} to '1F1B', or it to false",
    )
    yield (
        "cad.backward",
        config.cad.backward == "keep",
        f"in {_IN_TICKS} backward meets other microbatches than forward did; set it to 'resend'",
    )
    yield (
        "parallelism.pipeline_parallel_schedule_csv",
        bool(config.parallelism.pipeline_parallel_schedule_csv),
        f"has no meaning with {_IN_TICKS}; leave it out",
    )
    yield (
        "activation_checkpoint.mode",
        config.activation_checkpoint.mode == "memory_budget",
        f"in {_IN_TICKS} ranks that serve must know which attention is recomputed; set it to 'full', 'selective' or "
        "'none'",
    )
    if validation.enable:
        yield (
            "validation.local_batch_size",
            validation.local_batch_size != training.local_batch_size,
            f"set it to training.local_batch_size, as {_IN_TICKS} need",
        )
        yield (
            "validation.seq_len",
            validation.seq_len != training.seq_len,
            f"set it to training.seq_len, as {_IN_TICKS} need",
        )


def of_model(
    config: JobConfig, spec: TrainSpec, ranks: int | None
) -> Iterator[Refusal]:
    """Yield what no job may have that trains the model of a spec, torchtitan's or a user's."""
    name = config.model.name
    flavor = config.model.flavor
    yield (
        "model.flavor",
        flavor not in spec.model_args,
        f"not a flavor of {name}; set model.flavor to one of {', '.join(spec.model_args)}",
    )
    own = spec.parallelize_fn.__module__
    is_known = name in ADAPTERS or own.startswith("torchtitan.models.")
    yield (
        "model.name",
        has_cad(config) and not is_known,
        f"CAD changes what torchtitan's parallelize functions call; its TrainSpec has one of {own}, give it the "
        "parallelize_fn of the model that its class derives from",
    )
    yield (
        "validation.enable",
        config.validation.enable and spec.build_validator_fn is None,
        f"torchtitan has no validation for model.name = {name!r}; set it to false",
    )
    yield (
        "parallelism.pipeline_parallel_degree",
        config.parallelism.pipeline_parallel_degree > 1 and spec.pipelining_fn is None,
        f"torchtitan has no pipelines for model.name = {name!r}; set it to 1",
    )
    is_titans = spec.build_optimizers_fn.__module__.startswith("torchtitan.components.")
    yield (
        "optimizer.name",
        is_titans and config.optimizer.name not in _OPTIMIZERS,
        f"set it to one of {', '.join(_OPTIMIZERS)}",
    )
    model_args = spec.model_args[flavor]
    if has_experts(model_args):
        yield from _of_experts(config, model_args.moe_args.num_experts, ranks)


def _of_experts(
    config: JobConfig, experts: int, ranks: int | None
) -> Iterator[Refusal]:
    """Yield what a model with so many experts a layer may not have."""
    parallelism = config.parallelism
    pp = parallelism.pipeline_parallel_degree
    degree = parallelism.expert_parallel_degree
    of_expert = parallelism.expert_tensor_parallel_degree
    yield (
        "parallelism.expert_tensor_parallel_degree",
        degree > 1 and of_expert not in (1, parallelism.tensor_parallel_degree),
        "set it to 1, or to parallelism.tensor_parallel_degree",
    )
    yield (
        "parallelism.expert_parallel_degree",
        experts % degree != 0,
        "set it to a divisor of the experts of a layer",
    )
    sharded = (ranks or 0) // (pp * parallelism.data_parallel_replicate_degree)
    yield (
        "parallelism.expert_parallel_degree",
        degree > 1 and sharded % (degree * of_expert) != 0,
        "set it such that times expert_tensor_parallel_degree it divides the ranks of a pipeline stage and replica",
    )
    if has_cad(config):
        yield (
            "cad.streams",
            config.cad.streams == "traced",
            "cannot trace the model's experts; set it to 'auto'",
        )
        yield (
            _SCHEDULE,
            pp > 1 and parallelism.pipeline_parallel_schedule in TICK_SCHEDULES,
            "has not been tested with experts; set it to '1F1B' or 'Interleaved1F1B'",
        )
