# SPDX-License-Identifier: BSD-3-Clause
"""The linear work of a model's blocks, and the interface by which ping-pong runs those of any model and framework.

A *segment* is what lies between two core attentions of one nano-batch: the end of one block and the beginning of
the next. Segments are modules that borrow the blocks, so parameters, names and hooks (tensor parallelism) stay as they
are; they are not part of the model's tree. Under tensor parallelism a segment contains collectives.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn


class BlockView(Protocol):
    """The linear work of a transformer block, cut where core attention is.

    Implementations are ``nn.Module``s that hold the block and have no parameters of their own, so that compiling and
    checkpointing find the block's modules. All methods are compiled if all blocks are ``traceable``.
    Shapes: B rows of S tokens, heads of this rank; under tensor parallelism x [B, S, dim] is sharded
    over tokens between blocks.
    """

    block: nn.Module
    """The block itself, with the hooks that FSDP2 gave it (fsdp_hooks.py)."""
    traceable: bool
    """Whether a compiler can trace all of the block's work; it cannot trace experts, whose tokens are counted first."""
    graphs: tuple[str, ...]
    """Methods, or parts of them, to compile where some block of the model is not traceable."""
    engine: str
    """Name of the engine of the block's kind of attention; empty: the loop's."""
    rescale: Callable[[Tensor, Tensor], Tensor] | None
    """Rescales core attention's output [T, Hq, Dv] by its log-sum-exp [T, Hq], between the block's hooks; None: not."""

    def project(
        self, x: Tensor, rope: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Normalize and project the block's input x [B, S, dim] to q, k, v [B * S, heads, head_dim], rotated, and what
        the heads of keys share [B * S, 1, shared], if anything.

        Args:
            rope: the model's table of rotations.
            positions: [B or 1, S] rows of ``rope`` to take; None: 0 to S - 1.
        """
        ...

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Compute the block's output [B, S, dim] from its input and core attention's, [B, S, heads * head_dim]."""
        ...


class BlockSegment(nn.Module):
    """The end of block ``before`` and the beginning of block ``after``; either may be None, not both."""

    before: Any
    after: Any

    def __init__(self, before: BlockView | None, after: BlockView | None) -> None:
        super().__init__()
        self.before = before
        self.after = after

    def forward(
        self,
        x: Tensor,
        attended: Tensor | None,
        rope: Tensor | None,
        positions: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Run the segment.

        Args:
            x: [B, S, dim] input of block ``before``, or of ``after`` if there is none (S / TP of it under TP).
            attended: [B, S, heads * head_dim] core attention's output in block ``before``; None without one.
            rope, positions: as ``BlockView.project`` takes them; for ``after``.

        Returns:
            The input of block ``after`` [B, S, dim], and what its ``project`` returns; three None at the model's end.
        """
        if self.before is not None:
            x = self.before.finish(x, attended)
        if self.after is None:
            return x, None, None, None
        return x, *self.after.project(x, rope, positions)
