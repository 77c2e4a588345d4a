"""Core attention of a pipeline in ticks: every rank runs the same calls in a tick, with or without tokens of its own.

A rank runs its blocks; what they ask for are some of the tick's calls. In the others it serves: dispatch, attention and
return, with no rows of its own and no model. Which plan a call follows is a matter of the tick, not of the microbatch:
a microbatch's backward meets other microbatches than its forward did, and what backward recomputes is balanced over
those it meets there. Imports torch and the engine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.kernels.base import compute_dtype


@dataclass(frozen=True)
class TickCall:
    """One core attention of a tick.

    Attributes:
        forward: its direction.
        key: of its plan in the engine, the same on all ranks of the group.
        mine: whether tokens of this rank take part; otherwise it only serves.
    """

    forward: bool
    key: int
    mine: bool


class TickedEngine:
    """Stands in for an engine in the core-attention operator, so that its calls fall into step with the other ranks'.

    Between ``begin`` and ``end`` the calls of a tick run in order. Those of this rank's tokens wait for its blocks, the
    others run in between: before the next call of a block, or in ``end``.

    Args:
        engine: executes the plans.
        shape: heads of this rank, and their size.
        dtype: of queries, keys and values on every rank of the group; message rows must have the same format.
    """

    def __init__(self, engine: CoreAttentionEngine, shape: AttentionShape, dtype: torch.dtype) -> None:
        self.engine, self.scale = engine, engine.scale
        new = torch.empty(0, shape.num_heads, shape.head_dim, dtype=dtype, device=engine.device)
        self._q, self._kv = new, new.new_empty(0, shape.num_kv_heads, shape.head_dim)
        self._lse = new.new_empty(0, shape.num_heads, dtype=compute_dtype(dtype))
        self._kept = new.new_empty(0, dtype=torch.uint8)
        self._calls: Iterator[TickCall] | None = None
        self._microbatch: int | None = None

    def begin(self, calls: Sequence[TickCall], microbatch: int | None = None) -> None:
        """Starts a tick.

        Args:
            calls: all core attentions of the tick, in the order in which all ranks run them.
            microbatch: key by which this rank's blocks call, None if it only serves.
        """
        if self._calls is not None:
            raise RuntimeError("a tick begins before the last one has ended")
        self._calls, self._microbatch = iter(calls), microbatch

    def end(self) -> None:
        """Serves in the calls that are left; raises RuntimeError if one of them waits for a block of this rank."""
        call = self._serve_until_mine()
        self._calls = None
        if call is not None:
            raise RuntimeError(f"a tick ends, but a block of this rank has not made call {call}")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As ``CoreAttentionEngine.forward``, by the plan of this tick's next call; ``key`` is the microbatch's."""
        if q.dtype != self._q.dtype:
            raise RuntimeError(f"attention in {q.dtype}, but the ranks that serve expect {self._q.dtype}")
        return self.engine.forward(q, k, v, self._next(key, forward=True))

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        kept_q: Tensor,
        kept_kv: Tensor,
        key: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As ``CoreAttentionEngine.backward``, by the plan of this tick's next call; ``key`` is the microbatch's."""
        plan_key = self._next(key, forward=False)
        return self.engine.backward(dout, q, k, v, out, lse, kept_q, kept_kv, plan_key)

    def _next(self, microbatch: int, *, forward: bool) -> int:
        """Serves until it is the turn of this rank's block, and returns the key of the plan."""
        if self._calls is None or microbatch != self._microbatch:
            raise RuntimeError(f"core attention of microbatch {microbatch} outside its tick")
        call = self._serve_until_mine()
        if call is None or call.forward != forward:
            direction = "forward" if forward else "backward"
            raise RuntimeError(f"a block runs attention {direction}, but its next call in this tick is {call}")
        return call.key

    def _serve_until_mine(self) -> TickCall | None:
        assert self._calls is not None, "a tick has begun"
        for call in self._calls:
            if call.mine:
                return call
            if call.forward:
                self.engine.forward(self._q, self._kv, self._kv, call.key)
            else:
                # dO, Q, K, V, O, log-sum-exp, and what a forward would have kept
                rows = (self._q, self._q, self._kv, self._kv, self._q, self._lse, self._kept, self._kept)
                self.engine.backward(*rows, call.key)
        return None
