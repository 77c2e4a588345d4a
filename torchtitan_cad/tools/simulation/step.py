# SPDX-License-Identifier: BSD-3-Clause
"""One step of one batch, divided in one way: what all systems have in common."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray, IntArray
from torchtitan_cad.planning.model.kind import AttentionKind, spread
from torchtitan_cad.tools.simulation.batches import Batch
from torchtitan_cad.tools.simulation.costs import Costs
from torchtitan_cad.tools.simulation.inputs import Configuration

KEPT = 256
"""results that are kept of each function whose arguments many configurations share"""


def both_ways(of_direction: Callable[[bool], Any]) -> FloatArray:
    """Stack what a function returns for forward (True) and for backward, [2, ...]."""
    return np.stack([of_direction(True), of_direction(False)])


@dataclass(frozen=True)
class Parts:
    """Seconds of a step; they add up to it.

    Attributes:
        linear: products of the layers and the head, norms, rotary embedding, activation and loss, of one rank.
        attention: all of it, divided evenly over the ranks.
        imbalance: what the slowest rank of every phase takes beyond an even share.
        exchange: rows of queries, keys and outputs on their way, as far as nothing hides it.
        tp: gathers and scatters of tensor parallelism.
        bubble: of a pipeline with equal microbatches.
        synchronisation: parameters and gradients, as far as nothing hides them.
    """

    linear: float
    attention: float
    imbalance: float
    exchange: float
    tp: float
    bubble: float
    synchronisation: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return math.fsum(vars(self).values())

    def unbalanced(self, waits: float) -> Parts:
        """Add waits to the imbalance; less than none comes of light microbatches at both ends of a pipeline."""
        return replace(
            self, imbalance=max(0.0, waits), bubble=self.bubble + min(0.0, waits)
        )


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest GPU."""

    states: float
    """Weights, gradients and optimizer."""
    activations: float
    """Activations of the microbatches in flight, with the logits."""
    gathered: float = 0.0
    """Keys and values gathered for one layer."""
    buffers: float = 0.0
    """Receive buffers of exchanges."""
    attention: float = 0.0
    """Working memory of one layer's attention, with CAD at most; taken to be there beside all else."""
    kept: float = 0.0
    """Received queries, keys and values that servers keep for backward."""

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Outcome:
    """A system's step; ``exchanged_bytes`` of all GPUs.

    ``max_over_mean``: attention forward of the slowest rank over the mean rank's, the mean over what runs together.
    """

    parts: Parts
    memory: Memory
    exchanged_bytes: float = 0.0
    max_over_mean: float = 1.0

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.parts.total


