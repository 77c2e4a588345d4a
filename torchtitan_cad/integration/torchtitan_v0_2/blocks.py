# SPDX-License-Identifier: BSD-3-Clause
"""The attention and blocks of torchtitan 0.2.2's models as CAD runs them, whole or as ping-pong sees them
(integration/pingpong/block.py).

The code of blocks follows ``TransformerBlock``, which the models differ in only by their MLPs or experts.
"""

import dataclasses
import types
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torchtitan.config import JobConfig
from torchtitan.models.attention import VarlenMetadata

from torchtitan_cad.integration.pingpong.loop import PingPong
from torchtitan_cad.integration.torchtitan_v0_2.models import (
    Adapter,
    Projected,
    feed_sinks,
)
from torchtitan_cad.runtime.ops import core_attention


def replace_attention(attention: Any, adapter: Adapter, engine: str) -> None:
    """Make an attention module attend through the registered ``engine``.

    Its masks [B, S] are a ``VarlenMetadata`` whose ``cu_seq_q`` is the plan's key. The module keeps its class, its
    parameters and the hooks that tensor parallelism sets.
    """

    def forward(
        self: Any,
        x: Tensor,
        rope: Tensor,
        masks: VarlenMetadata,
        positions: Tensor | None = None,
    ) -> Tensor:
        q, k, v, *others = adapter.project(self, x, rope, positions)
        shared = others[0] if others else None
        out, lse = core_attention(
            q, k, v, plan_key=masks.cu_seq_q, engine=engine, shared=shared
        )
        if adapter.has_sinks:
            out = feed_sinks(self, out, lse)
        return self.wo(out.reshape(*x.shape[:2], -1))

    attention.forward = types.MethodType(forward, attention)


class TitanBlock(nn.Module):
    """A ``BlockView`` of a ``TransformerBlock``, from whose ``Attention`` it takes the core.

    The attention module afterwards returns q, k and v rows and does nothing else, under its own hooks, which tensor
    parallelism sets.

    Args:
        block: before tensor parallelism, activation checkpointing, compile and FSDP2; ``fully_shard`` makes an FSDP
            module of it in place, so it stays the same object.
        adapter: of the block's model.
        engine: name of the engine of the block's kind of attention.
    """

    rescale: Callable[[Tensor, Tensor], Tensor] | None = None

    def __init__(self, block: nn.Module, adapter: Adapter, engine: str) -> None:
        super().__init__()
        self.block: Any = block
        self.adapter = adapter
        self.engine = engine
        self.traceable = not getattr(block, "moe_enabled", False)
        self.graphs: tuple[str, ...] = (
            "project",
            "finish" if self.traceable else "add_attention",
        )
        attention: Any = block.attention
        if adapter.has_sinks:
            self.rescale = partial(feed_sinks, attention)

        def forward(
            self: Any,
            x: Tensor,
            rope: Tensor,
            masks: None,
            positions: Tensor | None = None,
        ) -> Projected:
            return adapter.project(self, x, rope, positions)

        attention.forward = types.MethodType(forward, attention)

    def project(
        self, x: Tensor, rope: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, ...]:
        normed = self.block.attention_norm(x)
        if self.adapter.takes_positions:
            return self.block.attention(normed, rope, None, positions)
        return self.block.attention(normed, rows_of_table(rope, positions), None)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        h, normed = self.add_attention(x, attended)
        mlp = self.block.feed_forward if self.traceable else self.block.moe
        return h + mlp(normed)

    def add_attention(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Do what comes before the MLP or the experts; return the residual and its norm, [B, S, dim] each."""
        h = x + self.block.attention.wo(attended)
        return h, self.block.ffn_norm(h)


def rows_of_table(rope: Tensor, positions: Tensor | None) -> Tensor:
    """Return the rotations of [B, S] positions, for blocks that take none; all where no token has moved."""
    return rope if positions is None else rope[positions]


def checkpointing(config: JobConfig) -> Any:
    """Return the section ``activation_checkpoint`` that torchtitan is given.

    Checkpointing of whole blocks that does not repeat core attention is one by operator.
    """
    section = config.activation_checkpoint
    if section.mode != "full" or config.cad.recompute_attention:
        return section
    return dataclasses.replace(section, mode="selective", selective_ac_option="op")


def selects_operators(config: Any) -> bool:
    """Tell whether a section ``activation_checkpoint`` keeps outputs of chosen operators, such as core attention's."""
    return config.mode == "selective" and config.selective_ac_option == "op"


def _model_of(layers: dict[str, nn.Module]) -> Any:
    """Return what torchtitan's functions take for a model with these layers."""
    model = nn.Module()
    model.layers = nn.ModuleDict(layers)
    return model


def apply_compile(
    pingpong: PingPong,
    apply: Callable[..., None],
    _: nn.Module,
    config: Any,
    *options: Any,
) -> None:
    """Compile what the loop runs, and of experts what torchtitan's ``apply`` compiles."""
    experts: dict[str, nn.Module] = {}
    for i, view in enumerate(pingpong.blocks):
        if not view.traceable:
            layer: Any = nn.Module()
            layer.moe_enabled = True
            layer.moe = view.block.moe
            experts[str(i)] = layer
    if experts:
        apply(_model_of(experts), config, *options)
    pingpong.compile(config.backend)


def apply_ac(
    pingpong: PingPong, apply: Callable[..., None], config: Any, **options: Any
) -> None:
    """Apply torchtitan's activation checkpointing ``apply(model, config, **options)`` to what the loop runs."""

    def wrap(modules: list[nn.Module]) -> list[nn.Module]:
        stand_in = _model_of({str(i): module for i, module in enumerate(modules)})
        apply(stand_in, config, **options)
        return list(stand_in.layers.values())

    recomputes = config.mode in ("full", "selective")
    whole_blocks = recomputes and not selects_operators(config)
    pingpong.checkpoint(wrap, whole_blocks=whole_blocks)
