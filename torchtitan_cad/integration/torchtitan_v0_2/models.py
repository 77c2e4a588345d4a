# SPDX-License-Identifier: BSD-3-Clause
"""How each model of torchtitan 0.2.2 attends: its kinds of attention, and where its queries, keys and values are.

CAD replaces every ``Attention.forward``: by a projection that follows the model's code up to core attention, core
attention, and the projection of its output. ``ADAPTERS`` is the table of what models differ in.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torchtitan.models.deepseek_v3.model import model as deepseek_v3
from torchtitan.models.gpt_oss.model import model as gpt_oss
from torchtitan.models.llama3.model import model as llama3
from torchtitan.models.llama4.model import model as llama4
from torchtitan.models.qwen3.model import model as qwen3
from torchtitan.protocols.train_spec import get_train_spec

from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.planning.model.kind import AttentionKind

Kind = Literal["full", "chunked", "window"]

Projected = tuple[Tensor, ...]
"""q [T, Hq, D], k [T, Hkv, D - shared], v [T, Hkv, Dv], and what all heads of keys share [T, 1, shared] if anything"""

_KINDS: tuple[Kind, ...] = get_args(Kind)
_TORCHTITANS = (
    "torchtitan.models.attention",
    "torchtitan.models.llama3.",
    "torchtitan.models.qwen3.",
    "torchtitan.models.deepseek_v3.",
    "torchtitan.models.llama4.",
    "torchtitan.models.gpt_oss.",
)
"""how modules of code begin that CAD stands in for; a fork may have models of its own beside them"""


def _attend_in_full(args: Any, layer: int, seq_len: int) -> Kind:
    return "full"


def _attend_in_chunks(args: Any, layer: int, seq_len: int) -> Kind:
    """Layers with rotary positions attend within blocks of the row, those without to all of the document before."""
    period = args.every_n_layers_nope
    is_full = period is None or layer % period == 0
    return "full" if is_full or seq_len <= args.fixed_attn_block_size else "chunked"


def _attend_in_windows(args: Any, layer: int, seq_len: int) -> Kind:
    """Every other layer sees a sliding window."""
    is_full = layer % 2 == 1 or seq_len <= args.sliding_window_size
    return "full" if is_full else "window"


def _shape_of_heads(args: Any, tp: int, dtype_bytes: int) -> AttentionShape:
    head_dim = getattr(args, "head_dim", None) or args.dim // args.n_heads
    return AttentionShape(
        args.n_heads // tp, key_heads(args) // tp, head_dim, dtype_bytes=dtype_bytes
    )


def _shape_of_latents(args: Any, tp: int, dtype_bytes: int) -> AttentionShape:
    """Values have other sizes than keys, whose rotary part all heads share."""
    heads = args.n_heads // tp
    return AttentionShape(
        heads,
        heads,
        args.qk_nope_head_dim + args.qk_rope_head_dim,
        dtype_bytes=dtype_bytes,
        value_dim=args.v_head_dim,
        shared_dim=args.qk_rope_head_dim,
    )


def _scale_of_latents(args: Any, seq_len: int) -> float:
    mscale = 1.0
    if seq_len > args.original_seq_len:
        mscale = 0.1 * args.mscale * math.log(args.rope_factor) + 1.0
    return _shape_of_latents(args, 1, 1).head_dim ** -0.5 * mscale * mscale


def _project(
    attention: Any,
    x: Tensor,
    rope: Tensor,
    positions: Tensor | None,
    rotate: Callable[..., tuple[Tensor, Tensor]],
) -> Projected:
    """Project x by ``wq``, ``wk`` and ``wv``, with qwen3's norms of queries and keys; ``rotate`` is the model's."""
    linears = (attention.wq, attention.wk, attention.wv)
    q, k, v = (
        linear(x).view(*x.shape[:2], -1, attention.head_dim) for linear in linears
    )
    if getattr(attention, "q_norm", None) is not None:
        q = attention.q_norm(q)
        k = attention.k_norm(k)
    q = local(q)
    k = local(k)
    if getattr(attention, "use_rope", True):  # llama4's layers may have none
        q, k = rotate(q, k, local(rope), local(positions))
    # autocast leaves norms of queries and keys in fp32
    return rows(q.to(v.dtype)), rows(k.to(v.dtype)), rows(v)


def _rotate_gpt_oss(
    q: Tensor, k: Tensor, rope: Tensor, positions: None
) -> tuple[Tensor, Tensor]:
    """Rotate by a table of all positions [S, 2 D] or by rows that were taken for tokens [B, S, 2 D]."""
    rope = rope[: q.shape[1]] if rope.ndim == 2 else rope
    cos, sin = rope.to(q.dtype).unsqueeze(-2).chunk(2, dim=-1)
    q, k = (heads * cos + gpt_oss.rotate_half(heads) * sin for heads in (q, k))
    return q, k


def _project_latents(
    attention: Any, x: Tensor, rope: Tensor, positions: Tensor | None
) -> Projected:
    """Project x through deepseek_v3's latents."""
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