@dataclass(frozen=True, eq=False)
class Step:
    """A batch over all ranks, divided as the configuration says."""

    costs: Costs
    batch: Batch
    configuration: Configuration

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return self.configuration.pp

    @property
    def ranks(self) -> int:
        """Ranks of one stage: data- and context-parallel."""
        return self.costs.cluster.ranks // (self.costs.cluster.tp * self.pp)

    @property
    def microbatches(self) -> int:
        """Microbatches of every data-parallel rank."""
        return self.configuration.microbatches

    @property
    def rows_per_rank(self) -> int:
        """Rows of a microbatch that a group of ``cp`` ranks holds."""
        return int(self.tokens) * self.configuration.cp // self.batch.row_tokens

    @property
    def has_whole_rows(self) -> bool:
        """Tell whether every group of ``cp`` ranks gets as many rows, of which its ranks get equal parts in pairs."""
        cp = self.configuration.cp
        row = self.batch.row_tokens
        return (
            self.rows_per_rank > 0
            and self.tokens * cp % row == 0
            and row % (2 * cp) == 0
        )

    @property
    def row_order(self) -> IntArray:
        """int64 [groups of ``cp`` ranks, microbatches, rows]: rows in the order in which loaders read them."""
        shape = (
            self.ranks // self.configuration.cp,
            self.microbatches,
            self.rows_per_rank,
        )
        return np.arange(len(self.batch.rows)).reshape(shape)

    @property
    def tokens(self) -> float:
        """Tokens of one microbatch on one rank."""
        return self.batch.tokens / (self.ranks * self.microbatches)

    @property
    def layers(self) -> int:
        """Layers of the deepest stage."""
        return -(-self.costs.model.layers // self.pp)

    @cached_property
    def kinds(self) -> IntArray:
        """int64 [layers]: number of every layer's kind of attention."""
        return spread(self.costs.kinds, self.layers)

    def mean_layer(self, of_kind: Callable[[AttentionKind], Any]) -> Any:
        """Return the mean over layers of what ``of_kind`` returns, a number or an array."""
        shares = np.bincount(self.kinds, minlength=len(self.costs.kinds)) / self.layers
        return sum(
            share * of_kind(kind)
            for share, kind in zip(shares.tolist(), self.costs.kinds, strict=True)
        )

    @property
    def full_layers(self) -> float:
        """Share of the layers that attend in full."""
        return self.mean_layer(lambda kind: float(kind.name == "full"))

    @property
    def lockstep(self) -> bool:
        """Tell whether the ranks wait for each other in every microbatch, as FSDP2 gathers parameters in it."""
        return self.costs.cluster.fsdp and self.pp == 1 and self.ranks > 1

    @property
    def repeats_forward(self) -> bool:
        """Tell whether backward computes whole layers again, attention and its exchanges too."""
        return self.configuration.checkpointing == "full"

    def block(
        self, forward: bool, tokens: float | None = None, tp: bool = True
    ) -> tuple[float, float]:
        """Seconds of one microbatch's work in a layer before and after its attention, in the order of the pass.

        ``tokens`` are those of one rank, by default of the mean microbatch; ``tp`` counts TP's collectives.
        """
        tokens = self.tokens if tokens is None else tokens
        pre, post = self.costs.segments(
            tokens, forward, self.configuration.checkpointing, tp
        )
        return (pre, post) if forward else (post, pre)

    def segments(self, forward: bool, tokens: float | None = None) -> list[float]:
        """Seconds of one microbatch's work before, between and after the attentions of a stage, without the head."""
        first, last = self.block(forward, tokens)
        return [first, *[first + last] * (self.layers - 1), last]

    def head(self, forward: bool, tokens: float | None = None) -> float:
        """Seconds of one microbatch's output layer, which pipelines are taken to share evenly."""
        return (
            self.costs.head_seconds(self.tokens if tokens is None else tokens, forward)
            / self.pp
        )

    def work(
        self, forward: bool, tokens: float | None = None, tp: bool = True
    ) -> float:
        """Seconds of a microbatch's work of that direction on a stage, without attention; repeats are backward's."""
        total = self.layers * sum(self.block(forward, tokens, tp))
        total += self.head(forward, tokens)
        if not forward and self.repeats_forward:
            total += self.layers * sum(self.block(True, tokens, tp))
        return total

    def token_seconds(self, forward: bool) -> float:
        """Seconds by which a token more makes ``work`` longer, of which latencies are no part."""
        return self.work(forward, 1.0) - self.work(forward, 0.0)

    def document_attention(self, forward: bool) -> FloatArray:
        """Seconds, [documents], of the mean layer's attention of every document on one GPU."""

        return self.mean_layer(
            lambda kind: _document_seconds(self.costs, self.batch, kind, forward)
        )

    @cached_property
    def layer_attention(self) -> tuple[float, float]:
        """Seconds of the mean layer's attention of all documents on one GPU: forward, backward (with repeats)."""
        forward, backward = (
            float(self.document_attention(f).sum()) for f in (True, False)
        )
        return forward, backward + (forward if self.repeats_forward else 0.0)

    def background(self, forward: bool) -> float:
        """Return the seconds for which the network carries a layer's parameters and gradients during every layer."""
        layer = self.costs.model.gathered_parameters
        return (
            self.costs.parameter_seconds(layer, self.ranks, gradients=not forward)
            if self.lockstep
            else 0.0
        )

    def exposed_background(self) -> float:
        """Return the seconds of it in the step that even work cannot hide."""
        exposed = 0.0
        for forward, attention in zip((True, False), self.layer_attention, strict=True):
            work = (self.work(forward) - self.head(forward)) / self.layers
            layer = work + attention / (self.ranks * self.microbatches)
            exposed += (
                max(0.0, self.background(forward) - layer)
                * self.layers
                * self.microbatches
            )
        return exposed

    @property
    def final(self) -> float:
        """Seconds at the step's end: what FSDP2 does not do in every layer."""
        if self.lockstep:
            return 0.0
        parameters = self.costs.model.held_parameters / self.pp
        return self.costs.parameter_seconds(parameters, self.ranks, gradients=True)

    def even(self, schedule: str) -> Parts:
        """Return the step if every phase were balanced and nothing were exchanged for attention.

        With 1F1B attention waits in the bubble like everything else; in ticks, ranks without work of their own serve.
        """
        linear, work = (
            self.microbatches
            * sum(self.work(forward, tp=tp) for forward in (True, False))
            for tp in (False, True)
        )
        attention = sum(self.layer_attention) * self.layers / self.ranks
        waits = work + (attention if schedule == "1F1B" else 0.0)
        bubble = waits * (self.pp - 1) / self.microbatches
        return Parts(
            linear,
            attention,
            0.0,
            0.0,
            work - linear,
            bubble,
            self.exposed_background() + self.final,
        )


@lru_cache(maxsize=KEPT)
def _document_seconds(
    costs: Costs, batch: Batch, kind: AttentionKind, forward: bool
) -> FloatArray:
    """Return seconds, [documents], of one layer's attention of this kind of every document on one GPU."""
    pieces = batch.pieces(kind)
    document = np.searchsorted(np.cumsum(batch.lengths), np.cumsum(pieces))
    seconds = costs.document_seconds(pieces, forward, kind.shape.window)
    return np.bincount(document, weights=seconds).astype(np.float64)
