# SPDX-License-Identifier: BSD-3-Clause
"""Bytes that one GPU needs, by part."""

from __future__ import annotations

import numpy as np

from torchtitan_cad.planning import Plan
from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.keeping import (
    GRADIENT_BYTES,
    KeepCapacity,
    Stage,
    kept_by_setting,
    kept_calls,
    most_working_bytes,
    stock_bytes,
)
from torchtitan_cad.planning.model.shape import RowBytes
from torchtitan_cad.tools.simulation.step import Memory, Step
from torchtitan_cad.tools.simulation.working_memory import attention_bytes

COMPARED = 16
"""ranks, those with most rows, whose working memory is compared"""
STATE_BYTES = 16
"""bytes per parameter: fp32 weight, gradient and Adam's two moments."""
ZERO1_BYTES = 12
"""bytes per parameter: the fp32 copy and the two moments, which ZeRO-1 shards."""


def in_flight(step: Step, schedule: str = "1F1B") -> int:
    """Count the microbatches whose activations the first pipeline rank keeps, at most."""
    return min(
        step.microbatches, 2 * (step.pp - 1) + 1 if schedule == "CAD1F1B" else step.pp
    )


def states(step: Step) -> float:
    """Count a GPU's bytes of weights, gradients and optimizer."""
    model = step.costs.model
    cluster = step.costs.cluster
    parameters, held = (
        count / (cluster.tp * step.pp)
        for count in (model.parameters, model.held_parameters)
    )
    whole = model.dtype_bytes + GRADIENT_BYTES
    sharded = max(1, step.ranks // cluster.replicas)
    if not cluster.fsdp:
        return held * whole + parameters * ZERO1_BYTES / sharded
    two_layers = 2 * model.gathered_parameters / cluster.tp
    gathered = two_layers * model.dtype_bytes if step.pp == 1 else held * whole
    return parameters * STATE_BYTES / sharded + (gathered if sharded > 1 else 0.0)


def token_bytes(
    step: Step, microbatches_in_flight: int, nano_batches: int = 1
) -> float:
    """Return the bytes of activations of the fullest pipeline rank per token of a microbatch."""
    model = step.costs.model
    tp = step.costs.cluster.tp
    stage = Stage(
        step.layers,
        model.hidden,
        model.ffn,
        model.vocabulary,
        model.shape(1),
        tp,
        step.pp > 1,
    )
    return stage.token_bytes(
        step.configuration.checkpointing, microbatches_in_flight, nano_batches
    )


def memory_without_cad(
    step: Step, tokens: float, keys: float, documents: int, gathered: float = 0.0
) -> Memory:
    """Return the memory of a GPU whose attention has ``keys`` for ``tokens`` queries."""
    activations = tokens * token_bytes(step, in_flight(step))
    attention = stock_attention(step, tokens, keys, documents)
    return Memory(states(step), activations, gathered, attention=attention)


def stock_attention(step: Step, queries: float, keys: float, documents: int) -> float:
    """Return the bytes of working memory of varlen attention on a GPU, without CAD."""
    return stock_bytes(step.costs.shape, round(queries), round(keys), documents)


def working_bytes(kinds: list[list[Plan]], receive_buffer_gb: float | None) -> float:
    """Return the bytes of working memory of attention on the fullest GPU, by the plans of one microbatch.

    They are those of the plans that give a server the most rows. Of many ranks those with most rows are compared.
    """
    plans = max(kinds, key=lambda plans: _rows(plans).max())
    fullest = np.argsort(-_rows(plans), kind="stable")[:COMPARED]
    return attention_bytes(plans, receive_buffer_gb, fullest.tolist())


def _rows(plans: list[Plan]) -> IntArray:
    """Return int64 [ranks] local and received rows of queries and keys."""
    rows = [
        2 * plan.layout.tokens_per_rank
        + plan.query_needs.rows_in
        + plan.key_needs.rows_in
        for plan in plans
    ]
    return np.sum(rows, axis=0)


def kept_bytes_per_call(step: Step, buffers: float, in_ticks: bool) -> float:
    """Return the bytes of received rows that a server may keep in each call, by the job's ``backward``."""
    configuration = step.configuration
    nano_batches = step.configuration.nano_batches
    kept = kept_by_setting(configuration.backward, in_ticks=in_ticks)
    if kept is not None:
        return kept
    microbatches_in_flight = in_flight(step, configuration.schedule)
    activations = step.tokens * token_bytes(step, microbatches_in_flight, nano_batches)
    documents = len(step.batch.lengths) // (step.ranks * step.microbatches)
    attention = most_working_bytes(
        step.costs.shape, round(step.tokens), step.batch.row_tokens, documents
    )
    calls = kept_calls(
        step.layers, microbatches_in_flight, nano_batches, configuration.checkpointing
    )
    return KeepCapacity(
        step.costs.cluster.memory,
        states(step) + activations + buffers + attention,
        calls,
    ).bytes_per_call


def kept_bytes(
    step: Step,
    kinds: list[list[Plan]],
    microbatches_in_flight: int,
    bytes_per_call: float,
) -> float:
    """Return the bytes that the fullest server keeps for backward, by the plans of one microbatch.

    Full checkpointing keeps those of one layer at a time.
    """
    rows = RowBytes.of(step.costs.shape)
    nothing = np.zeros(kinds[0][0].layout.num_ranks, dtype=np.int64)

    def kept_rows(plan: Plan) -> tuple[IntArray, IntArray]:
        keeps = plan.most_rows.are_kept(plan.shape, bytes_per_call)
        return (
            (plan.query_needs.rows_in, plan.key_needs.rows_in)
            if keeps
            else (nothing, nothing)
        )

    moved = [[kept_rows(plan) for plan in plans] for plans in kinds]
    # [kinds, ranks]
    received = np.array([rows.forward_queries, rows.keys]) @ np.sum(moved, axis=1)
    if step.repeats_forward:
        return float(received.max())
    return microbatches_in_flight * float(received[step.kinds].sum(axis=0).max())