def feed_sinks(attention: Any, out: Tensor, lse: Tensor) -> Tensor:
    """Return core attention's output [T, Hq, D] less what gpt_oss's sinks take, for its log-sum-exp [T, Hq]."""
    return out * torch.sigmoid(lse - local(attention.sinks)).unsqueeze(-1).to(out.dtype)


def rows(x: Tensor) -> Tensor:
    """[B, S, H, D], possibly a DTensor sharded over H, to this rank's [B * S, H_local, D]."""
    return local(x).flatten(0, 1)


def local(x: Any) -> Any:
    return x.to_local() if isinstance(x, DTensor) else x


@dataclass(frozen=True)
class Adapter:
    """What CAD knows of a model.

    Attributes:
        model_cls: torchtitan's.
        project: projects x [B, S, dim] in an attention module to rows of queries, keys and values, rotated.
        kind_of: names the kind of attention of a layer, on rows of so many tokens.
        shape: of a TP rank, without a window.
        scale: factor on the scores of a model built for so many positions; by default 1 / sqrt(head_dim).
        has_sinks: whether a learned sink takes part of every head's attention.
        takes_positions: whether blocks take positions, and one mask; else they take rows of the table of rotations, and
            masks by name.
    """

    model_cls: Any
    project: Callable[[Any, Tensor, Tensor, Tensor | None], Projected]
    kind_of: Callable[[Any, int, int], Kind] = _attend_in_full
    shape: Callable[[Any, int, int], AttentionShape] = _shape_of_heads
    scale: Callable[[Any, int], float] | None = None
    has_sinks: bool = False
    takes_positions: bool = True

    def kinds(
        self, args: Any, seq_len: int, tp: int, dtype_bytes: int
    ) -> tuple[AttentionKind, ...]:
        """Return the kinds of attention of a flavor's layers, with the heads of a TP rank, for rows of ``seq_len``."""
        layers = Counter(
            self.kind_of(args, layer, seq_len) for layer in range(args.n_layers)
        )
        scale = self.scale(args, seq_len) if self.scale else None
        kinds = []
        for name in _KINDS:
            if name not in layers:
                continue
            shape = self.shape(args, tp, dtype_bytes)
            if name == "window":
                shape = replace(shape, window=args.sliding_window_size)
            block = args.fixed_attn_block_size if name == "chunked" else None
            kinds.append(
                AttentionKind(name, layers[name], shape, block=block, scale=scale)
            )
        return tuple(kinds)


ADAPTERS: dict[str, Adapter] = {
    "llama3": Adapter(
        llama3.Transformer, partial(_project, rotate=llama3.apply_rotary_emb)
    ),
    "qwen3": Adapter(
        qwen3.Qwen3Model, partial(_project, rotate=qwen3.apply_rotary_emb)
    ),
    "deepseek_v3": Adapter(
        deepseek_v3.DeepSeekV3Model,
        _project_latents,
        shape=_shape_of_latents,
        scale=_scale_of_latents,
    ),
    "llama4": Adapter(
        llama4.Transformer,
        partial(_project, rotate=llama4.apply_rotary_emb),
        kind_of=_attend_in_chunks,
    ),
    "gpt_oss": Adapter(
        gpt_oss.GptOssModel,
        partial(_project, rotate=_rotate_gpt_oss),
        kind_of=_attend_in_windows,
        has_sinks=True,
        takes_positions=False,
    ),
}
"""What CAD knows of torchtitan's models, by ``model.name``."""


def key_heads(args: Any) -> int:
    """Return the number of key heads of the whole model."""
    return getattr(args, "n_kv_heads", None) or args.n_heads


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
    for known in ADAPTERS.values():
        if issubclass(model_cls, known.model_cls):
            masks = known.model_cls.get_attention_masks
            return known if model_cls.get_attention_masks is masks else None
    return None


def check_forwards(model: Any, *, halves: bool) -> None:
    """Raise ValueError for a ``forward`` of a user's own that CAD would replace by torchtitan's.

    Args:
        model: an instance of ``cad_model_class``.
        halves: whether there are two nano-batches.
    """
    blocks = list(model.layers.values())
    replaced = [block.attention.forward for block in blocks]
    replaced += [block.attention.inner_attention.forward for block in blocks]
    if halves or not model.adapter.takes_positions:
        own_cls: Any = type(model).__mro__[1]
        replaced += [own_cls.forward, *(block.forward for block in blocks)]
    for forward in replaced:
        if not forward.__module__.startswith(_TORCHTITANS):
            raise ValueError(
                f"{forward.__qualname__} is a model's own, and CAD would replace it by that of torchtitan's model; "
                f"keep torchtitan's, or set {'cad.nano_batches to 1, or ' * halves}parallelism.cad to false"
            )


def has_experts(args: Any) -> bool:
    """Tell whether a flavor has mixtures of experts; only qwen3 has flavors of both kinds."""
    return getattr(args, "moe_enabled", hasattr(args, "moe_args"))
