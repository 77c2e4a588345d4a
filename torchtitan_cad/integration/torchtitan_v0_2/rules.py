# SPDX-License-Identifier: BSD-3-Clause
"""Rules that keys of a job must follow, torchtitan's as well as CAD's: one table, for training and ``doctor`` alike.

torchtitan meets what breaks one of them with an assertion that names no key, with an error of the library below, or
only after steps of training.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from torchtitan.config import JobConfig
from torchtitan.tools import utils

from torchtitan_cad.integration.topology import TICK_SCHEDULES, Topology, degrees_of
from torchtitan_cad.integration.torchtitan_v0_2.blocks import (
    checkpointing,
    selects_operators,
)
from torchtitan_cad.integration.torchtitan_v0_2.models import ADAPTERS, adapter_of
from torchtitan_cad.integration.torchtitan_v0_2.stages import V_SCHEDULES
from torchtitan_cad.planning.model.batch import divides_by_row
from torchtitan_cad.planning.model.layout import MAX_TOKENS

MAX_SECONDS = 10**9
"""seconds: the most that a timeout may be, which torch counts in nanoseconds"""
_SPLIT_BACKWARD = (
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
"""Schedules that compute gradients of inputs and of weights apart from each other."""
_SAVED = {"model", "optimizer", "dataloader", "lr_scheduler", "train_state"}


@dataclass(frozen=True)
class Checked:
    """The job that is checked.

    Attributes:
        config: torchtitan's, with CAD's keys or without.
        ranks: of the job; None if they are not known yet, as what depends on them is then skipped.
        experts: of a layer of the model.
    """

    config: JobConfig
    ranks: int | None
    experts: int = 0

    @property
    def dp(self) -> int:
        """The data-parallel degree; 1 where ranks are not known."""
        if self.ranks is None:
            return 1
        return Topology.from_job(self.config.parallelism, self.ranks).dp

    @property
    def microbatches(self) -> int:
        """Microbatches of a batch in a pipeline."""
        size = self.config.parallelism.pipeline_parallel_microbatch_size
        return self.config.training.local_batch_size // size


Condition = Callable[[Checked], bool]
"""Tells of a job whether it uses a key."""


def always(job: Checked) -> bool:
    return True


@dataclass(frozen=True)
class Rule:
    """What a job may not have as the value of a key.

    Attributes:
        key: with its table, as in TOML.
        breaks: tells whether a value is wrong in a job.
        remedy: what to do, in the words that follow key and value.
        applies: tells whether the job uses the key; the rule says nothing where it does not.
    """

    key: str
    breaks: Callable[[Any, Checked], bool]
    remedy: str
    applies: Condition = always


def check(job: Checked, rules: Sequence[Rule]) -> None:
    """Raise ValueError for the first rule that a job breaks; the line names key, value and remedy."""
    for rule in rules:
        value = read_key(job.config, rule.key)
        if rule.applies(job) and rule.breaks(value, job):
            raise ValueError(f"{rule.key} = {as_toml(value)}: {rule.remedy}")


def read_key(config: JobConfig, key: str) -> Any:
    """Return the value of a key such as ``training.dataloader.num_workers``; None if no table has it."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def as_toml(value: Any) -> str:
    """Write a value as a user does: ``true``, not ``True``."""
    return str(value).lower() if isinstance(value, bool) else repr(value)


def launched_ranks(config: JobConfig) -> int | None:
    """Return the launcher's number of ranks; None if it is not set, or a dry run plays a job of another number."""
    ranks = os.environ.get("WORLD_SIZE", "")
    return int(ranks) if ranks and config.comm.mode == "default" else None


def has_cad(config: JobConfig) -> bool:
    return getattr(config.parallelism, "cad", False)


def compiles_model(config: JobConfig) -> bool:
    """Tell whether blocks of the model are compiled."""
    return config.compile.enable and "model" in config.compile.components


def _cad(job: Checked) -> bool:
    return has_cad(job.config)


