# SPDX-License-Identifier: BSD-3-Clause
"""The memory of a rank that a job leaves for rows that servers keep (``cad.backward = "auto"``)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

from torchtitan_cad.integration.job import Job
from torchtitan_cad.planning.exchange.messages import BUFFERS_PER_CALL, buffer_bytes
from torchtitan_cad.planning.keeping import (
    FILLED,
    GRADIENT_BYTES,
    WORKING,
    Checkpointing,
    KeepCapacity,
    Stage,
    kept_calls,
)
from torchtitan_cad.planning.memory import stock_memory

_STATES = 4
"""Tensors as large as a weight, with it: the gradient and Adam's two moments."""


def checkpointing_kind(config: JobConfig) -> Checkpointing:
    """Return what activation checkpointing computes again; what is neither all nor nothing counts as "selective"."""
    mode = config.activation_checkpoint.mode
    if mode == "full":
        return "full" if config.cad.recompute_attention else "linear"
    return "none" if mode == "none" else "selective"


def read_room(
    parts: Sequence[Any], parallel_dims: ParallelDims, config: JobConfig, job: Job, device_bytes: float
) -> KeepCapacity:
    """Return the room of this rank.

    Args:
        parts: of the model, parallelized, that this rank runs.
        parallel_dims: degrees of parallelism.
        config: of the job.
        job: the same as CAD sees it.
        device_bytes: memory of this rank's device.
    """
    topology, nano_batches, checkpointing = job.topology, job.cad.nano_batches, checkpointing_kind(config)
    blocks = [block for part in parts for block in part.layers.values()]
    flying = _microbatches_in_flight(config, job)
    tokens = job.rows // job.microbatches * config.training.seq_len // topology.cp
    heads, key_heads = job.shape.num_heads * topology.tp, job.shape.num_kv_heads * topology.tp
    args = parts[0].model_args
    stage = Stage(
        layers=len(blocks),
        hidden=args.dim,
        ffn=_ffn(blocks, args.dim, job.experts_per_token),
        vocabulary=args.vocab_size,
        shape=replace(job.shape, num_heads=heads, num_kv_heads=key_heads),
        tp=topology.tp,
        in_pipeline=topology.pp > 1,
    )
    shards = parallel_dims.dp_shard * parallel_dims.cp
    used = sum(
        (
            _state_bytes(parts, blocks, shards, job.dtype.itemsize, in_pipeline=stage.in_pipeline),
            tokens * stage.token_bytes(checkpointing, flying, nano_batches),
            nano_batches * BUFFERS_PER_CALL * buffer_bytes(job.cad.receive_buffer_gb, nano_batches),
            WORKING * max(stock_memory(job.shape, tokens, tokens, job.rows)),
        )
    )
    return KeepCapacity(FILLED * device_bytes, used, kept_calls(len(blocks), flying, nano_batches, checkpointing))


def _microbatches_in_flight(config: JobConfig, job: Job) -> int:
    """Count the microbatches between forward and backward, at most; schedules but 1F1B count as if all were."""
    if config.parallelism.pipeline_parallel_schedule == "1F1B":
        return min(job.microbatches, job.topology.pp)
    return job.microbatches


def _state_bytes(
    parts: Sequence[nn.Module], blocks: Sequence[nn.Module], shards: int, itemsize: int, *, in_pipeline: bool
) -> float:
    """Return the bytes of weights, gradients and optimizer, and of what FSDP2 gathers.

    It gathers two layers at a time, or all in a pipeline.

    Args:
        shards: ranks that FSDP2 shards parameters over.
        itemsize: bytes of an element of gathered parameters.
    """
    own = sum(_STATES * parameter.itemsize * _count(parameter) for part in parts for parameter in part.parameters())
    if shards == 1:
        return own
    if in_pipeline:
        return own + shards * (itemsize + GRADIENT_BYTES) * sum(_parameters(part) for part in parts)
    return own + 2 * shards * itemsize * max(map(_parameters, blocks), default=0)


def _parameters(module: nn.Module) -> int:
    """Count the parameters that this rank holds of a module."""
    return sum(_count(parameter) for parameter in module.parameters())


def _count(parameter: torch.Tensor) -> int:
    """Count the elements that this rank holds of a parameter."""
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()


def _ffn(blocks: Sequence[nn.Module], hidden: int, experts_per_token: int) -> float:
    """Return the width of the gated MLP that has as many parameters as a token is multiplied by in the mean block."""
    count = 0.0
    for block in blocks:
        for name, parameter in block.named_parameters():
            if name.startswith("attention.") or parameter.ndim < 2:
                continue
            share = experts_per_token / parameter.shape[0] if parameter.ndim == 3 else 1.0
            count += share * parameter.numel()
    return count / (3 * hidden * max(1, len(blocks)))
