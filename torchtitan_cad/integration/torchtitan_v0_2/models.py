# SPDX-License-Identifier: BSD-3-Clause
"""How each model of torchtitan 0.2.2 attends: its kinds of attention, and where its queries, keys and values are.

llama3 and qwen3 hand them to ``inner_attention``, which CAD replaces. The other models use masks of their own, so CAD
replaces ``Attention.forward``: by a projection that follows the model's code up to core attention, core attention, and
the projection of its output.
"""

import math
import types
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import parallelize_module
from torchtitan.models.attention import VarlenMetadata
from torchtitan.models.deepseek_v3.model import model as deepseek_v3
from torchtitan.models.gpt_oss.model import model as gpt_oss
from torchtitan.models.llama4.model import model as llama4
from torchtitan.protocols.train_spec import get_train_spec

from torchtitan_cad.integration.torchtitan_v0_2.blocks import (
    CoreAttentionParallel,
    TitanBlock,
    is_torchtitans,
    local,
    rows,
)
from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.runtime.ops import core_attention, core_attention_with_lse

Kind = Literal["full", "chunked", "window"]

Projected = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""q [T, Hq, D], k [T, Hkv, D - shared], v [T, Hkv, Dv] and what all heads of keys share [T, 1, shared], if anything"""


class Adapter:
    """llama3 and qwen3, and what other models have in common with them."""

    replaces_forward = False
    """Whether CAD replaces ``Attention.forward``, of a model that knows no varlen attention."""
    runs_blocks = False
    """Whether ``run_blocks`` calls the blocks, in place of the model's ``forward``."""

    def kinds(
        self, args: Any, seq_len: int, tp: int, dtype_bytes: int
    ) -> tuple[AttentionKind, ...]:
        """Return the kinds of attention of a flavor's layers, with the heads of a TP rank, for rows of ``seq_len``."""
        layers = Counter(
            self.kind_of(args, layer, seq_len) for layer in range(args.n_layers)
        )
        shape = self.shape(args, tp, dtype_bytes)
        scale = self.scale(args, seq_len)
        names: tuple[Kind, ...] = ("full", "chunked", "window")

        def kind(name: Kind) -> AttentionKind:
            of_kind = (
                replace(shape, window=args.sliding_window_size)
                if name == "window"
                else shape
            )
            block = args.fixed_attn_block_size if name == "chunked" else None
            return AttentionKind(name, layers[name], of_kind, block=block, scale=scale)

        return tuple(kind(name) for name in names if layers[name])

    def kind_of(self, args: Any, layer: int, seq_len: int) -> Kind:
        """Name the kind of attention of a layer, on rows of ``seq_len`` tokens."""
        return "full"

    def shape(self, args: Any, tp: int, dtype_bytes: int) -> AttentionShape:
        """Return the attention shape of a TP rank without a window."""
        head_dim = getattr(args, "head_dim", None) or args.dim // args.n_heads
        return AttentionShape(
            args.n_heads // tp,
            self.key_heads(args) // tp,
            head_dim,
            dtype_bytes=dtype_bytes,
        )

    def key_heads(self, args: Any) -> int:
        """Return the number of key heads of the whole model."""
        return getattr(args, "n_kv_heads", None) or args.n_heads

    def scale(self, args: Any, seq_len: int) -> float | None:
        """Return the factor on the scores of a model built for ``seq_len`` positions; None: 1 / sqrt(head_dim)."""
        return None

    def run_blocks(
        self,
        blocks: Iterable[Any],
        h: Tensor,
        rope: Tensor,
        masks: VarlenMetadata,
        positions: Tensor | None,
    ) -> Tensor:
        """Compute the last block's output from the first one's input ``h`` [B, S, dim]."""
        raise NotImplementedError

    def replace_attention(
        self, block: Any, mesh: DeviceMesh, engine: str, scale: float
    ) -> None:
        """Make ``block`` attend through the registered ``engine``, with the ``scale`` that it was built for."""
        parallelize_module(
            block.attention.inner_attention, mesh, CoreAttentionParallel(engine, scale)
        )

    def view(self, block: Any, engine: str) -> TitanBlock:
        """Return the block as ping-pong runs it."""
        return TitanBlock(block)


