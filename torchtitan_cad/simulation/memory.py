"""Bytes that one GPU needs, by part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

import numpy as np

from torchtitan_cad.planning import Plan
from torchtitan_cad.planning.memory import attention_memory, stock_memory
from torchtitan_cad.simulation.costs import GRADIENT_BYTES, LOGIT_BYTES, Costs
from torchtitan_cad.simulation.inputs import Model

STATE_BYTES = 16
"""Of an fp32 parameter with its gradient and Adam's two moments."""
ZERO1_BYTES = 12
"""Of the fp32 copy and the two moments, which ZeRO-1 shards."""


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest GPU."""

    states: float
    """Weights, gradients and optimizer."""
    activations: float
    """Of the microbatches in flight, with the logits."""
    gathered: float = 0.0
    """Keys and values gathered for one layer."""
    slots: float = 0.0
    """Receive buffers of exchanges."""
    attention: float = 0.0
    """Working memory of one layer's attention, planning/memory.py; taken to be there beside all else."""
    kept: float = 0.0
    """Received queries, keys and values that servers keep for backward."""

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return sum(asdict(self).values())


def activation_bytes(model: Model, nano_batches: int = 1) -> float:
    """Return the bytes kept per token and layer until backward, before TP: bf16 tensors that torchtitan's blocks save.

    Without checkpointing: inputs and outputs of both norms, Q, K, V, the attention's output, and four tensors of the
    MLP's width. Selective: the outputs of every second product and of attention, and the reduce-scatters'. Linear: the
    layer's input and the attention's output, with two nano-batches Q, K and V as well. Full: the layer's input.
    """
    hidden, wide = model.hidden, model.ffn
    query, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    match model.checkpointing:
        case "none":
            elements: float = 4 * hidden + 2 * query + 2 * keys + 4 * wide
        case "selective":
            elements = (query + 2 * keys + 2 * hidden + 2 * wide) / 2 + query + 3 * hidden
        case "linear":
            elements = hidden + query + (nano_batches == 2) * (query + 2 * keys)
        case _:
            elements = hidden
    return model.dtype_bytes * elements


def in_flight(schedule: str, pp: int, microbatches: int) -> int:
    """Count the microbatches whose activations the first pipeline rank keeps, at most."""
    return min(microbatches, 2 * (pp - 1) + 1 if schedule == "CAD1F1B" else pp)


def states(costs: Costs, group: int, pp: int) -> float:
    """Count a GPU's bytes of weights, gradients and optimizer, in a group of data- and context-parallel ranks."""
    model, cluster = costs.model, costs.cluster
    mine = model.parameters / (cluster.tp * pp)
    whole = model.dtype_bytes + GRADIENT_BYTES
    if not cluster.fsdp:
        return mine * (whole + ZERO1_BYTES / group)
    sharded = max(1, group // cluster.replicas)
    two_layers = 2 * (model.pre_parameters + model.post_parameters) / cluster.tp
    gathered = two_layers * model.dtype_bytes if pp == 1 else mine * whole
    return mine * STATE_BYTES / sharded + (gathered if sharded > 1 else 0.0)


def token_bytes(costs: Costs, layers: int, pp: int, microbatches_in_flight: int, nano_batches: int = 1) -> float:
    """Return the bytes of activations of the fullest pipeline rank per token of a microbatch."""
    model, tp = costs.model, costs.cluster.tp
    stage = layers * activation_bytes(model, nano_batches) / tp
    again = 0.0  # one layer is computed again at a time
    if model.checkpointing != "none":
        again = activation_bytes(replace(model, checkpointing="none")) / tp
    logits = model.vocabulary / tp * (model.dtype_bytes + LOGIT_BYTES)
    last = stage + logits + again
    return last if pp == 1 else max(microbatches_in_flight * stage + again, last)


def stock_attention(costs: Costs, queries: float, keys: float, documents: int) -> float:
    """Return the bytes of working memory of varlen attention on a GPU, without CAD."""
    return max(stock_memory(costs.shape, round(queries), round(keys), documents))


def working_bytes(costs: Costs, plans: Iterable[list[Plan]]) -> float:
    """Return the bytes of working memory of attention by the plans of the pool that gives a server the most rows."""
    fullest = max(plans, key=lambda pool: max(_served_rows(plan) for plan in pool))
    memory = attention_memory(fullest, receive_buffer_gb=costs.settings.receive_buffer_gb)
    return max(memory.forward, memory.backward)


def _served_rows(plan: Plan) -> float:
    tasks = plan.tasks
    rows = tasks["q_end"] - tasks["q_start"] + tasks["kv_end"] - tasks["kv_start"]
    return float(np.bincount(tasks["server"], weights=rows).max(initial=0))


def kept_bytes(costs: Costs, step_layers: int, plans: list[Plan], microbatches_in_flight: int) -> float:
    """Return the bytes that the fullest server keeps with ``backward = "keep"``, by the ``plans`` of one microbatch.

    Full checkpointing keeps those of one layer at a time.
    """
    shape = costs.shape
    element = shape.head_dim * shape.dtype_bytes
    received = sum(
        shape.num_heads * element * plan.query_needs.rows_in() + shape.kv_bytes * plan.key_needs.rows_in()
        for plan in plans
    )
    layers = 1 if costs.repeats_forward else step_layers * microbatches_in_flight
    return layers * float(np.max(received, initial=0))
