"""The linear work of torchtitan 0.2.2's llama3 and qwen3 blocks, cut where core attention is.

A *region* is what lies between two core attentions of one half of a batch: the end of one block and the beginning of
the next. Regions are modules that borrow the blocks' submodules, so parameters, names and hooks (tensor parallelism)
stay as they are; they are not part of the model's tree. The code follows ``TransformerBlock`` and ``Attention`` of
torchtitan.models.llama3.model and torchtitan.models.qwen3.model, which differ only in the norms of queries and keys.

Under tensor parallelism a region contains collectives. ``SplitRegion`` is the same work cut there, so that the other
half's work can hide them.
"""

import sys
import types
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Region(nn.Module):
    """The end of block ``before`` and the beginning of block ``after``; either may be None, not both."""

    before: Any
    after: Any

    def __init__(self, before: nn.Module | None, after: nn.Module | None) -> None:
        super().__init__()
        self.before, self.after = before, after
        if after is not None:
            project_only(self.after.attention)

    def forward(
        self, x: Tensor, attended: Tensor | None, rope: Tensor | None, positions: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """
        Args:
            x: [B, S, dim] input of block ``before``, or of ``after`` if there is none (S / TP of it under TP).
            attended: [B, S, heads * head_dim] core attention's output in block ``before``; None without one.
            rope, positions: as torchtitan's blocks take them; for ``after``.

        Returns:
            The input of block ``after`` [B, S, dim], and its q, k, v [B * S, heads, head_dim]; None at the model's end.
        """
        if self.before is not None:
            h = x + self.before.attention.wo(attended)
            x = h + self.before.feed_forward(self.before.ffn_norm(h))
        if self.after is None:
            return x, None, None, None
        return x, *self.after.attention(self.after.attention_norm(x), rope, None, positions)


def project_only(attention: Any) -> None:
    """Makes torchtitan's ``Attention`` return the rows of q, k and v [B * S, heads, head_dim] and do nothing else."""
    rotate = sys.modules[type(attention).__module__].apply_rotary_emb
    attention.forward = types.MethodType(_project, attention)
    attention.rotate = rotate


def _project(
    self: Any, x: Tensor, rope: Tensor, attention_masks: None, positions: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (linear(x) for linear in (self.wq, self.wk, self.wv))
    return _finish_projection(self, q, k, v, rope, positions)


def _finish_projection(
    self: Any, q: Tensor, k: Tensor, v: Tensor, rope: Tensor | None, positions: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits into heads [B, S, heads * head_dim], normalizes, rotates."""
    q, k, v = (x.view(*x.shape[:2], -1, self.head_dim) for x in (q, k, v))
    if getattr(self, "q_norm", None) is not None:
        q = self.q_norm(q)
    if getattr(self, "k_norm", None) is not None:
        k = self.k_norm(k)
    if not isinstance(rope, DTensor):
        q, k = _local(q), _local(k)
    q, k = self.rotate(q, k, rope, positions=positions)
    return _rows(q), _rows(k), _rows(v)


def _rows(x: Tensor) -> Tensor:
    """[B, S, H, D], possibly a DTensor sharded over H, to this rank's [B * S, H_local, D]."""
    return _local(x).flatten(0, 1)


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


class SplitRegion(Region):
    """A region under tensor parallelism that runs by parts, between which TP communicates.

    The parts multiply by this rank's share of the weights; the sums over ranks, residuals, block norms and gatherings
    between them are ``runtime.sequence_parallel``'s. B rows, S tokens, of all TP ranks; heads and hidden are local.
    """

    @staticmethod
    def fits(block: Any) -> bool:
        """Whether ``block`` consists of what this class knows how to cut."""
        attention, feed_forward = block.attention, block.feed_forward
        linears = [attention.wq, attention.wk, attention.wv, attention.wo]
        linears += [feed_forward.w1, feed_forward.w2, feed_forward.w3]
        norms = (block.attention_norm, block.ffn_norm)
        return all(type(x) is nn.Linear and x.bias is None for x in linears) and all(
            type(x) is nn.RMSNorm and x.eps is not None for x in norms
        )

    def attention_out(self, attended: Tensor) -> Tensor:
        """[B, S, heads * head_dim] to summands [B, S, dim]."""
        return _linear(self.before.attention.wo, attended)

    def expand(self, x: Tensor) -> Tensor:
        """[B, S, dim] to [B, S, hidden]."""
        feed_forward = self.before.feed_forward
        return F.silu(_linear(feed_forward.w1, x)) * _linear(feed_forward.w3, x)

    def contract(self, x: Tensor) -> Tensor:
        """[B, S, hidden] to summands [B, S, dim]."""
        return _linear(self.before.feed_forward.w2, x)

    def project(self, x: Tensor, rope: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, dim] to q, k, v [B * S, heads, head_dim]."""
        attention = self.after.attention
        q, k, v = (_linear(linear, x) for linear in (attention.wq, attention.wk, attention.wv))
        return _finish_projection(attention, q, k, v, rope, positions)


def _linear(linear: Any, x: Tensor) -> Tensor:
    return F.linear(x, linear.weight.to_local())
