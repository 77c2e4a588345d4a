# SPDX-License-Identifier: BSD-3-Clause
"""Tables of fixed sizes: a CUDA graph that has captured core attention by one plan can replay it by other plans.

Training does not do so (docs/performance.md). A rank's ``RankExchange`` is padded with rows of -1 and tasks without
rows.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from torchtitan_cad.planning import CallTable, Plan, RankExchange
from torchtitan_cad.planning.exchange.messages import MostRows
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.kernels.base import AttentionKernel
from torchtitan_cad.runtime.tables import PlanTables
from torchtitan_cad.runtime.transport import Transport


@dataclass(frozen=True)
class TableSizes:
    """Sizes that tables of any plan are padded to, so that no tensor's shape depends on the plan.

    Attributes:
        queries, keys: rows that a rank receives, and rows that it sends; equal on all ranks of the group. All rows
            travel in one chunk.
        tasks: tasks of each of the two kernel calls.
        call_queries, call_keys: rows of each kernel call.
        longest: bound on the query and key rows of a task, as passed to kernels.
    """

    queries: int
    keys: int
    tasks: int
    call_queries: int
    call_keys: int
    longest: int

    @classmethod
    def needed(cls, exchange: RankExchange) -> "TableSizes":
        """Return the least sizes for a rank's exchange."""
        calls = exchange.causal, exchange.full
        return cls(
            # At least one row, as padding, on ranks without any.
            queries=max(1, exchange.most.received_queries, exchange.most.sent_queries),
            keys=max(1, exchange.most.received_keys, exchange.most.sent_keys),
            tasks=max(call.num_tasks for call in calls),
            call_queries=max(len(call.q_rows) for call in calls),
            call_keys=max(len(call.kv_rows) for call in calls),
            longest=max(1, *(max(call.max_q, call.max_k) for call in calls)),
        )

    @classmethod
    def covering(cls, several: Iterable["TableSizes"]) -> "TableSizes":
        """Return the least sizes that cover all of ``several``."""
        return cls(*(max(sizes) for sizes in zip(*map(astuple, several), strict=True)))

    def pad(self, exchange: RankExchange) -> RankExchange:
        """Return a rank's exchange with its rows to send, call rows and tasks padded to the sizes.

        Raises:
            ValueError: the exchange does not fit; names the size that is too small.
        """
        for name, needed in asdict(self.needed(exchange)).items():
            if needed > getattr(self, name):
                raise ValueError(
                    f"a plan needs {name} = {needed}, but tables were made for {getattr(self, name)}: "
                    "make them larger, or execute this plan without fixed sizes"
                )
        return replace(
            exchange,
            queries=replace(
                exchange.queries,
                send_rows=_padded(exchange.queries.send_rows, self.queries, -1),
            ),
            keys=replace(
                exchange.keys, send_rows=_padded(exchange.keys.send_rows, self.keys, -1)
            ),
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


class ReplayEngine(CoreAttentionEngine):
    """Pads the tables of all plans to ``sizes``, so that all plans run the same operations on the same shapes.

    Kernel calls read gathered rows only. Other arguments are those of ``CoreAttentionEngine``.
    """

    def __init__(
        self,
        kernel: AttentionKernel,
        transport: Transport | None,
        *,
        sizes: TableSizes,
        **options: Any,
    ) -> None:
        assert not kernel.squares_only, "tables hold calls of tasks of any shape"
        super().__init__(kernel, transport, **options)
        self.sizes = sizes

    def add_plan(self, key: int, plan: Plan) -> None:
        exchange = self.sizes.pad(plan.exchange(self.rank))
        tables = PlanTables.from_exchange(
            exchange,
            self.transport is not None,
            self.device,
            self.scale,
            is_padded=True,
        )
        keeps = exchange.most.are_kept(plan.shape, self.kept_bytes)
        self.add_tables(key, replace(tables, keeps=keeps))

    def copy_plan(self, source: int, target: int) -> None:
        """Copy the plan under ``source`` over the plan under ``target``, in place and on the current stream.

        A CUDA graph that has captured core attention by the plan ``target`` then executes the copied plan. Capture it
        after one run without a graph, which compiles kernels, and while no plan is added. Keep ``target`` as long as
        the graph, and replay the graph while no other exchange is in flight. CPU kernels are not supported, as they
        read offsets on the host.
        """
        theirs, mine = self.plan(source), self.plan(target)
        if self.transport is not None:
            assert self.transport.replayable
            self.transport.prepare([*mine.exchanges, *theirs.exchanges])
        copy_tables(theirs, mine)


def copy_tables(source: PlanTables, target: PlanTables) -> None:
    """Copy the device tensors of ``source`` into those of ``target``, on the current stream.

    Lists on the host, which CPU kernels and transports read, stay as they are.

    Raises:
        ValueError: the shapes differ.
    """
    ours, others = list(_tensors(target)), list(_tensors(source))
    if [x.shape for x in ours] != [x.shape for x in others]:
        raise ValueError(
            "tables differ in shape: copy between plans of the same TableSizes and numbers of tokens"
        )
    for mine, theirs in zip(ours, others, strict=True):
        mine.copy_(theirs, non_blocking=True)


def _tensors(plan: PlanTables) -> Iterator[Tensor]:
    exchanges = plan.exchanges if plan.moves else []
    for route in dict.fromkeys(route for routes in exchanges for route in routes):
        yield from () if route.rows is None else (route.rows,)
    for routes in exchanges:
        yield from (
            *routes.receivers.tables,
            *routes.senders.tables,
            *(routes.tables.tensors if routes.tables else ()),
        )
    for call in plan.calls:
        yield from (call.args.cu_q, call.args.cu_k)
        yield from (
            rows for rows in (call.q_rows, call.kv_rows) if isinstance(rows, Tensor)
        )
    for tables in (plan.queries, plan.keys):
        for combination in (
            tables.remote,
            tables.local,
            *(chunk.combination for chunk in tables.home),
        ):
            yield from () if combination is None else combination.index
