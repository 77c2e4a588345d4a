# SPDX-License-Identifier: BSD-3-Clause
"""Rules that keys of a job must follow, torchtitan's as well as CAD's: one table, for training and ``doctor`` alike.

torchtitan meets what breaks one of them with an assertion that names no key, with an error of the library below, or
only after steps of training. What several keys must be together is in ``job_checks`` and ``checks``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torchtitan.config import JobConfig
from torchtitan.tools import utils

from torchtitan_cad.planning.model.layout import MAX_TOKENS

MAX_SECONDS = 10**9
"""seconds: the most that a timeout may be, which torch counts in nanoseconds"""

Condition = Callable[[JobConfig], bool]
"""Tells of a job whether it uses a key."""


@dataclass(frozen=True)
class Rule:
    """What the value of a key must be, and how to mend another one.

    Attributes:
        key: with its table, as in TOML.
        accepts: tells whether a value is right.
        remedy: what to do, in the words that follow key and value.
        applies: tells whether the job uses the key; the rule says nothing where it does not.
    """

    key: str
    accepts: Callable[[Any], bool]
    remedy: str
    applies: Condition


def check_rules(config: JobConfig) -> None:
    """Raise ValueError for the first rule that a job breaks; the line names key, value and remedy."""
    for rule in RULES:
        if not rule.applies(config):
            continue
        value = read_key(config, rule.key)
        if not rule.accepts(value):
            raise ValueError(f"{rule.key} = {as_toml(value)}: {rule.remedy}")


def read_key(config: JobConfig, key: str) -> Any:
    """Return the value of a key such as ``training.dataloader.num_workers``."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def as_toml(value: Any) -> str:
    """Write a value as a user does: ``true``, not ``True``."""
    return str(value).lower() if isinstance(value, bool) else repr(value)


def always(config: JobConfig) -> bool:
    return True


def has_cad(config: JobConfig) -> bool:
    return getattr(config.parallelism, "cad", False)


def balances_rings(config: JobConfig) -> bool:
    """Tell whether torchtitan's own context parallelism runs."""
    return config.parallelism.context_parallel_degree > 1 and not has_cad(config)


def has_no_cad(config: JobConfig) -> bool:
    return not has_cad(config)


def saves(config: JobConfig) -> bool:
    return config.checkpoint.enable


def saves_in_hf(config: JobConfig) -> bool:
    return saves(config) and config.checkpoint.last_save_in_hf


def starts_from_hf(config: JobConfig) -> bool:
    return saves(config) and config.checkpoint.initial_load_in_hf


def starts_from_quantized(config: JobConfig) -> bool:
    return saves(config) and config.checkpoint.initial_load_in_hf_quantized


def validates(config: JobConfig) -> bool:
    return config.validation.enable


def profiles(config: JobConfig) -> bool:
    return config.profiling.enable_profiling


def has_pipeline(config: JobConfig) -> bool:
    return config.parallelism.pipeline_parallel_degree > 1


def has_expert_parallel(config: JobConfig) -> bool:
    return config.parallelism.expert_parallel_degree > 1


def compiles(config: JobConfig) -> bool:
    return config.compile.enable


def checkpoints_activations(config: JobConfig) -> bool:
    return config.activation_checkpoint.mode in ("full", "selective")


def checkpoints_selected(config: JobConfig) -> bool:
    return config.activation_checkpoint.mode == "selective"


def has_memory_budget(config: JobConfig) -> bool:
    return config.activation_checkpoint.mode == "memory_budget"


def trains_with_workers(config: JobConfig) -> bool:
    return config.training.dataloader.num_workers > 0


def validates_with_workers(config: JobConfig) -> bool:
    return validates(config) and config.validation.dataloader.num_workers > 0


def positive(key: str, applies: Condition = always) -> Rule:
    return Rule(
        key, lambda number: number > 0, "set a positive integer", applies=applies
    )


def positive_if_set(key: str, applies: Condition) -> Rule:
    return Rule(
        key,
        lambda number: number is None or number > 0,
        "set a positive integer, or leave it out",
        applies=applies,
    )


def not_negative(key: str, applies: Condition = always) -> Rule:
    return Rule(
        key, lambda number: number >= 0, "set 0 or a positive integer", applies=applies
    )


