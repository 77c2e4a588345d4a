"""The linear work of torchtitan 0.2.2's llama3 and qwen3 blocks, cut where core attention is.

A *region* is what lies between two core attentions of one half of a batch: the end of one block and the beginning of
the next. Regions are modules that borrow the blocks' submodules, so parameters, names and hooks (tensor parallelism)
stay as they are; they are not part of the model's tree. The code follows ``TransformerBlock`` and ``Attention`` of
torchtitan.models.llama3.model and torchtitan.models.qwen3.model, which differ only in the norms of queries and keys.
"""

import sys
import types
from typing import Any

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
    shape = (*x.shape[:2], -1, self.head_dim)
    q, k, v = (linear(x).view(shape) for linear in (self.wq, self.wk, self.wv))
    if getattr(self, "q_norm", None) is not None:
        q = self.q_norm(q)
    if getattr(self, "k_norm", None) is not None:
        k = self.k_norm(k)
    q, k = self.rotate(q, k, rope, positions=positions)
    return _rows(q), _rows(k), _rows(v)


def _rows(x: Tensor) -> Tensor:
    """[B, S, H, D], possibly a DTensor sharded over H, to this rank's [B * S, H_local, D]."""
    if isinstance(x, DTensor):
        x = x.to_local()
    return x.flatten(0, 1)