class _ByProjection(Adapter):
    replaces_forward = True
    has_sinks = False
    """Whether a learned sink takes part of every head's attention."""

    def project(
        self, attention: Any, x: Tensor, rope: Tensor, positions: Tensor | None
    ) -> Projected:
        """Project x [B, S, dim] to rows of queries, keys and values, rotated."""
        raise NotImplementedError

    def replace_attention(
        self, block: Any, mesh: DeviceMesh, engine: str, scale: float
    ) -> None:
        attention = block.attention
        adapter = self
        own = getattr(attention, "softmax_scale", scale)
        if abs(own - scale) > 1e-6 * scale:
            raise ValueError(
                f"attention scale {own} differs from {scale}, with which CAD was built"
            )

        def forward(
            self: Any,
            x: Tensor,
            rope: Tensor,
            masks: VarlenMetadata,
            positions: Tensor | None = None,
        ) -> Tensor:
            q, k, v, shared = adapter.project(self, x, rope, positions)
            if adapter.has_sinks:
                out = _feed_sinks(
                    self,
                    *core_attention_with_lse(
                        q, k, v, plan_key=masks.cu_seq_q, engine=engine, shared=shared
                    ),
                )
            else:
                out = core_attention(
                    q, k, v, plan_key=masks.cu_seq_q, engine=engine, shared=shared
                )
            return self.wo(out.reshape(*x.shape[:2], -1))

        attention.forward = types.MethodType(forward, attention)

    def view(self, block: Any, engine: str) -> TitanBlock:
        return _ProjectedBlock(block, self, engine)


def _feed_sinks(attention: Any, out: Tensor, lse: Tensor) -> Tensor:
    """Return core attention's output [T, Hq, D] less what the sinks take, for its log-sum-exp [T, Hq]."""
    return out * torch.sigmoid(lse - local(attention.sinks)).unsqueeze(-1).to(out.dtype)


class _ProjectedBlock(TitanBlock):
    """A ``BlockView`` of a block whose adapter projects."""

    def __init__(self, block: Any, adapter: _ByProjection, engine: str) -> None:
        super().__init__(block)
        self.adapter = adapter
        self.engine = engine
        if adapter.has_sinks:
            self.rescale = partial(_feed_sinks, block.attention)

        def forward(
            self: Any,
            x: Tensor,
            rope: Tensor,
            masks: None,
            positions: Tensor | None = None,
        ) -> Projected:
            return adapter.project(self, x, rope, positions)

        block.attention.forward = types.MethodType(forward, block.attention)

    def take_core(self) -> None:
        """Leave the attention module to the constructor."""

    def project(
        self, x: Tensor, rope: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, ...]:
        normed = self.block.attention_norm(x)
        if self.adapter.runs_blocks:  # attention takes no positions
            return self.block.attention(
                normed, rope if positions is None else rope[positions], None
            )
        return self.block.attention(normed, rope, None, positions)


class DeepSeekV3(_ByProjection):
    """Multi-head latent attention: values have other sizes than keys, whose rotary part all heads share."""

    def shape(self, args: Any, tp: int, dtype_bytes: int) -> AttentionShape:
        heads = args.n_heads // tp
        key_dim = args.qk_nope_head_dim + args.qk_rope_head_dim
        return AttentionShape(
            heads,
            heads,
            key_dim,
            dtype_bytes=dtype_bytes,
            value_dim=args.v_head_dim,
            shared_dim=args.qk_rope_head_dim,
        )

    def scale(self, args: Any, seq_len: int) -> float:
        mscale = (
            0.1 * args.mscale * math.log(args.rope_factor) + 1.0
            if seq_len > args.original_seq_len
            else 1.0
        )
        return self.shape(args, 1, 1).head_dim ** -0.5 * mscale * mscale

    def project(
        self, attention: Any, x: Tensor, rope: Tensor, positions: Tensor | None
    ) -> Projected:
        rotate = deepseek_v3.apply_rotary_emb
        nope = attention.qk_nope_head_dim
        rotary = attention.qk_rope_head_dim
        value = attention.v_head_dim
        q = (
            attention.wq(x)
            if attention.q_lora_rank == 0
            else attention.wq_b(attention.q_norm(attention.wq_a(x)))
        )
        q = q.view(*x.shape[:2], -1, nope + rotary)
        q, q_rotary = q.split([nope, rotary], dim=-1)
        q = torch.cat((q, rotate(q_rotary, rope, positions)), dim=-1)
        latent, k_rotary = attention.wkv_a(x).split(
            [attention.kv_lora_rank, rotary], dim=-1
        )
        shared = rotate(k_rotary.unsqueeze(2), rope, positions)
        # every TP rank adds what its heads contribute to the gradient
        if isinstance(shared, DTensor):
            shared = shared.to_local(grad_placements=[Partial()])
        kv = attention.wkv_b(attention.kv_norm(latent))
        kv = kv.view(*x.shape[:2], -1, nope + value)
        k, v = kv.split([nope, value], dim=-1)
        return rows(q), rows(k), rows(v), shared.flatten(0, 1)