def _saves(job: Checked) -> bool:
    return job.config.checkpoint.enable


def _validates(job: Checked) -> bool:
    return job.config.validation.enable


def _profiles(job: Checked) -> bool:
    return job.config.profiling.enable_profiling


def _pipelined(job: Checked) -> bool:
    return job.config.parallelism.pipeline_parallel_degree > 1


def _validates_in_pipeline(job: Checked) -> bool:
    return _pipelined(job) and _validates(job)


def _in_ticks(job: Checked) -> bool:
    schedule = job.config.parallelism.pipeline_parallel_schedule
    return _cad(job) and _pipelined(job) and schedule in TICK_SCHEDULES


def _validates_in_ticks(job: Checked) -> bool:
    return _in_ticks(job) and _validates(job)


def _schedule_class(job: Checked) -> Any:
    """Return torch's class of the schedule; None without one."""
    parallelism = job.config.parallelism
    schedule = parallelism.pipeline_parallel_schedule
    is_torchs = _pipelined(job) and schedule not in TICK_SCHEDULES
    if not is_torchs or parallelism.pipeline_parallel_schedule_csv:
        return None
    return get_schedule_class(schedule)


def _splits_backward(job: Checked) -> bool:
    return _schedule_class(job) in _SPLIT_BACKWARD


def _lacks_schedule(schedule: str, job: Checked) -> bool:
    try:
        _schedule_class(job)
    except ValueError:
        return True
    return False


def _keeps_operators(_: Any, job: Checked) -> bool:
    config = job.config
    section = checkpointing(config) if has_cad(config) else config.activation_checkpoint
    return selects_operators(section)


def _is_ddp_with_others(replicas: int, job: Checked) -> bool:
    """Tell whether torchtitan uses DDP, as no ranks are left to shard over, beside TP or a pipeline."""
    parallelism = job.config.parallelism
    degrees = degrees_of(parallelism)
    others = (
        parallelism.tensor_parallel_degree * parallelism.pipeline_parallel_degree > 1
    )
    is_unsharded = job.ranks is not None and job.ranks <= math.prod(degrees.values())
    has_cp = parallelism.context_parallel_degree > 1
    return replicas > 1 and others and is_unsharded and not has_cp


def _is_cut_unevenly(seq_len: int, job: Checked) -> bool:
    parallelism = job.config.parallelism
    parts = parallelism.tensor_parallel_degree * parallelism.context_parallel_degree
    return seq_len % (2 * parts) != 0


def _does_not_fill(rows: int, job: Checked) -> bool:
    return rows > 0 and rows % (job.config.training.local_batch_size * job.dp) != 0


def _halves_rows_under_tp(rows: int, job: Checked) -> bool:
    parallelism = job.config.parallelism
    has_tp = parallelism.tensor_parallel_degree > 1
    return job.config.cad.nano_batches == 2 and has_tp and not divides_by_row(rows)


