# SPDX-License-Identifier: BSD-3-Clause
"""Making, describing and storing plans."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import numpy as np

from torchtitan_cad.planning.arguments import complete_config
from torchtitan_cad.planning.compile_once import Report, compile_once
from torchtitan_cad.planning.exchange.messages import MostRows
from torchtitan_cad.planning.exchange.needs import (
    RowNeeds,
    key_needs,
    query_needs,
)
from torchtitan_cad.planning.exchange.tables import (
    RankExchange,
    build_exchange,
    most_rows,
)
from torchtitan_cad.planning.exchange.traffic import (
    Moved,
    measure_traffic,
    node_of_ranks,
)
from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.jit import is_plain_python
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import TileAreaCost
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.limits import require_plannable
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.model.tasks import (
    TASK_FIELDS,
    StandIns,
    TaskArray,
    canonical,
)
from torchtitan_cad.planning.planners import get_planner
from torchtitan_cad.planning.serialize import layout_to_dict
from torchtitan_cad.planning.stats import PlanStats, compute_stats

FINGERPRINT_VERSION = b"torchtitan_cad plan 1"


@dataclass(frozen=True, eq=False)
class Plan:
    """Tasks that cover every (query, key) pair of a layout's attention exactly once, and their costs.

    Attributes:
        tasks: structured array [num_tasks] of int64 fields doc, q_start, q_end, kv_start, kv_end, server, sorted by
            (doc, q_start, kv_start).
        plan_seconds: wall-clock time of planning, without exchange tables and statistics.
        stand_ins: tasks that joined servers compute for their homes (``servers.py``), if any.
    """

    layout: TokenLayout
    shape: AttentionShape
    config: PlannerConfig
    tasks: TaskArray
    plan_seconds: float = 0.0
    stand_ins: StandIns | None = None

    @classmethod
    def from_tasks(
        cls,
        layout: TokenLayout,
        shape: AttentionShape,
        config: PlannerConfig,
        tasks: TaskArray,
        begin: float | None = None,
    ) -> Plan:
        """Make a plan of tasks in any order, whose cover is not checked.

        ``plan_seconds`` counts from ``begin``, a ``time.perf_counter()``, by default now.

        Raises:
            ValueError: a task's document or server is not in the layout.
        """
        begin = time.perf_counter() if begin is None else begin
        if len(tasks) and (
            tasks["server"].min() < 0 or tasks["server"].max() >= layout.num_ranks
        ):
            raise ValueError(
                f"task servers must lie in [0, {layout.num_ranks}), got {np.unique(tasks['server'])}"
            )
        tasks = canonical(tasks)
        layout.doc_index(tasks["doc"])
        return cls(layout, shape, config, tasks, time.perf_counter() - begin)

    @property
    def cost(self) -> TileAreaCost:
        """Cost of tasks, in the units of loads."""
        return TileAreaCost(self.config.cost_tile, self.shape.window)

    @cached_property
    def stats(self) -> PlanStats:
        """Loads, bytes and counts of the plan; computed at the first access."""
        return compute_stats(
            self.layout,
            self.shape,
            self.config,
            cost=self.cost,
            tasks=self.tasks,
            needs=self.needs,
            plan_seconds=self.plan_seconds,
        )

    @cached_property
    def query_needs(self) -> RowNeeds:
        """Query rows each server uses."""
        return query_needs(self.layout, self.tasks)

    @cached_property
    def key_needs(self) -> RowNeeds:
        """Key rows each server uses."""
        return key_needs(self.layout, self.tasks)

    @property
    def needs(self) -> tuple[RowNeeds, RowNeeds]:
        """Query rows and key rows each server uses."""
        return self.query_needs, self.key_needs

    @property
    def moves_rows(self) -> bool:
        """Tell whether any rank receives rows."""
        return any(needs.travels.any() for needs in self.needs)

    @property
    def most_rows(self) -> MostRows:
        """Rows of the busiest ranks, from which all ranks derive the same chunks."""
        return most_rows(self.query_needs, self.key_needs)

    def exchange(self, rank: int) -> RankExchange:
        """Return the tables of one rank, built at every call from the layout and the tasks alone.

        Raises:
            ValueError: no such rank, or more than ``tables.MAX_ROWS`` rows are sent, received or computed on.
        """
        if not 0 <= rank < self.layout.num_ranks:
            raise ValueError(f"rank {rank} is not in [0, {self.layout.num_ranks})")
        own = self.tasks["server"] == rank
        stand_ins = self.stand_ins
        if stand_ins is not None:
            stand_ins = replace(stand_ins, server=stand_ins.server[own])
        return build_exchange(
            self.layout,
            self.tasks[own],
            self.query_needs,
            self.key_needs,
            rank,
            split_keys=self.config.split_kv,
            window=self.shape.window,
            stand_ins=stand_ins,
        )

    def fingerprint(self) -> str:
        """Return the 64-bit hash (16 hex digits) of the layout and the tasks, the same on every platform and run."""
        digest = hashlib.blake2b(FINGERPRINT_VERSION, digest_size=8)
        layout = self.layout
        columns = [layout.seg_rank, layout.seg_doc, layout.seg_start, layout.seg_length]
        columns += [self.tasks[name] for name in TASK_FIELDS]
        if not layout.seg_attends.all():
            columns.append(layout.seg_attends.astype(np.int64))
        if self.stand_ins is not None:
            columns.append(self.stand_ins.server)
        digest.update(
            np.array(
                [layout.num_ranks, len(layout.seg_rank), len(self.tasks)], dtype="<i8"
            ).tobytes()
        )
        for column in columns:
            digest.update(np.ascontiguousarray(column, dtype="<i8").tobytes())
        return digest.hexdigest()

    def to_json(self) -> str:
        """Return a JSON object with tasks, stats, attention, ranks, config and fingerprint.

        Raises ValueError for a plan with joined servers, of which JSON would say nothing.
        """
        if self.stand_ins is not None:
            raise ValueError(
                "stand_ins: joined servers cannot be written; give the plan as it was before assign_to_servers"
            )
        columns = [self.tasks[name].tolist() for name in TASK_FIELDS]
        return json.dumps(
            {
                "tasks": [
                    dict(zip(TASK_FIELDS, record, strict=True))
                    for record in zip(*columns, strict=True)
                ],
                "stats": self.stats.to_dict(),
                "config": asdict(self.config),
                "fingerprint": self.fingerprint(),
                **layout_to_dict(self.layout, self.shape),
            },
            allow_nan=False,
        )


def make_plan(
    layout: TokenLayout,
    shape: AttentionShape,
    config: PlannerConfig | None = None,
) -> Plan:
    """Plan a batch: deterministic, so every rank computes the same plan from the same layout.

    With attention in a window all queries stay at home, whatever the planner. The first plan of a process waits for the
    planner's compiled code, see :func:`warm_up`.

    Raises:
        ValueError: unknown planner, or a document too long for the tiles in which its cost is counted.
    """
    warm_up()
    begin = time.perf_counter()
    config = complete_config(shape, config)
    cost = TileAreaCost(config.cost_tile, shape.window)
    require_plannable(layout, cost)
    tasks = get_planner(config.planner)(layout, shape, config, cost)
    return Plan.from_tasks(layout, shape, config, tasks, begin)


def moved_by(*plans: Plan) -> Moved:
    """Return the sums of what plans move that are executed one after the other."""
    moved = [Moved.of(bytes_by_rank(plan)) for plan in plans]
    return Moved(
        sum(of_plan.total for of_plan in moved), sum(of_plan.worst for of_plan in moved)
    )


def bytes_by_rank(plan: Plan) -> IntArray:
    """Return int64 [2, num_ranks] bytes into and out of every rank, weighted as in ``Moved``."""
    node = node_of_ranks(plan.config, plan.layout.num_ranks)
    row_bytes = (plan.shape.query_bytes, plan.shape.kv_bytes)
    return measure_traffic(plan.needs, row_bytes, node).weighted()


_logger = logging.getLogger(__name__)
_loading = threading.RLock()
_loaded = False


def warm_up(report: Report = _logger.info) -> None:
    """Load the planner's compiled code, once per process, and compile it if no process of this machine has yet.

    Args:
        report: gets a line before and after compiling, and a line when waiting for another process that compiles.
    """
    global _loaded
    with _loading:
        if not (_loaded or is_plain_python()):
            _loaded = True  # before it is true, as the calls below make plans
            try:
                compile_once(_call_entry_points, report)
                _plan_small_batches()
            except BaseException:
                _loaded = False
                raise


def _plan_small_batches() -> None:
    """Call the entry points of compiled code that plans need."""
    layout = TokenLayout.from_segments([[(0, 0, 4096)], [(1, 0, 300), (2, 0, 200)]])
    shape = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=64, dtype_bytes=2)
    make_plan(layout, shape, PlannerConfig()).exchange(0)


entry_point_callers: list[Callable[[], None]] = [_plan_small_batches]
"""Functions that together call every entry point of compiled code with small arguments."""


def _call_entry_points() -> None:
    for call in entry_point_callers:
        call()
