"""Core attention of a pipeline in ticks: every rank runs the same calls in a tick, with or without tokens of its own.

A rank runs its blocks; what they ask for are some of the tick's calls. In the others it serves: dispatch, attention and
return, with no rows of its own and no model. Which plan a call follows is a matter of the tick, not of the microbatch:
a microbatch's backward meets other microbatches than its forward did, and what backward recomputes is balanced over
those it meets there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.runtime.call import AttentionState, Saved
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.kernels.base import compute_dtype


@dataclass(frozen=True)
class TickSlot:
    """One core attention of a tick.

    Attributes:
        forward: its direction.
        keys: of its plans in the engine, one per nano-batch, the same on all ranks of the group.
        mine: whether tokens of this rank take part; otherwise it only serves.
    """

    forward: bool
    keys: tuple[int, ...]
    mine: bool


@dataclass(frozen=True)
class _Step:
    """A step that starts exchanges: all ranks of the group take them in the same order.

    Attributes:
        method: of the engine.
        nano: the nano-batch, counted from 0; ``key`` is that of its plan.
        mine: as in ``TickSlot``.
    """

    method: str
    nano: int
    key: int
    mine: bool


def _steps(calls: Sequence[TickSlot]) -> Iterator[_Step]:
    """List the steps: the first nano-batch's first, in backward last, as autograd reverses the loop over blocks."""
    for call in calls:
        nanos = list(enumerate(call.keys))
        direction = "forward" if call.forward else "backward"
        for step in ("start", "attend"):
            for nano, key in nanos if call.forward else reversed(nanos):
                yield _Step(f"{step}_{direction}", nano, key, call.mine)


class TickEngine(CoreAttentionEngine):
    """An engine whose calls run in step with the other ranks', each by the plan of this tick's next call.

    Between ``begin_tick`` and ``end_tick`` the calls of a tick run in order. Those of this rank's tokens wait for its
    blocks, which call by the microbatch's key; the others run in between: before the next call of a block, or in
    ``end_tick``. As blocks do, serving waits for what returns as late as it can: before the next call of the same
    nano-batch, or in ``end_tick``.

    Args:
        shape: heads of this rank, and their size.
        dtype: of queries, keys and values on every rank of the group; message rows must have the same format.
        options: of ``CoreAttentionEngine``.
    """

    def __init__(self, shape: AttentionShape, dtype: torch.dtype, **options: Any) -> None:
        super().__init__(**options)
        new = torch.empty(0, shape.num_heads, shape.head_dim, dtype=dtype, device=self.device)
        self._q, self._kv = new, new.new_empty(0, shape.num_kv_heads, shape.head_dim)
        lse, kept = new.new_empty(0, shape.num_heads, dtype=compute_dtype(dtype)), new.new_empty(0, dtype=torch.uint8)
        self._saved = Saved(self._q, self._kv, self._kv, self._q, lse, kept, kept)
        self._steps: Iterator[_Step] | None = None
        self._microbatch = range(0)
        self._served: dict[int, AttentionState] = {}
        """Calls that are served, by nano-batch, until they are finished; the oldest first."""
        self._serving = False

    # Ticks ------------------------------------------------------------------------------------------------------------

    def begin_tick(self, calls: Sequence[TickSlot], microbatch: int | None = None) -> None:
        """Start a tick.

        Args:
            calls: all core attentions of the tick, in the order in which all ranks run them.
            microbatch: key by which this rank's blocks call for the first nano-batch, and by the next numbers for the
                others; None if the rank only serves.
        """
        if self._steps is not None:
            raise RuntimeError("a tick begins before the last one has ended")
        self._steps = _steps(calls)
        if microbatch is not None and calls:
            self._microbatch = range(microbatch, microbatch + len(calls[0].keys))

    def end_tick(self) -> None:
        """Serve in the calls that are left; raises RuntimeError if one of them waits for a block of this rank."""
        due = self._serve_until_mine()
        self._steps, self._microbatch = None, range(0)
        if due is not None:
            raise RuntimeError(f"a tick ends, but a block of this rank has not taken {due}")
        while self._served:
            self._finish_oldest()

    def _enter(self, step: str, key: int, rows: Tensor | None = None) -> int:
        """Serve until it is up to this rank's block, and return the key of the plan.

        Raises:
            RuntimeError: a block comes out of order, or its rows are not of ``dtype``.
        """
        if self._serving:
            return key
        if rows is not None and rows.dtype != self._q.dtype:
            raise RuntimeError(f"attention in {rows.dtype}, but the ranks that serve expect {self._q.dtype}")
        wanted = self._nano(key) if step.startswith("start") else None
        due = self._serve_until_mine() if self._steps is not None else None
        if due is None or due.method != step or (due.key != key if wanted is None else due.nano != wanted):
            raise RuntimeError(f"a block comes to {step}, but its next step in this tick is {due}")
        return due.key

    def _serve_until_mine(self) -> _Step | None:
        assert self._steps is not None, "a tick has begun"
        for due in self._steps:
            if due.method.startswith("start"):
                while due.nano in self._served:
                    self._finish_oldest()
            if due.mine:
                return due
            self._serving = True
            self._serve(due)
            self._serving = False
        return None

    def _serve(self, due: _Step) -> None:
        if due.method == "start_forward":
            self._served[due.nano] = self.start_forward(self._q, self._kv, self._kv, due.key)
        elif due.method == "start_backward":
            self._served[due.nano] = self.start_backward(self._q, self._saved, due.key)
        else:
            self.attend(self._served[due.nano])

    def _finish_oldest(self) -> None:
        self.finish(self._served.pop(next(iter(self._served))))

    def _nano(self, key: int) -> int:
        if key not in self._microbatch:
            raise RuntimeError(f"core attention of microbatch {key} outside its tick")
        return self._microbatch.index(key)
