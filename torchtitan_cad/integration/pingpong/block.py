"""The interface by which ping-pong runs a transformer block of any model and framework."""

from typing import Protocol

from torch import Tensor, nn


class BlockView(Protocol):
    """The linear work of a transformer block, cut where core attention is.

    Implementations are ``nn.Module``s that hold the block and have no parameters of their own, so that compiling and
    checkpointing find the block's modules. All methods but the norms are compiled. Shapes: B rows of S tokens, heads
    and hidden units of this rank; under tensor parallelism x [B, S, dim] is sharded over tokens between blocks.

    ``attention_out``, ``expand``, ``contract`` and ``project_normed`` are the parts of the work between which TP
    communicates, each by this rank's share of the weights. The loop sums over ranks, adds the residual, normalizes and
    gathers tokens between them (runtime/tp_overlap/sequence_parallel.py). It calls them only where ``can_split``.
    """

    block: nn.Module
    """The block itself, with the hooks that FSDP2 gave it (fsdp_hooks.py)."""
    can_split: bool
    """Whether the parts below compute the block: plain linear layers, RMSNorm, a gated SiLU MLP."""

    def project(self, x: Tensor, rope: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Normalize and project the block's input x [B, S, dim] to q, k, v [B * S, heads, head_dim], rotated.

        Args:
            rope: the model's table of rotations.
            positions: [B or 1, S] rows of ``rope`` to take; None: 0 to S - 1.
        """
        ...

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Compute the block's output [B, S, dim] from its input and core attention's, [B, S, heads * head_dim]."""
        ...

    def attention_norm(self) -> tuple[Tensor, float]:
        """Give weight [dim], a plain tensor, and epsilon of the RMSNorm before attention."""
        ...

    def mlp_norm(self) -> tuple[Tensor, float]:
        """Give weight [dim], a plain tensor, and epsilon of the RMSNorm before the MLP."""
        ...

    def attention_out(self, attended: Tensor) -> Tensor:
        """Project core attention's output [B, S, heads * head_dim] to this rank's summands [B, S, dim]."""
        ...

    def expand(self, x: Tensor) -> Tensor:
        """Compute the MLP's hidden units [B, S, hidden] from normalized x [B, S, dim]."""
        ...

    def contract(self, hidden: Tensor) -> Tensor:
        """Project hidden units [B, S, hidden] to this rank's summands [B, S, dim] of the MLP's output."""
        ...

    def project_normed(self, x: Tensor, rope: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Project normalized x to q, k, v; arguments and shapes as in ``project``."""
        ...