def finite(key: str) -> Rule:
    return Rule(
        key,
        lambda number: 0 <= number < math.inf,
        "set 0 or a positive number",
        applies=always,
    )


def below_one(key: str) -> Rule:
    return Rule(
        key,
        lambda number: 0 <= number < 1,
        "set a number from 0 to less than 1",
        applies=always,
    )


def fraction(key: str, applies: Condition = always) -> Rule:
    return Rule(
        key,
        lambda number: 0 <= number <= 1,
        "set a number from 0 to 1",
        applies=applies,
    )


def seconds(key: str) -> Rule:
    remedy = f"set a positive number of seconds, at most {MAX_SECONDS}"
    return Rule(key, lambda number: 0 < number <= MAX_SECONDS, remedy, applies=always)


def tokens(key: str, applies: Condition = always) -> Rule:
    remedy = f"set a positive number of tokens, at most {MAX_TOKENS}"
    return Rule(key, lambda number: 0 < number <= MAX_TOKENS, remedy, applies=applies)


def one_of(key: str, *choices: Any, applies: Condition = always) -> Rule:
    listed = ", ".join(repr(choice) for choice in choices)
    return Rule(
        key,
        lambda value: value in choices,
        f"set {key} to one of: {listed}",
        applies=applies,
    )


def all_of(key: str, *choices: str, applies: Condition = always) -> Rule:
    listed = ", ".join(repr(choice) for choice in choices)
    return Rule(
        key,
        lambda values: set(values) <= set(choices),
        f"list none but {listed}",
        applies=applies,
    )


def true(key: str, remedy: str, applies: Condition) -> Rule:
    return Rule(
        key, lambda value: value, f"set it to true, or {remedy}", applies=applies
    )


def false_on_cpu(key: str) -> Rule:
    """Make a rule for what watches the memory of accelerators."""
    remedy = "it watches an accelerator's memory, which ranks on CPU do not have; set it to false"
    return Rule(
        key,
        lambda enabled: not enabled or utils.device_type != "cpu",
        remedy,
        applies=always,
    )


def installed(
    key: str, value: Any, package: str, remedy: str, applies: Condition = always
) -> Rule:
    """Make a rule that refuses a value whose package is not there."""
    remedy = (
        f"needs the package {package}, which is not installed; install it, or {remedy}"
    )
    return Rule(
        key,
        lambda found: found != value or find_spec(package) is not None,
        remedy,
        applies=applies,
    )


def _is_layer_option(option: str) -> bool:
    return option == "op" or option.isdecimal()


def _is_backend(name: str) -> bool:
    return name in torch._dynamo.list_backends(exclude_tags=())


