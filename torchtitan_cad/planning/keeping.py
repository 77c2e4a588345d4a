# SPDX-License-Identifier: BSD-3-Clause
"""What servers keep for backward where memory has room (``backward = "auto"``).

A server that keeps the queries, keys and values of a call spares their way in backward and holds them until then. All
calls whose backward is still to come share the room, so each may keep an equal part of it. Whether a plan's rows fit
into that part depends on the rank that receives most (``MostRows.kept_bytes``): all ranks decide alike, plan by plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.model.shape import AttentionShape, RowBytes

Checkpointing = Literal["none", "selective", "linear", "full"]
"""Activation checkpointing: of nothing, every second matrix product, all but core attention, or whole layers."""
CHECKPOINTING: tuple[Checkpointing, ...] = get_args(Checkpointing)

_Count = TypeVar("_Count", int, IntArray)

FILLED = 0.9
"""of a device's memory: what a job can fill, beside the allocator's gaps and communicators."""
GRADIENT_BYTES = 4
"""bytes per parameter of a gradient that is not sharded."""
LOGIT_BYTES = 4
"""bytes: the fp32 copy of a logit."""
_FP32_BYTES = 4
_TASK_ROWS = 128
"""rows that FlashAttention-2 adds to every document in its fp32 dQ"""
_WORKING = 3
"""Working memory of core attention of a layer, at most, over that of stock attention of a rank's tokens."""
_WORKING_OF_ROW = 2
"""The same over that of stock attention of a rank's tokens to a whole row, which ranks share: 1.9 where eight ranks
share rows of 256K."""


@dataclass(frozen=True)
class KeepCapacity:
    """Memory of the fullest device, and the calls of core attention that share what is left of it.

    Attributes:
        filled: bytes of the device that a job can fill.
        used: bytes of all but kept rows.
        calls: most calls of a rank whose backward is still to come: layers, microbatches in flight, nano-batches.
    """

    filled: float
    used: float
    calls: int

    @property
    def bytes_per_call(self) -> float:
        """Bytes of received rows that a server may keep in each call."""
        # A stage may have no layer.
        return max(0.0, self.filled - self.used) / max(1, self.calls)

    def describe(self) -> str:
        """Say what may be kept, in one line."""
        used = f"the job is taken to need {self.used / 1e9:.1f} of {self.filled / 1e9:.1f} GB without them"
        if not self.bytes_per_call:
            return f"rows travel again for backward ({used})"
        whole = self.calls * self.bytes_per_call / 1e9
        return f"servers keep rows of up to {self.bytes_per_call / 1e9:.2f} GB a call, {whole:.1f} GB in all ({used})"


def most_working_bytes(
    shape: AttentionShape, tokens: int, row_tokens: int, documents: int
) -> float:
    """Return the bytes of working memory of a layer's core attention, at most.

    Args:
        shape: of a rank.
        tokens: of a rank.
        row_tokens: of a row, which documents do not exceed.
        documents: of a rank.
    """
    of_tokens = stock_bytes(shape, tokens, tokens, documents)
    of_row = stock_bytes(shape, tokens, row_tokens, documents)
    return float(max(_WORKING * of_tokens, _WORKING_OF_ROW * of_row))


def stock_bytes(
    shape: AttentionShape, queries: _Count, keys: _Count, documents: _Count
) -> _Count:
    """Return the bytes of working memory of FlashAttention-2's backward in one call, without CAD.

    Counts of rows and documents are numbers, or arrays of equal shape.

    They are the gradients, dQ in fp32 with its row sums and, if query heads share keys, dK and dV of every query head.
    Where heads of values are narrower than those of keys, all rows are copied as wide as the wider.
    """
    heads = shape.num_heads
    rows = RowBytes.of(shape)
    gradients = queries * rows.query_gradients + keys * rows.key_gradients
    fp32_row = heads * (shape.head_dim + 1) * max(_FP32_BYTES, shape.dtype_bytes)
    accumulated = (queries + _TASK_ROWS * documents) * fp32_row
    expanded = 0 * keys
    if heads > shape.num_kv_heads:
        expanded = keys * heads * (shape.head_dim + shape.out_dim) * shape.dtype_bytes
    padded = 0 * keys
    if shape.out_dim != shape.head_dim:
        padded_rows = queries * heads + keys * shape.num_kv_heads
        widest = max(shape.head_dim, shape.out_dim) * shape.dtype_bytes
        padded = 2 * padded_rows * widest
    return gradients + accumulated + expanded + padded


def kept_by_setting(backward: str, *, in_ticks: bool) -> float | None:
    """Return the bytes of rows that servers may keep in a call; None if the room for them decides.

    Args:
        backward: "auto", "resend" or "keep".
        in_ticks: True in a pipeline in ticks, where backward meets other microbatches than forward did.
    """
    if backward == "keep":
        return math.inf
    return 0.0 if backward == "resend" or in_ticks else None


def kept_calls(
    layers: int,
    microbatches_in_flight: int,
    nano_batches: int,
    checkpointing: Checkpointing,
) -> int:
    """Count the calls of core attention that wait for their backward; recomputed layers keep those of one layer."""
    if checkpointing == "full":
        return nano_batches
    return layers * microbatches_in_flight * nano_batches


@dataclass(frozen=True)
class Stage:
    """What a rank runs of a model.

    Attributes:
        layers: of this rank.
        hidden: width of the hidden state.
        ffn: width of the gated MLP, or of the experts that a token passes through.
        vocabulary: tokens of it.
        shape: of all heads.
        tp: tensor-parallel ranks.
        in_pipeline: other ranks run other layers.
    """

    layers: float
    hidden: int
    ffn: float
    vocabulary: int
    shape: AttentionShape
    tp: int
    in_pipeline: bool

    def token_bytes(
        self,
        checkpointing: Checkpointing,
        microbatches_in_flight: int,
        nano_batches: int = 1,
    ) -> float:
        """Return the bytes of activations, on the fullest rank of a pipeline, per token of a microbatch."""
        of_layers = self.layers * self.layer_bytes(checkpointing, nano_batches)
        # One layer is computed again at a time.
        again = 0.0 if checkpointing == "none" else self.layer_bytes("none")
        logits = self.vocabulary / self.tp * (self.shape.dtype_bytes + LOGIT_BYTES)
        last = of_layers + logits + again
        return (
            max(microbatches_in_flight * of_layers + again, last)
            if self.in_pipeline
            else last
        )

    def layer_bytes(self, checkpointing: Checkpointing, nano_batches: int = 1) -> float:
        """Return the bytes kept per token and layer until backward: bf16 tensors that torchtitan's blocks save.

        Without checkpointing: inputs and outputs of both norms, Q, K, V, the attention's output, and four tensors of
        the MLP's width. Selective: the outputs of every second product and of attention, and the reduce-scatters'.
        Linear: the layer's input and the attention's output, with two nano-batches Q, K and V as well. Full: the
        layer's input.
        """
        shape = self.shape
        hidden = self.hidden
        ffn = self.ffn
        output = shape.num_heads * shape.out_dim
        keys = shape.num_kv_heads * (shape.key_dim + shape.out_dim) + shape.shared_dim
        attended = shape.num_heads * shape.head_dim + keys
        elements = {
            "none": 4 * hidden + attended + output + 4 * ffn,
            "selective": (attended + 2 * hidden + 2 * ffn) / 2 + output + 3 * hidden,
            "linear": hidden + output + (nano_batches == 2) * attended,
            "full": hidden,
        }
        return shape.dtype_bytes * elements[checkpointing] / self.tp
