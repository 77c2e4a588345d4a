# SPDX-License-Identifier: BSD-3-Clause
"""Checks of a recipe with CAD, made on every rank before anything is built: each says in one line what to set."""

import os
from typing import Any

import torch
from torchtitan.components.quantization.utils import has_quantization
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.attention import (
    FlexAttention,
    GQAttention,
    VarlenAttention,
)
from torchtitan.models.deepseek_v3.model import Attention as LatentAttention
from torchtitan.models.gpt_oss.model import Attention as SinkAttention
from torchtitan.tools import utils
from torchtitan.trainer import Trainer

from torchtitan_cad.integration.choices import check_values
from torchtitan_cad.integration.topology import (
    TICK_SCHEDULES,
    Topology,
    check_degrees,
)
from torchtitan_cad.integration.torchtitan_v0_3.job import key_heads, read_job
from torchtitan_cad.runtime.kernels.select import get_kernel

KNOWN = {GQAttention.Config, SinkAttention.Config, LatentAttention.Config}
"""Attention that hands queries, keys and values to an inner attention as CAD takes them."""
_TORCHTITANS = ("torchtitan.models.common.", "torchtitan.models.gpt_oss.")
"""how modules of masks and inner attention begin that CAD stands in for; a fork may have models of its own beside"""
_HALVES = "halves of a microbatch take turns with torchtitan 0.2.2 only (docs/compatibility.md)"
_POSITIONS = (
    "torchtitan 0.3.0's loaders give positions, by which its own attention goes as well"
)
ONLY: dict[str, tuple[Any, str]] = {
    "cad.nano_batches": (1, _HALVES),
    "cad.streams": ("auto", _HALVES),
    "cad.documents": ("positions", _POSITIONS),
    "cad.eos_id": (None, _POSITIONS),
    "comm.mode": ("default", "dry runs cannot play CAD's exchanges"),
    "compile.mode": (None, "a traced step has one plan, and every batch another"),
    "debug.spmd_typechecking": (False, "results of CAD's attention have no types"),
    "fault_tolerance.enable": (
        False,
        "ranks of a CAD group serve each other and cannot come and go",
    ),
}
"""Options that have one value with this version or CAD, and why."""


def check_recipe(config: Trainer.Config) -> None:
    """Raise ValueError, naming option, value and remedy, for what this version or CAD cannot do."""
    _check_values(config)
    _check_model(config)
    _check_job(config)
    if config.cad.shadow:
        check_gradients(config)
    ranks = os.environ.get("WORLD_SIZE")
    if ranks is not None:
        check_degrees(config.parallelism, int(ranks))
        config.cad.planner_config(Topology.from_job(config.parallelism, int(ranks)))


def check_gradients(config: Trainer.Config) -> None:
    """Raise ValueError for torchtitan's own attention where it has no gradients."""
    flex = config.model_spec.model.traverse(FlexAttention.Config)
    if utils.device_type == "cpu" and any(flex):
        raise ValueError(
            f"the model {_name(config)} has FlexAttention, which does not train on CPU; take a recipe with "
            "VarlenAttention, such as llama3_debugmodel_varlen_attn, or train with CAD"
        )


def relied_on(config: Trainer.Config, device: torch.device) -> dict[str, Any]:
    """Return, by name, what CAD relies on: classes of parts, the model's precision, and what the job is read as."""
    found: dict[str, Any] = vars(read_job(config, device)).copy()
    for name in ("dataloader", "metrics", "validator", "activation_checkpoint"):
        found[name] = type(getattr(config, name))
    model = config.model_spec.model
    for number, layer in enumerate(model.layers):
        attention = layer.attention
        inner = getattr(attention, "inner_attention", None)
        found[f"layers.{number}.attention"] = type(attention), type(inner)
    found["quantization"] = has_quantization(model)
    return found


def check_overridden(
    config: Trainer.Config, before: dict[str, Any], device: torch.device
) -> None:
    """Raise ValueError if ``override.imports`` has changed what CAD relies on.

    Args:
        before: ``relied_on`` of the config as CAD has made it.
        device: of this process.
    """
    for name, value in relied_on(config, device).items():
        if value != before[name]:
            raise ValueError(
                f"override.imports = {config.override.imports} changes {name}, on which CAD relies; leave that out, or "
                "train without cad"
            )