RULES = (
    positive("profiling.profiler_active", profiles),
    false_on_cpu("profiling.enable_memory_snapshot"),
    not_negative("profiling.profiler_warmup", profiles),
    positive("metrics.log_freq"),
    finite("optimizer.lr"),
    below_one("optimizer.beta1"),
    below_one("optimizer.beta2"),
    finite("optimizer.eps"),
    finite("optimizer.weight_decay"),
    not_negative("lr_scheduler.warmup_steps"),
    Rule(
        "lr_scheduler.total_steps",
        lambda steps: steps is None or steps > 0,
        "set a positive integer, or leave it out for training.steps",
        applies=always,
    ),
    Rule(
        "lr_scheduler.decay_ratio",
        lambda ratio: ratio is None or 0 <= ratio <= 1,
        "set a number from 0 to 1, or leave it out",
        applies=always,
    ),
    fraction("lr_scheduler.min_lr_factor"),
    positive("training.local_batch_size"),
    Rule(
        "training.global_batch_size",
        lambda rows: rows != 0,
        "set a multiple of training.local_batch_size times the data-parallel degree, or -1 for one such batch",
        applies=always,
    ),
    tokens("training.seq_len"),
    Rule(
        "training.max_norm",
        lambda norm: norm > 0,
        "set a positive number, or inf to clip nothing",
        applies=always,
    ),
    positive("training.steps"),
    positive("training.gc_freq"),
    false_on_cpu("training.gc_debug"),
    not_negative("training.dataloader.num_workers"),
    positive_if_set("training.dataloader.prefetch_factor", trains_with_workers),
    positive("parallelism.data_parallel_replicate_degree"),
    Rule(
        "parallelism.data_parallel_shard_degree",
        lambda degree: degree == -1 or degree > 0,
        "set a positive integer, or -1 for all ranks that are left",
        applies=always,
    ),
    positive("parallelism.tensor_parallel_degree"),
    positive("parallelism.context_parallel_degree"),
    positive("parallelism.pipeline_parallel_degree"),
    positive("parallelism.expert_parallel_degree"),
    positive("parallelism.expert_tensor_parallel_degree"),
    positive("parallelism.pipeline_parallel_microbatch_size"),
    not_negative("parallelism.pipeline_parallel_first_stage_less_layers", has_pipeline),
    not_negative("parallelism.pipeline_parallel_last_stage_less_layers", has_pipeline),
    positive_if_set("parallelism.pipeline_parallel_layers_per_stage", has_pipeline),
    one_of(
        "parallelism.context_parallel_load_balancer",
        "headtail",
        "ptrr",
        None,
        applies=balances_rings,
    ),
    installed(
        "parallelism.expert_parallel_comm_backend",
        "deepep",
        "deep_ep",
        remedy="set it to 'standard'",
        applies=has_expert_parallel,
    ),
    positive("checkpoint.interval", saves),
    Rule(
        "checkpoint.keep_latest_k",
        lambda number: number == 0 or number > 1,
        "while one is saved another must be kept; set it to 2 or more, or to 0 for all",
        applies=saves,
    ),
    Rule(
        "checkpoint.load_step",
        lambda step: step >= -1,
        "set it to the step of a checkpoint, or to -1 for the last one",
        applies=saves,
    ),
    all_of(
        "checkpoint.exclude_from_loading",
        *("model", "optimizer", "dataloader", "lr_scheduler", "train_state"),
        applies=saves,
    ),
    true(
        "checkpoint.last_save_model_only",
        "checkpoint.last_save_in_hf to false",
        saves_in_hf,
    ),
    true(
        "checkpoint.initial_load_model_only",
        "checkpoint.initial_load_in_hf to false",
        starts_from_hf,
    ),
    true(
        "checkpoint.initial_load_in_hf",
        "checkpoint.initial_load_in_hf_quantized to false",
        starts_from_quantized,
    ),
    installed(
        "checkpoint.last_save_in_hf",
        True,
        "safetensors",
        remedy="set it to false",
        applies=saves,
    ),
    installed(
        "checkpoint.initial_load_in_hf",
        True,
        "safetensors",
        remedy="set it to false",
        applies=saves,
    ),
    Rule(
        "activation_checkpoint.selective_ac_option",
        _is_layer_option,
        "set it to 'op', or to a number n such as '2' to checkpoint every nth block",
        applies=checkpoints_selected,
    ),
    one_of(
        "activation_checkpoint.determinism_check",
        "default",
        "none",
        applies=checkpoints_activations,
    ),
    fraction("activation_checkpoint.memory_budget", has_memory_budget),
    Rule(
        "compile.backend",
        _is_backend,
        "set it to one that torch knows, such as 'inductor'",
        applies=compiles,
    ),
    Rule(
        "comm.mode",
        lambda mode: mode == "default",
        "a dry run cannot play CAD's exchanges; set it to 'default', or parallelism.cad to false",
        applies=has_cad,
    ),
    seconds("comm.init_timeout_seconds"),
    seconds("comm.train_timeout_seconds"),
    installed(
        "fault_tolerance.enable",
        True,
        "torchft",
        remedy="set it to false",
        applies=has_no_cad,
    ),
    positive("validation.local_batch_size", validates),
    tokens("validation.seq_len", validates),
    positive("validation.freq", validates),
    Rule(
        "validation.steps",
        lambda steps: steps == -1 or steps > 0,
        "set a positive integer, or -1 for the whole dataset",
        applies=always,
    ),
    not_negative("validation.dataloader.num_workers", validates),
    positive_if_set("validation.dataloader.prefetch_factor", validates_with_workers),
)
"""Rules in the order of torchtitan's tables, CAD's before them."""
