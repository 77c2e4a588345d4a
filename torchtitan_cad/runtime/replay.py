"""Tables of fixed sizes, for core attention that a CUDA graph has captured and that follows other plans later.

Training does not use them (docs/performance.md). Padding is made here alone, in a rank's part in a plan: rows of -1 are
none, and tasks without rows stand for nothing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, astuple, dataclass, replace

import numpy as np
from torch import Tensor

from torchtitan_cad.planning import CallTable, RankExchange
from torchtitan_cad.planning.exchange.messages import MostRows
from torchtitan_cad.runtime.tables import PlanTables


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

    def pad(self, exchange: RankExchange) -> RankExchange:
        """Return a rank's part in a plan with rows to send, rows of calls and tasks added up to the sizes.

        Raises:
            ValueError: it does not fit; names what does not.
        """
        for name, needed in asdict(self.needed(exchange)).items():
            if needed > getattr(self, name):
                raise ValueError(
                    f"a plan needs {name} = {needed}, but tables were made for {getattr(self, name)}: "
                    "make them larger, or execute this plan without fixed sizes"
                )
        return replace(
            exchange,
            queries=replace(exchange.queries, send_rows=_padded(exchange.queries.send_rows, self.queries, -1)),
            keys=replace(exchange.keys, send_rows=_padded(exchange.keys.send_rows, self.keys, -1)),
            most=MostRows(self.queries, self.keys, self.queries, self.keys),
            causal=self._pad_call(exchange.causal),
            full=self._pad_call(exchange.full),
        )

    def _pad_call(self, call: CallTable) -> CallTable:
        return CallTable(
            q_rows=_padded(call.q_rows, self.call_queries, -1),
            kv_rows=_padded(call.kv_rows, self.call_keys, -1),
            cu_q=_padded(call.cu_q, self.tasks + 1, call.cu_q[-1]),
            cu_k=_padded(call.cu_k, self.tasks + 1, call.cu_k[-1]),
            max_q=self.longest,
            max_k=self.longest,
            q_start=_padded(call.q_start, self.tasks, 0),
            kv_start=_padded(call.kv_start, self.tasks, 0),
        )


def _padded(array: np.ndarray, size: int, fill: int) -> np.ndarray:
    return np.pad(array, (0, size - len(array)), constant_values=fill)


def copy_tables(source: PlanTables, target: PlanTables) -> None:
    """Make the tensors of ``target`` those of ``source``, on the current stream.

    Only what is on the device: lists on the host, which CPU kernels and transports read, stay as they are.

    Raises:
        ValueError: shapes differ.
    """
    ours, others = list(_tensors(target)), list(_tensors(source))
    if [x.shape for x in ours] != [x.shape for x in others]:
        raise ValueError("tables can be copied between plans of the same sizes and numbers of tokens only")
    for mine, theirs in zip(ours, others, strict=True):
        mine.copy_(theirs, non_blocking=True)


def _tensors(plan: PlanTables) -> Iterator[Tensor]:
    exchanges = plan.exchanges if plan.moves else []
    for route in dict.fromkeys(route for routes in exchanges for route in routes):
        yield from route.tables if route.rows is None else (route.rows, *route.tables)
    for routes in exchanges:
        yield from (*routes.receivers.tables, *routes.senders.tables)
    for call in plan.calls:
        yield from (call.args.cu_q, call.args.cu_k)
        yield from (rows for rows in (call.q_rows, call.kv_rows) if isinstance(rows, Tensor))
    for tables in (plan.queries, plan.keys):
        for combination in (tables.served, tables.local, *(trip.combination for trip in tables.home)):
            yield from () if combination is None else combination.index
