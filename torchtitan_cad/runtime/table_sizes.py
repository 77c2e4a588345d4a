"""Fixed sizes for the tables of all plans, as a CUDA graph needs them (``replay.py``). Training does not use them."""

from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass

import numpy as np

from torchtitan_cad.planning import RankExchange


@dataclass(frozen=True)
class TableSizes:
    """Sizes that tables of any plan are padded to, so that no tensor's shape depends on the plan.

    Attributes:
        queries, keys: rows that a rank receives, or sends; the same numbers on all ranks of the group. What returns to
            a home takes one trip.
        tasks: of each of the two kernel calls.
        call_queries, call_keys: rows of each kernel call.
        longest: rows of a task, queries or keys: the bound that kernels are given.
    """

    queries: int
    keys: int
    tasks: int
    call_queries: int
    call_keys: int
    longest: int

    @classmethod
    def needed(cls, exchange: RankExchange) -> "TableSizes":
        """Return the least sizes for a rank's part in a plan."""
        calls = exchange.causal, exchange.full
        return cls(
            # At least a row, which padding can stand for on ranks that have none.
            queries=max(1, exchange.most.received_queries, exchange.most.sent_queries),
            keys=max(1, exchange.most.received_keys, exchange.most.sent_keys),
            tasks=max(call.num_tasks for call in calls),
            call_queries=max(len(call.q_rows) for call in calls),
            call_keys=max(len(call.kv_rows) for call in calls),
            longest=max(1, *(max(call.max_q, call.max_k) for call in calls)),
        )

    @classmethod
    def covering(cls, several: Iterable["TableSizes"]) -> "TableSizes":
        """Return the least sizes that suffice for all of them."""
        return cls(*(max(sizes) for sizes in zip(*map(astuple, several), strict=True)))

    def check(self, exchange: RankExchange) -> None:
        """Raise ValueError unless a plan's tables fit; names what does not."""
        for name, needed in asdict(self.needed(exchange)).items():
            if needed > getattr(self, name):
                raise ValueError(
                    f"a plan needs {name} = {needed}, but tables were made for {getattr(self, name)}: "
                    "make them larger, or execute this plan without fixed sizes"
                )


def padded(array: np.ndarray, sizes: TableSizes | None, size: str, fill: int = 0, *, more: int = 0) -> np.ndarray:
    """Pad ``array`` with ``fill`` up to the size of that name and ``more``; without sizes returns it as it is."""
    if sizes is None:
        return array
    return np.pad(array, (0, getattr(sizes, size) + more - len(array)), constant_values=fill)