def _halves_validation(rows: int, job: Checked) -> bool:
    parts = job.microbatches if _pipelined(job) else 1
    return _halves_rows_under_tp(rows // parts, job)


def _compiles_unsharded_tp(enabled: bool, job: Checked) -> bool:
    """Tell whether torch 2.13 would fail in backward, with TP and no ranks to shard over."""
    parallelism = job.config.parallelism
    has_shards = job.dp * parallelism.context_parallel_degree > 1
    has_tp = parallelism.tensor_parallel_degree > 1
    is_torch_213 = torch.__version__.startswith("2.13.")
    is_known = job.ranks is not None
    return (
        compiles_model(job.config)
        and has_tp
        and is_known
        and not has_shards
        and is_torch_213
    )


def _recomputes_attention(kept: bool, job: Checked) -> bool:
    section = job.config.activation_checkpoint
    by_layer = section.mode == "selective" and not selects_operators(section)
    return not kept and (section.mode == "memory_budget" or by_layer)


def _leaves_experts_over(degree: int, job: Checked) -> bool:
    """Tell whether the ranks of a pipeline stage and replica do not divide by those of experts."""
    parallelism = job.config.parallelism
    pp = parallelism.pipeline_parallel_degree
    sharded = (job.ranks or 0) // (pp * parallelism.data_parallel_replicate_degree)
    ranks = degree * parallelism.expert_tensor_parallel_degree
    return degree > 1 and sharded % ranks != 0


def positive(key: str, applies: Condition = always) -> Rule:
    return Rule(
        key, lambda number, _: not number > 0, "set a positive integer", applies=applies
    )


def positive_if_set(key: str, applies: Condition = always) -> Rule:
    return Rule(
        key,
        lambda number, _: number is not None and number <= 0,
        "set a positive integer, or leave it out",
        applies=applies,
    )


def not_negative(key: str, applies: Condition = always) -> Rule:
    return Rule(
        key,
        lambda number, _: number < 0,
        "set 0 or a positive integer",
        applies=applies,
    )


def finite(key: str) -> Rule:
    return Rule(
        key,
        lambda number, _: not 0 <= number < math.inf,
        "set 0 or a positive number",
    )


def below_one(key: str) -> Rule:
    return Rule(
        key,
        lambda number, _: not 0 <= number < 1,
        "set a number from 0 to less than 1",
    )


def fraction(key: str, applies: Condition = always) -> Rule:
    return Rule(
        key,
        lambda number, _: number is not None and not 0 <= number <= 1,
        "set a number from 0 to 1",
        applies=applies,
    )


def seconds(key: str) -> Rule:
    remedy = f"set a positive number of seconds, at most {MAX_SECONDS}"
    return Rule(key, lambda number, _: not 0 < number <= MAX_SECONDS, remedy)


def tokens(key: str, applies: Condition = always) -> Rule:
    remedy = f"set a positive number of tokens, at most {MAX_TOKENS}"
    return Rule(
        key, lambda number, _: not 0 < number <= MAX_TOKENS, remedy, applies=applies
    )


def false(key: str, remedy: str, applies: Condition) -> Rule:
    return Rule(key, lambda value, _: bool(value), remedy, applies=applies)


def false_on_cpu(key: str) -> Rule:
    """Make a rule for what watches the memory of accelerators."""
    return Rule(
        key,
        lambda enabled, _: enabled and utils.device_type == "cpu",
        "it watches an accelerator's memory, which ranks on CPU do not have; set it to false",
    )


def installed(key: str, package: str, applies: Condition) -> Rule:
    return Rule(
        key,
        lambda enabled, _: enabled and find_spec(package) is None,
        f"needs the package {package}, which is not installed; install it, or set it to false",
        applies=applies,
    )


_POSITIVE = (
    "metrics.log_freq",
    "training.local_batch_size",
    "training.steps",
    "training.gc_freq",
    "parallelism.data_parallel_replicate_degree",
    "parallelism.tensor_parallel_degree",
    "parallelism.context_parallel_degree",
    "parallelism.pipeline_parallel_degree",
    "parallelism.expert_parallel_degree",
    "parallelism.expert_tensor_parallel_degree",
    "parallelism.pipeline_parallel_microbatch_size",
)
_IN_TICKS = "schedules in ticks"

RULES = (
    Rule(
        "model.name",
        lambda name, _: adapter_of(name) is None,
        f"not supported with parallelism.cad = true; set it to one of {', '.join(ADAPTERS)} or a TrainSpec whose class "
        "derives from theirs and keeps its get_attention_masks, or parallelism.cad to false",
        applies=_cad,
    ),
    *map(positive, _POSITIVE),
    positive("profiling.profiler_active", _profiles),
    not_negative("profiling.profiler_warmup", _profiles),
    false_on_cpu("profiling.enable_memory_snapshot"),
    finite("optimizer.lr"),
    below_one("optimizer.beta1"),
    below_one("optimizer.beta2"),
    finite("optimizer.eps"),
    finite("optimizer.weight_decay"),
    not_negative("lr_scheduler.warmup_steps"),
    positive_if_set("lr_scheduler.total_steps"),
    fraction("lr_scheduler.decay_ratio"),
    fraction("lr_scheduler.min_lr_factor"),
    Rule(
        "training.global_batch_size",
        lambda rows, _: rows == 0,
        "set a multiple of training.local_batch_size times the data-parallel degree, or -1 for one such batch",
    ),
    tokens("training.seq_len"),
    Rule(
        "training.max_norm",
        lambda norm, _: not norm > 0,
        "set a positive number, or inf to clip nothing",
    ),
    false_on_cpu("training.gc_debug"),
    not_negative("training.dataloader.num_workers"),
    positive_if_set(
        "training.dataloader.prefetch_factor",
        lambda job: job.config.training.dataloader.num_workers > 0,
    ),
    Rule(
        "parallelism.data_parallel_shard_degree",
        lambda degree, _: degree != -1 and degree <= 0,
        "set a positive integer, or -1 for all ranks that are left",
    ),
    not_negative("parallelism.pipeline_parallel_first_stage_less_layers", _pipelined),
    not_negative("parallelism.pipeline_parallel_last_stage_less_layers", _pipelined),
    positive_if_set("parallelism.pipeline_parallel_layers_per_stage", _pipelined),
    Rule(
        "parallelism.context_parallel_load_balancer",
        lambda name, _: name not in ("headtail", "ptrr", None),
        "set it to 'headtail' or 'ptrr', or leave it out",
        applies=lambda job: (
            not _cad(job) and job.config.parallelism.context_parallel_degree > 1
        ),
    ),
    Rule(
        "parallelism.expert_parallel_comm_backend",
        lambda name, _: name == "deepep" and find_spec("deep_ep") is None,
        "needs the package deep_ep, which is not installed; install it, or set it to 'standard'",
        applies=lambda job: job.config.parallelism.expert_parallel_degree > 1,
    ),
    positive("checkpoint.interval", _saves),
    Rule(
        "checkpoint.keep_latest_k",
        lambda number, _: number < 0 or number == 1,
        "while one is saved another must be kept; set it to 2 or more, or to 0 for all",
        applies=_saves,
    ),
    Rule(
        "checkpoint.load_step",
        lambda step, _: step < -1,
        "set it to the step of a checkpoint, or to -1 for the last one",
        applies=_saves,
    ),
    Rule(
        "checkpoint.exclude_from_loading",
        lambda names, _: not set(names) <= _SAVED,
        f"list none but {', '.join(sorted(_SAVED))}",
        applies=_saves,
    ),
    Rule(
        "checkpoint.last_save_in_hf",
        lambda hf, job: hf and not job.config.checkpoint.last_save_model_only,
        "set checkpoint.last_save_model_only to true, or this to false",
        applies=_saves,
    ),
    Rule(
        "checkpoint.initial_load_in_hf",
        lambda hf, job: hf and not job.config.checkpoint.initial_load_model_only,
        "set checkpoint.initial_load_model_only to true, or this to false",
        applies=_saves,
    ),
    Rule(
        "checkpoint.initial_load_in_hf_quantized",
        lambda quantized, job: (
            quantized and not job.config.checkpoint.initial_load_in_hf
        ),
        "set checkpoint.initial_load_in_hf to true, or this to false",
        applies=_saves,
    ),
    installed("checkpoint.last_save_in_hf", "safetensors", _saves),
    installed("checkpoint.initial_load_in_hf", "safetensors", _saves),
    Rule(
        "activation_checkpoint.selective_ac_option",
        lambda option, _: option != "op" and not option.isdecimal(),
        "set it to 'op', or to a number n such as '2' to checkpoint every nth block",
        applies=lambda job: job.config.activation_checkpoint.mode == "selective",
    ),
    Rule(
        "activation_checkpoint.determinism_check",
        lambda name, _: name not in ("default", "none"),
        "set it to 'default' or 'none'",
        applies=lambda job: (
            job.config.activation_checkpoint.mode in ("full", "selective")
        ),
    ),
    fraction(
        "activation_checkpoint.memory_budget",
        lambda job: job.config.activation_checkpoint.mode == "memory_budget",
    ),
    Rule(
        "compile.backend",
        lambda name, _: name not in torch._dynamo.list_backends(exclude_tags=()),
        "set it to one that torch knows, such as 'inductor'",
        applies=lambda job: job.config.compile.enable,
    ),
    Rule(
        "comm.mode",
        lambda mode, _: mode != "default",
        "a dry run cannot play CAD's exchanges; set it to 'default', or parallelism.cad to false",
        applies=_cad,
    ),
    seconds("comm.init_timeout_seconds"),
    seconds("comm.train_timeout_seconds"),
    installed("fault_tolerance.enable", "torchft", lambda job: not _cad(job)),
    positive("validation.local_batch_size", _validates),
    tokens("validation.seq_len", _validates),
    positive("validation.freq", _validates),
    Rule(
        "validation.steps",
        lambda steps, _: steps != -1 and steps <= 0,
        "set a positive integer, or -1 for the whole dataset",
    ),
    not_negative("validation.dataloader.num_workers", _validates),
    positive_if_set(
        "validation.dataloader.prefetch_factor",
        lambda job: (
            _validates(job) and job.config.validation.dataloader.num_workers > 0
        ),
    ),
)
"""Rules that every key follows by itself, in the order in which they are checked."""

RULES_OF_JOBS = (
    Rule(
        "parallelism.data_parallel_replicate_degree",
        _is_ddp_with_others,
        "without shards it is DDP, which torchtitan does not combine with parallelism.tensor_parallel_degree or "
        "pipeline_parallel_degree; set it to 1, so that parameters are sharded instead",
    ),
    Rule(
        "training.global_batch_size",
        _does_not_fill,
        "set a multiple of training.local_batch_size times the data-parallel degree, or -1 for one such batch",
    ),
    *(
        Rule(
            f"{table}.seq_len",
            _is_cut_unevenly,
            "set a multiple of 2 x tensor_parallel_degree x context_parallel_degree",
            applies=applies,
        )
        for table, applies in (("training", always), ("validation", _validates))
    ),
    Rule(
        "training.local_batch_size",
        lambda rows, job: rows * job.config.training.seq_len > MAX_TOKENS,
        f"set it or training.seq_len lower, so that a batch has at most {MAX_TOKENS} tokens",
    ),
    Rule(
        "validation.local_batch_size",
        lambda rows, job: rows * job.config.validation.seq_len > MAX_TOKENS,
        f"set it or validation.seq_len lower, so that a batch has at most {MAX_TOKENS} tokens",
        applies=_validates,
    ),
    Rule(
        "validation.seq_len",
        lambda length, job: length > job.config.training.seq_len,
        "set it to training.seq_len or less, the positions that the model is built for",
        applies=_validates,
    ),
    Rule(
        "lr_scheduler.total_steps",
        lambda total, job: total is not None and total < job.config.training.steps,
        "set it to training.steps or more, or leave it out",
    ),
    Rule(
        "parallelism.expert_tensor_parallel_degree",
        lambda degree, job: (
            degree not in (1, job.config.parallelism.tensor_parallel_degree)
        ),
        "set it to 1, or to parallelism.tensor_parallel_degree",
        applies=lambda job: job.config.parallelism.expert_parallel_degree > 1,
    ),
    Rule(
        "activation_checkpoint.mode",
        lambda mode, job: mode == "memory_budget" and not compiles_model(job.config),
        "it is what the compiler does: set compile.enable to true, with 'model' in compile.components, or it to 'full'",
    ),
    Rule(
        "parallelism.enable_async_tensor_parallel",
        lambda enabled, job: enabled and not compiles_model(job.config),
        "set compile.enable to true, with 'model' in compile.components, or it to false",
        applies=lambda job: job.config.parallelism.tensor_parallel_degree > 1,
    ),
    Rule(
        "profiling.profile_freq",
        lambda freq, job: (
            freq
            < job.config.profiling.profiler_warmup
            + job.config.profiling.profiler_active
        ),
        "set it to profiler_warmup + profiler_active or more",
        applies=_profiles,
    ),
    *(
        Rule(
            f"parallelism.{key}",
            lambda degree, job: degree > 1,
            "does not go with optimizer.early_step_in_backward = true; set that to false",
            applies=lambda job: job.config.optimizer.early_step_in_backward,
        )
        for key in ("pipeline_parallel_degree", "expert_parallel_degree")
    ),
    Rule(
        "checkpoint.create_seed_checkpoint",
        lambda creates, job: creates and not (_saves(job) and job.ranks in (None, 1)),
        "needs checkpoint.enable = true and a job of one rank; set those, or it to false",
    ),
    # Pipelines.
    Rule(
        "parallelism.pipeline_parallel_schedule",
        _lacks_schedule,
        f"set it to one of torch's, such as '1F1B', or to {' or '.join(map(repr, TICK_SCHEDULES))}",
    ),
    Rule(
        "parallelism.pipeline_parallel_expert_parallel_overlap",
        lambda overlaps, job: overlaps and _schedule_class(job) is ScheduleDualPipeV,
        "runs forward and backward of DualPipeV in two threads, whose exchanges would mix; set it to false, or "
        "parallelism.pipeline_parallel_schedule to another",
        applies=_cad,
    ),
    Rule(
        "parallelism.pipeline_parallel_schedule",
        lambda _, job: compiles_model(job.config),
        "torch cannot compute gradients of inputs and of weights apart with compile.enable = true; set that to false, "
        "or the schedule to 'Interleaved1F1B'",
        applies=_splits_backward,
    ),
    Rule(
        "parallelism.pipeline_parallel_schedule",
        _keeps_operators,
        "torch cannot compute gradients of inputs and of weights apart where activation_checkpoint.selective_ac_option "
        "= 'op' or cad.recompute_attention = false keep some; set activation_checkpoint.mode to 'full' and "
        "cad.recompute_attention to true, or the schedule to 'Interleaved1F1B'",
        applies=_splits_backward,
    ),
    # In both, two consecutive stages share a rank, and torch's eval() asks the later one for gradients.
    Rule(
        "parallelism.pipeline_parallel_schedule",
        lambda _, job: _schedule_class(job) in V_SCHEDULES,
        "torch cannot run forward alone in it; set validation.enable to false, or the schedule to another",
        applies=_validates,
    ),
    Rule(
        "training.local_batch_size",
        lambda rows, job: (
            rows % job.config.parallelism.pipeline_parallel_microbatch_size != 0
        ),
        "set parallelism.pipeline_parallel_microbatch_size to a divisor of it",
        applies=_pipelined,
    ),
    Rule(
        "validation.local_batch_size",
        lambda rows, job: rows % job.microbatches != 0,
        "set a multiple of the microbatches of training, training.local_batch_size / "
        "parallelism.pipeline_parallel_microbatch_size",
        applies=_validates_in_pipeline,
    ),
    # Jobs with CAD.
    Rule(
        "cad.transport",
        lambda name, job: (
            name == "nvshmem" and job.config.parallelism.enable_async_tensor_parallel
        ),
        "does not go with parallelism.enable_async_tensor_parallel = true, as torch's symmetric memory has one backend "
        "in a process; set it to 'auto'",
        applies=_cad,
    ),
    Rule(
        "cad.recompute_attention",
        _recomputes_attention,
        "does not go with activation_checkpoint.mode = 'memory_budget', nor with 'selective' but by 'op'; set the mode "
        "to 'full'",
        applies=_cad,
    ),
    Rule(
        "compile.enable",
        _compiles_unsharded_tp,
        "with tensor parallelism and no ranks to shard over it fails in backward with torch 2.13; set it to false",
        applies=_cad,
    ),
    false(
        "model.converters",
        "no test has tried CAD with converters, such as those of float8 and MX; leave them out, or set parallelism.cad "
        "to false",
        _cad,
    ),
    false(
        "fault_tolerance.enable",
        "the ranks of a CAD group serve each other and cannot come and go; set it or parallelism.cad to "
        "false",
        _cad,
    ),
    Rule(
        "training.local_batch_size",
        _halves_rows_under_tp,
        "cad.nano_batches = 2 with tensor parallelism halves by rows; set an even number, or cad.nano_batches to 1",
        applies=lambda job: _cad(job) and not _pipelined(job),
    ),
    Rule(
        "parallelism.pipeline_parallel_microbatch_size",
        _halves_rows_under_tp,
        "cad.nano_batches = 2 with tensor parallelism halves by rows; set an even number, or cad.nano_batches to 1",
        applies=lambda job: _cad(job) and _pipelined(job),
    ),
    Rule(
        "validation.local_batch_size",
        _halves_validation,
        "cad.nano_batches = 2 with tensor parallelism halves by rows; set an even number of rows a microbatch, or "
        "cad.nano_batches to 1",
        applies=lambda job: _cad(job) and _validates(job),
    ),
    # Schedules in ticks.
    false(
        "cad.shadow",
        f"trains as torchtitan does, which has no {_IN_TICKS}; set parallelism.pipeline_parallel_schedule to '1F1B', "
        "or it to false",
        _in_ticks,
    ),
    Rule(
        "cad.backward",
        lambda name, _: name == "keep",
        f"in {_IN_TICKS} backward meets other microbatches than forward did; set it to 'resend'",
        applies=_in_ticks,
    ),
    false(
        "parallelism.pipeline_parallel_schedule_csv",
        f"has no meaning with {_IN_TICKS}; leave it out",
        _in_ticks,
    ),
    Rule(
        "activation_checkpoint.mode",
        lambda mode, _: mode == "memory_budget",
        f"in {_IN_TICKS} ranks that serve must know which attention is recomputed; set it to 'full', 'selective' or "
        "'none'",
        applies=_in_ticks,
    ),
    Rule(
        "training.local_batch_size",
        lambda _, job: (
            job.config.parallelism.pipeline_parallel_schedule == "CADInterleaved1F1B"
            and job.microbatches % job.config.parallelism.pipeline_parallel_degree != 0
        ),
        "set a multiple of parallelism.pipeline_parallel_degree times the microbatch size, or "
        "parallelism.pipeline_parallel_schedule to 'CAD1F1B'",
        applies=_in_ticks,
    ),
    Rule(
        "validation.local_batch_size",
        lambda rows, job: rows != job.config.training.local_batch_size,
        f"set it to training.local_batch_size, as {_IN_TICKS} need",
        applies=_validates_in_ticks,
    ),
    Rule(
        "validation.seq_len",
        lambda length, job: length != job.config.training.seq_len,
        f"set it to training.seq_len, as {_IN_TICKS} need",
        applies=_validates_in_ticks,
    ),
)
"""Rules of what several keys must be together; all that they divide by is positive."""

RULES_OF_EXPERTS = (
    Rule(
        "cad.streams",
        lambda name, _: name == "traced",
        "cannot trace the model's experts; set it to 'auto'",
        applies=_cad,
    ),
    Rule(
        "parallelism.pipeline_parallel_schedule",
        lambda _, job: True,
        "has not been tested with experts; set it to '1F1B' or 'Interleaved1F1B'",
        applies=_in_ticks,
    ),
    Rule(
        "parallelism.expert_parallel_degree",
        lambda degree, job: job.experts % degree != 0,
        "set it to a divisor of the experts of a layer",
    ),
    Rule(
        "parallelism.expert_parallel_degree",
        _leaves_experts_over,
        "set it such that times expert_tensor_parallel_degree it divides the ranks of a pipeline stage and replica",
        applies=lambda job: job.ranks is not None,
    ),
)
"""Rules of jobs whose models have experts."""
