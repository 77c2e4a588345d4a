"""The linear work of a model's blocks, cut where core attention is.

A *region* is what lies between two core attentions of one half of a batch: the end of one block and the beginning of
the next. Regions are modules that borrow the blocks (block.py), so parameters, names and hooks (tensor parallelism)
stay as they are; they are not part of the model's tree.

Under tensor parallelism a region contains collectives. Where blocks can be split, the loop runs a region's parts
(block.py) in place of its ``forward``, so that the other half's work can hide them.
"""

from typing import Any

from torch import Tensor, nn

from torchtitan_cad.integration.pingpong.block import BlockView


class Region(nn.Module):
    """The end of block ``before`` and the beginning of block ``after``; either may be None, not both."""

    before: Any
    after: Any

    def __init__(self, before: BlockView | None, after: BlockView | None) -> None:
        super().__init__()
        self.before, self.after = before, after

    def forward(
        self, x: Tensor, attended: Tensor | None, rope: Tensor | None, positions: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Run the region.

        Args:
            x: [B, S, dim] input of block ``before``, or of ``after`` if there is none (S / TP of it under TP).
            attended: [B, S, heads * head_dim] core attention's output in block ``before``; None without one.
            rope, positions: as ``BlockView.project`` takes them; for ``after``.

        Returns:
            The input of block ``after`` [B, S, dim], and its q, k, v [B * S, heads, head_dim]; None at the model's end.
        """
        if self.before is not None:
            x = self.before.finish(x, attended)
        if self.after is None:
            return x, None, None, None
        return x, *self.after.project(x, rope, positions)
