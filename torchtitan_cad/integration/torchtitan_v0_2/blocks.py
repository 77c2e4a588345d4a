# SPDX-License-Identifier: BSD-3-Clause
"""The attention of torchtitan 0.2.2's models as CAD runs it, and the blocks of its llama3 and qwen3 as ping-pong sees
them (integration/pingpong/block.py).

The code of blocks follows ``TransformerBlock`` and ``Attention`` of torchtitan.models.llama3.model and
torchtitan.models.qwen3.model, which differ only in the norms of queries and keys, and in qwen3's experts.
"""

import dataclasses
import sys
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torchtitan.config import JobConfig
from torchtitan.models.attention import VarlenMetadata

from torchtitan_cad.integration.pingpong.loop import PingPong
from torchtitan_cad.runtime.ops import core_attention

_TORCHTITANS = (
    "torchtitan.models.attention",
    "torchtitan.models.llama3.",
    "torchtitan.models.qwen3.",
    "torchtitan.models.deepseek_v3.",
    "torchtitan.models.llama4.",
    "torchtitan.models.gpt_oss.",
)
"""how modules of code begin that CAD stands in for; a fork may have models of its own beside them"""


class CoreAttentionParallel(ParallelStyle):
    """Executes a module's attention through a core-attention engine.

    The module keeps its class and has no parameters; only its ``forward`` is replaced. It is called as torchtitan
    0.2.2 calls varlen attention (models/llama3/model/model.py): xq, xk, xv [B, H, S, D] and a ``VarlenMetadata``, here
    one whose ``cu_seq_q`` is the plan's key. Inputs may be plain tensors (llama3) or DTensors sharded over heads
    (qwen3 under TP); the output is of the same kind, [B, S, H, D].

    Args:
        engine: name of the registered ``CoreAttentionEngine`` of the CAD mesh.
        scale: the engine's factor on the scores; a module that asks for another one is an error.
    """

    def __init__(self, engine: str, scale: float) -> None:
        super().__init__()
        self.engine = engine
        self.scale = scale

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        engine = self.engine
        engine_scale = self.scale

        def forward(
            self: nn.Module,
            xq: Tensor,
            xk: Tensor,
            xv: Tensor,
            attention_masks: VarlenMetadata,
            scale: float | None = None,
        ) -> Tensor:
            if scale is not None and abs(scale - engine_scale) > 1e-6 * engine_scale:
                raise ValueError(
                    f"attention scale {scale} differs from {engine_scale}, with which CAD was built"
                )
            # autocast leaves norms of queries and keys in fp32
            q, k, v = (
                rows(local(x).transpose(1, 2).to(xv.dtype)) for x in (xq, xk, xv)
            )
            out = core_attention(
                q, k, v, plan_key=attention_masks.cu_seq_q, engine=engine
            )
            out = out.view(xq.shape[0], xq.shape[2], *out.shape[1:])
            if isinstance(xq, DTensor):
                out = DTensor.from_local(
                    out, xq.device_mesh, [Shard(2)], run_check=False
                )
            return out

        module.forward = types.MethodType(forward, module)
        return module


class TitanBlock(nn.Module):
    """A ``BlockView`` of a ``TransformerBlock``, from whose ``Attention`` it takes the core.

    The attention module afterwards returns q, k and v rows and does nothing else, under its own hooks, which tensor
    parallelism sets.

    Args:
        block: before tensor parallelism, activation checkpointing, compile and FSDP2; ``fully_shard`` makes an FSDP
            module of it in place, so it stays the same object.
    """

    engine = ""
    rescale: Callable[[Tensor, Tensor], Tensor] | None = None

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block: Any = block
        self.traceable = not getattr(block, "moe_enabled", False)
        self.graphs: tuple[str, ...] = (
            "project",
            "finish" if self.traceable else "add_attention",
        )
        self.take_core()

    def take_core(self) -> None:
        """Make the attention module return what core attention takes."""
        attention: Any = self.block.attention
        module = sys.modules[type(attention).forward.__module__]
        attention.rotate = module.apply_rotary_emb
        attention.forward = types.MethodType(_project, attention)

    def project(
        self, x: Tensor, rope: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, ...]:
        return self.block.attention(self.block.attention_norm(x), rope, None, positions)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        h, normed = self.add_attention(x, attended)
        return h + (
            self.block.feed_forward(normed)
            if self.traceable
            else self.block.moe(normed)
        )

    def add_attention(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Do what comes before the MLP or the experts; return the residual and its norm, [B, S, dim] each."""
        h = x + self.block.attention.wo(attended)
        return h, self.block.ffn_norm(h)


def is_torchtitans(forward: Any) -> bool:
    """Tell whether a module's ``forward`` is code that CAD stands in for, and none of a user's own."""
    return forward.__module__.startswith(_TORCHTITANS)


def _project(
    self: Any,
    x: Tensor,
    rope: Tensor,
    attention_masks: None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Project x to q, k and v rows, in place of ``Attention.forward``."""
    projected = (linear(x) for linear in (self.wq, self.wk, self.wv))
    q, k, v = (y.view(*y.shape[:2], -1, self.head_dim) for y in projected)
    if getattr(self, "q_norm", None) is not None:  # of qwen3, with k_norm
        q = self.q_norm(q)
        k = self.k_norm(k)
    if not isinstance(rope, DTensor):
        q = local(q)
        k = local(k)
    q, k = self.rotate(q, k, rope, positions=positions)
    # autocast leaves norms of queries and keys in fp32
    return rows(q.to(v.dtype)), rows(k.to(v.dtype)), rows(v)


def rows(x: Tensor) -> Tensor:
    """[B, S, H, D], possibly a DTensor sharded over H, to this rank's [B * S, H_local, D]."""
    return local(x).flatten(0, 1)


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


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


def apply_compile(
    pingpong: PingPong,
    apply: Callable[..., None],
    _: nn.Module,
    config: Any,
    *options: Any,
) -> None:
    """Compile what the loop runs, and of experts what torchtitan's ``apply`` compiles."""
    stand_in = nn.Module()
    stand_in.layers = nn.ModuleDict()
    for i, view in enumerate(pingpong.blocks):
        if not view.traceable:
            layer: Any = nn.Module()
            layer.moe_enabled = True
            layer.moe = view.block.moe
            stand_in.layers[str(i)] = layer
    if stand_in.layers:
        apply(stand_in, config, *options)
    pingpong.compile(config.backend)


def apply_ac(
    pingpong: PingPong, apply: Callable[..., None], config: Any, **options: Any
) -> None:
    """Apply torchtitan's activation checkpointing ``apply(model, config, **options)`` to what the loop runs."""

    def wrap(modules: list[nn.Module]) -> list[nn.Module]:
        stand_in = nn.Module()
        stand_in.layers = nn.ModuleDict(
            {str(i): module for i, module in enumerate(modules)}
        )
        apply(stand_in, config, **options)
        return list(stand_in.layers.values())

    recomputes = config.mode in ("full", "selective")
    whole_blocks = recomputes and not selects_operators(config)
    pingpong.checkpoint(wrap, whole_blocks=whole_blocks)