class Llama4(_ByProjection):
    """Layers with rotary positions attend within blocks of the row, those without to all of the document before."""

    def kind_of(self, args: Any, layer: int, seq_len: int) -> Kind:
        period = args.every_n_layers_nope
        block = args.fixed_attn_block_size
        return (
            "full"
            if period is None or layer % period == 0 or seq_len <= block
            else "chunked"
        )

    def project(
        self, attention: Any, x: Tensor, rope: Tensor, positions: Tensor | None
    ) -> Projected:
        linears = attention.wq, attention.wk, attention.wv
        q, k, v = (
            linear(x).view(*x.shape[:2], -1, attention.head_dim) for linear in linears
        )
        if attention.use_rope:
            q, k = llama4.apply_rotary_emb(q, k, freqs_cis=rope, positions=positions)
        return rows(q), rows(k), rows(v), None


class GptOss(_ByProjection):
    """Every other layer sees a sliding window; a learned sink takes part of every head's attention."""

    has_sinks = runs_blocks = True

    def kind_of(self, args: Any, layer: int, seq_len: int) -> Kind:
        return (
            "full"
            if layer % 2 == 1 or seq_len <= args.sliding_window_size
            else "window"
        )

    def run_blocks(
        self,
        blocks: Iterable[Any],
        h: Tensor,
        rope: Tensor,
        masks: VarlenMetadata,
        positions: Tensor | None,
    ) -> Tensor:
        # blocks take no positions
        rope = rope if positions is None else rope[positions]
        by_name = dict.fromkeys(("basic_mask", "sliding_window_mask"), masks)
        for block in blocks:
            h = block(h, rope, by_name)
        return h

    def project(
        self, attention: Any, x: Tensor, rope: Tensor, positions: Tensor | None
    ) -> Projected:
        linears = (attention.wq, attention.wk, attention.wv)
        rope = local(rope)
        q, k, v = (
            local(linear(x)).view(*x.shape[:2], -1, attention.head_dim)
            for linear in linears
        )
        rope = rope[: x.shape[1]] if rope.ndim == 2 else rope
        cos, sin = rope.to(q.dtype).unsqueeze(-2).chunk(2, dim=-1)
        q, k = (heads * cos + gpt_oss.rotate_half(heads) * sin for heads in (q, k))
        return rows(q), rows(k), rows(v), None


ADAPTERS: dict[str, Adapter] = {
    "llama3": Adapter(),
    "qwen3": Adapter(),
    "deepseek_v3": DeepSeekV3(),
    "llama4": Llama4(),
    "gpt_oss": GptOss(),
}
"""What CAD knows of torchtitan's models, by ``model.name``."""


def adapter_of(name: str) -> Adapter | None:
    """Return what CAD knows of a model, or of the one whose class and masks a registered ``TrainSpec``'s has."""
    try:
        model_cls = get_train_spec(name).model_cls
    except Exception:
        # unknown, or whatever importing one of torchtitan's experiments raises
        return None
    adapter = getattr(model_cls, "adapter", None)
    if isinstance(adapter, Adapter):  # CAD's own class, of a job that is being built
        return adapter
    for known, adapter in ADAPTERS.items():
        module = import_module(f"torchtitan.models.{known}")
        known_cls = module.get_train_spec().model_cls
        if issubclass(model_cls, known_cls):
            masks = model_cls.get_attention_masks
            return adapter if masks is known_cls.get_attention_masks else None
    return None


def check_forwards(model: Any, *, halves: bool) -> None:
    """Raise ValueError for a ``forward`` of a user's own that CAD would replace by torchtitan's.

    Args:
        model: an instance of ``cad_model_class``.
        halves: whether there are two nano-batches.
    """
    adapter = model.adapter
    blocks = list(model.layers.values())
    own_cls: Any = type(model).__mro__[1]
    of_model = [own_cls.forward]
    of_blocks = [block.forward for block in blocks]
    of_attention = [block.attention.forward for block in blocks]
    replaced = [block.attention.inner_attention.forward for block in blocks]
    if "forward" in vars(model):  # it would hide that of CAD's class
        replaced.append(model.forward)
    if adapter.runs_blocks:
        replaced += of_model
    if adapter.replaces_forward:
        replaced += of_attention
    _refuse_own(replaced, "parallelism.cad to false")
    if halves:
        by_halves = [*of_model, *of_blocks, *of_attention]
        _refuse_own(by_halves, "cad.nano_batches to 1")


def _refuse_own(forwards: Iterable[Any], remedy: str) -> None:
    for forward in forwards:
        if not is_torchtitans(forward):
            name = getattr(forward, "__qualname__", type(forward).__name__)
            raise ValueError(
                f"{name} is a model's own, and CAD would replace it by that of torchtitan's model; "
                f"keep torchtitan's, or set {remedy}"
            )


def has_experts(args: Any) -> bool:
    """Tell whether a flavor has mixtures of experts; only qwen3 has flavors of both kinds."""
    return getattr(args, "moe_enabled", hasattr(args, "moe_args"))
