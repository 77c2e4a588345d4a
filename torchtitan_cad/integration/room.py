# SPDX-License-Identifier: BSD-3-Clause
"""The memory of a rank that a job leaves for rows that servers keep (``cad.backward = "auto"``)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan_cad.integration.job import Job
from torchtitan_cad.planning.exchange.messages import BUFFERS_PER_CALL
from torchtitan_cad.planning.keeping import (
    FILLED,
    GRADIENT_BYTES,
    Checkpointing,
    KeepCapacity,
    Stage,
    kept_calls,
    most_working_bytes,
)

_STATES = 4
"""Tensors as large as a weight, with it: the gradient and Adam's two moments."""
_EAGER_LOGIT_BYTES = 6
"""bytes per logit that a loss which is not compiled needs more than one that is: backward of cross-entropy has the log
softmax, its gradient and that of the logits in fp32 at once."""


@dataclass(frozen=True)
class RankParts:
    """What a rank runs of a model, and how.

    Attributes:
        modules: of the model, parallelized, each with its blocks in ``layers``.
        hidden: width of the model.
        vocabulary: tokens that it knows.
        shards: ranks that FSDP2 shards parameters over.
        row_tokens: tokens of a row.
        checkpointing: what activation checkpointing computes again of layers, which take the entries in turn.
        compiles_loss: the loss is compiled, or computed in chunks.
        microbatches_in_flight: microbatches between forward and backward, at most.
    """

    modules: Sequence[Any]
    hidden: int
    vocabulary: int
    shards: int
    row_tokens: int
    checkpointing: Sequence[Checkpointing]
    compiles_loss: bool
    microbatches_in_flight: int


def blocks_of(modules: Sequence[Any]) -> list[nn.Module]:
    """Return the blocks of all parts of a model that this rank runs, in order."""
    return list(chain.from_iterable(module.layers.values() for module in modules))


def room_of(parts: RankParts, job: Job, device_bytes: float) -> KeepCapacity:
    """Return the room of this rank, whose device has ``device_bytes`` of memory."""
    topology = job.topology
    nano_batches = job.cad.nano_batches
    blocks = blocks_of(parts.modules)
    tokens = job.rows // job.microbatches * parts.row_tokens // topology.cp
    heads = job.shape.num_heads * topology.tp
    key_heads = job.shape.num_kv_heads * topology.tp
    linear = active_parameters(blocks, job.experts_per_token, ("attention.",))
    stage = Stage(
        layers=len(blocks),
        hidden=parts.hidden,
        # of the gated MLP that has as many parameters
        ffn=linear / (3 * parts.hidden * max(1, len(blocks))),
        vocabulary=parts.vocabulary,
        shape=replace(job.shape, num_heads=heads, num_kv_heads=key_heads),
        tp=topology.tp,
        in_pipeline=topology.pp > 1,
    )
    states = _state_bytes(parts, job.dtype.itemsize, in_pipeline=stage.in_pipeline)
    token_bytes = fmean(
        stage.token_bytes(kind, parts.microbatches_in_flight, nano_batches)
        for kind in parts.checkpointing
    )
    if not parts.compiles_loss:
        token_bytes += _EAGER_LOGIT_BYTES * parts.vocabulary / topology.tp
    working = most_working_bytes(
        job.shape, tokens, parts.row_tokens, documents=job.rows // job.microbatches
    )
    buffers = nano_batches * BUFFERS_PER_CALL * job.cad.buffer_bytes
    used = states + tokens * token_bytes + buffers + working
    calls = kept_calls(
        len(blocks),
        parts.microbatches_in_flight,
        nano_batches,
        checkpointing=parts.checkpointing[-1],
    )
    return KeepCapacity(FILLED * device_bytes, used, calls)


def _state_bytes(parts: RankParts, itemsize: int, *, in_pipeline: bool) -> float:
    """Return the bytes of weights, gradients and optimizer, and of what FSDP2 gathers.

    It gathers two layers at a time, beside the output's weight with its gradient, or all in a pipeline.

    Args:
        itemsize: bytes of an element of gathered parameters.
    """
    parameters = chain.from_iterable(part.parameters() for part in parts.modules)
    own = sum(
        _STATES * parameter.itemsize * _count(parameter) for parameter in parameters
    )
    if parts.shards == 1:
        return own
    with_gradient = itemsize + GRADIENT_BYTES
    if in_pipeline:
        gathered = with_gradient * sum(map(_parameters, parts.modules))
    else:
        blocks = map(_parameters, blocks_of(parts.modules))
        others = chain.from_iterable(part.named_children() for part in parts.modules)
        outside = [_parameters(module) for name, module in others if name != "layers"]
        gathered = 2 * itemsize * max(blocks, default=0)
        gathered += with_gradient * max(outside, default=0)
    return own + parts.shards * gathered


def _parameters(module: nn.Module) -> int:
    """Count the parameters that this rank holds of a module."""
    return sum(_count(parameter) for parameter in module.parameters())


def _count(parameter: torch.Tensor) -> int:
    """Count the elements that this rank holds of a parameter."""
    return (
        parameter.to_local().numel()
        if isinstance(parameter, DTensor)
        else parameter.numel()
    )


def active_parameters(
    blocks: Sequence[nn.Module], experts_per_token: int, without: tuple[str, ...] = ()
) -> float:
    """Count the parameters that a token is multiplied by in blocks, but for those whose names begin ``without``."""
    count = 0.0
    for block in blocks:
        for name, parameter in block.named_parameters():
            share = 1.0
            if parameter.ndim > 2:
                share = experts_per_token / parameter.shape[0]
            if parameter.ndim > 1 and not name.startswith(without):
                count += share * parameter.numel()
    return count
