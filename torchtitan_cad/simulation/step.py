"""One step of one batch, divided in one way: what all systems have in common."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torchtitan_cad.simulation.batches import Batch, Split
from torchtitan_cad.simulation.costs import Costs
from torchtitan_cad.simulation.memory import Memory


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
        synchronisation: parameters and gradients, as far as nothing hides them, and ``seconds_per_step``.
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
        return replace(self, imbalance=max(0.0, waits), bubble=self.bubble + min(0.0, waits))


@dataclass(frozen=True)
class Outcome:
    """A system's step. ``configuration`` is what it chose; bytes are exchanged by all GPUs in the step."""

    parts: Parts
    configuration: dict[str, Any]
    memory: Memory
    exchanged_bytes: float = 0.0
    most_bytes: float = 0.0
    """Into the busiest rank, in the step."""

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.parts.total


@dataclass(frozen=True, eq=False)
class Step:
    """A batch over a pipeline of ``pp`` stages, whose ranks and microbatches are those of ``split``."""

    costs: Costs
    batch: Batch
    pp: int
    split: Split

    @property
    def ranks(self) -> int:
        """Ranks of one stage: data- and context-parallel."""
        return self.split.ranks

    @property
    def tokens(self) -> float:
        """Tokens of one microbatch on one rank."""
        return self.batch.tokens / (self.ranks * self.split.microbatches)

    @property
    def layers(self) -> int:
        """Layers of the deepest stage."""
        return -(-self.costs.model.layers // self.pp)

    @property
    def lockstep(self) -> bool:
        """Tell whether the ranks wait for each other in every microbatch, as FSDP2 gathers parameters in it."""
        return self.costs.cluster.fsdp and self.pp == 1 and self.ranks > 1

    def named(self, cp: int) -> dict[str, Any]:
        """Return the division, for reports."""
        return {
            "pp": self.pp,
            "dp": self.ranks // cp,
            "cp": cp,
            "microbatches": self.split.microbatches,
            "checkpointing": self.costs.model.checkpointing,
        }

    def regions(self, forward: bool, tp_share: float, tokens: float | None = None) -> list[float]:
        """Seconds of one microbatch's work before, between and after the attentions of a stage, TP included, head not.

        Args:
            tp_share: of TP's collectives, how much nothing hides.
            tokens: of one rank; by default those of the mean microbatch.
        """
        first, last = self.block(forward, tp_share, tokens)
        return [first, *[first + last] * (self.layers - 1), last]

    def block(self, forward: bool, tp_share: float, tokens: float | None = None) -> tuple[float, float]:
        """Seconds of one microbatch's work in a layer before and after its attention, as in ``regions``."""
        region = self.costs.regions(self.tokens if tokens is None else tokens, forward)
        pre, post = region.pre + tp_share * region.tp_pre, region.post + tp_share * region.tp_post
        return (pre, post) if forward else (post, pre)

    def head(self, forward: bool, tokens: float | None = None) -> float:
        """Seconds of one microbatch's output layer, which pipelines are taken to share evenly."""
        return self.costs.head_seconds(self.tokens if tokens is None else tokens, forward) / self.pp

    def work(self, forward: bool, tp_share: float, tokens: float | None = None) -> float:
        """Seconds of a microbatch's work of that direction on a stage, without attention; repeats are backward's."""
        total = sum(self.regions(forward, tp_share, tokens)) + self.head(forward, tokens)
        if not forward and self.costs.repeats_forward:
            total += sum(self.regions(True, tp_share, tokens))
        return total

    @cached_property
    def layer_attention(self) -> tuple[float, float]:
        """Seconds of one layer's attention of all documents on one GPU: forward, backward (with repeats)."""
        forward, backward = (float(self.costs.document_seconds(self.batch.lengths, f).sum()) for f in (True, False))
        return forward, backward + (forward if self.costs.repeats_forward else 0.0)

    @property
    def attention(self) -> float:
        """Seconds of every rank if all attention of the step were divided evenly."""
        return sum(self.layer_attention) * self.layers / self.ranks

    @cached_property
    def linear(self) -> float:
        """Seconds of one rank in the step, without TP."""
        return self.split.microbatches * sum(self.work(forward, 0.0) for forward in (True, False))

    def tp(self, share: float) -> float:
        """Return the seconds that one rank spends in TP's collectives in the step."""
        return self.split.microbatches * sum(self.work(f, share) for f in (True, False)) - self.linear

    @cached_property
    def hidden_tp_share(self) -> float:
        """Share of TP's collectives left where the halves of a microbatch hide them behind each other's work."""
        collectives = self.tp(1.0)
        return max(0.0, 1 - (self.linear + self.attention) / collectives) if collectives else 0.0

    def tp_share(self, nano_batches: int) -> float:
        """Return the share of TP's collectives that nothing hides."""
        overlaps = self.costs.settings.tp_overlap and nano_batches == 2
        return self.hidden_tp_share if overlaps else 1.0

    def background(self, forward: bool) -> float:
        """Return the seconds for which the network carries a layer's parameters and gradients during every layer."""
        return self.costs.layer_parameter_seconds(self.ranks, forward) if self.lockstep else 0.0

    def exposed_background(self, tp_share: float) -> float:
        """Return the seconds of it in the step that even work cannot hide."""
        exposed = 0.0
        for forward, attention in zip((True, False), self.layer_attention, strict=True):
            work = (self.work(forward, tp_share) - self.head(forward)) / self.layers
            layer = work + attention / (self.ranks * self.split.microbatches)
            exposed += max(0.0, self.background(forward) - layer) * self.layers * self.split.microbatches
        return exposed

    @property
    def final(self) -> float:
        """Seconds at the step's end: what FSDP2 does not do in every layer, and what does not grow with the tokens."""
        parameters = 0.0 if self.lockstep else self.costs.final_seconds(self.ranks, self.pp)
        return parameters + self.costs.rates.seconds_per_step

    def even(self, schedule: str, tp_share: float) -> Parts:
        """Return the step if every phase were balanced and nothing were exchanged for attention.

        With 1F1B attention waits in the bubble like everything else; in ticks, ranks without work of their own serve.
        """
        linear, tp, attention = self.linear, self.tp(tp_share), self.attention
        waits = linear + tp + (attention if schedule == "1F1B" else 0.0)
        bubble = waits * (self.pp - 1) / self.split.microbatches
        synchronisation = self.exposed_background(tp_share) + self.final
        return Parts(linear, attention, 0.0, 0.0, tp, bubble, synchronisation)