def _check_values(config: Trainer.Config) -> None:
    cad = config.cad
    check_values(cad)
    for name, (only, reason) in ONLY.items():
        section, option = name.split(".")
        value = getattr(getattr(config, section, None), option, only)
        if value != only:
            raise ValueError(
                f"{name} = {value!r}: {reason}; set it to {only!r}, or train without cad"
            )
    if utils.device_type == "cpu":
        get_kernel(cad.kernel, "cpu")


def _check_model(config: Trainer.Config) -> None:
    model = config.model_spec.model
    name = _name(config)
    layers = getattr(model, "layers", [])
    attentions = {type(getattr(layer, "attention", None)) for layer in layers}
    if not (
        attentions
        and attentions <= KNOWN
        and _is_torchtitans(model._owner.get_attention_masks)
    ):
        raise ValueError(
            f"the model {name} has attention or masks that CAD does not know; take a recipe of llama3, qwen3, "
            "deepseek_v3 or gpt_oss, or this one without cad"
        )
    for layer in layers:
        _check_inner(layer.attention, name)
    if getattr(model, "mtp_layers", []):
        raise ValueError(
            f"the model {name} predicts several tokens, which CAD does not know; take a recipe without"
        )
    if has_quantization(model):
        raise ValueError(
            f"the model {name} is quantized, which no test has tried with CAD; take a recipe without"
        )
    tp = config.parallelism.tensor_parallel_degree
    heads = key_heads(layers[0].attention)
    if heads % tp:
        raise ValueError(
            f"parallelism.tensor_parallel_degree = {tp} does not divide the {heads} key heads of {name}; set it to a "
            f"divisor of {heads}"
        )


def _name(config: Trainer.Config) -> str:
    return f"{config.model_spec.name} {config.model_spec.flavor}"


def _check_inner(attention: Any, name: str) -> None:
    """Raise ValueError for an inner attention that sees other keys than CAD's would."""
    inner = attention.inner_attention
    sliding = getattr(attention, "sliding_window_size", None) or 0
    window = (sliding - 1, 0)
    is_known = isinstance(inner, FlexAttention.Config) or (
        isinstance(inner, VarlenAttention.Config) and inner.window_size == window
    )
    if not is_known or not _is_torchtitans(inner._owner.forward):
        raise ValueError(
            f"inner_attention of the model {name} is {inner}: CAD replaces FlexAttention, and VarlenAttention with "
            f"window_size = {window}; set it to one of them, or train without cad"
        )


def _is_torchtitans(method: Any) -> bool:
    return method.__module__.startswith(_TORCHTITANS)


def _check_job(config: Trainer.Config) -> None:
    cad = config.cad
    parallelism = config.parallelism
    schedule = parallelism.pipeline_parallel_schedule
    if schedule in TICK_SCHEDULES:
        raise ValueError(
            f"parallelism.pipeline_parallel_schedule = {schedule!r}: schedules in ticks run with torchtitan 0.2.2 only "
            "(docs/compatibility.md); set it to one of torch's, such as '1F1B'"
        )
    if (
        parallelism.context_parallel_degree > 1
        and parallelism.spmd_backend == "partial_dtensor"
    ):
        raise ValueError(
            f"parallelism.context_parallel_degree = {parallelism.context_parallel_degree} with CAD needs another "
            "backend than parallelism.spmd_backend = 'partial_dtensor'; leave that out"
        )
    if cad.transport == "nvshmem" and (
        config.compile.enable_async_tensor_parallel or parallelism.enable_fsdp_symm_mem
    ):
        raise ValueError(
            "cad.transport = 'nvshmem' does not go with compile.enable_async_tensor_parallel or "
            "parallelism.enable_fsdp_symm_mem, as torch's symmetric memory has one backend in a process; set it to "
            "'auto'"
        )
    if not cad.recompute_attention and not isinstance(
        config.activation_checkpoint, FullAC.Config | SelectiveAC.Config | None
    ):
        raise ValueError(
            "cad.recompute_attention = false does not go with activation-checkpoint:memory-budget; leave one out"
        )
    if config.validator.enable and config.validator.steps == -1 and not cad.shadow:
        raise ValueError(
            "validator.steps = -1: ranks with more batches than others would wait for ever; set a positive integer"
        )
