# SPDX-License-Identifier: BSD-3-Clause
"""Proof that a plan is right: it covers the pairs that attend exactly, and the tables of all ranks agree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchtitan_cad.planning.exchange.messages import MostRows
from torchtitan_cad.planning.exchange.tables import CallTable, RankExchange, RowExchange
from torchtitan_cad.planning.intervals import (
    IntArray,
    begins_group,
    exclusive_cumsum,
    split_at,
)
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.tasks import (
    HOME,
    TASK_DTYPE,
    StandIns,
    TaskArray,
    first_keys,
    is_diagonal,
)
from torchtitan_cad.planning.plan import Plan

MAX_ENTRIES = 200_000_000
"""entries: maximum of all ranks' tables held at once, some 3 GB with the values that they are compared with."""


class PlanError(ValueError):
    """A plan or its exchange tables are wrong; the message names the task, document, rank and row."""


def validate_plan(plan: Plan) -> None:
    """Prove that the tasks cover every pair that attends exactly once and that all ranks' tables carry them out.

    The proof is exact, not sampled. Its time is linear in the tasks' overlaps along the queries and in all ranks' rows.

    Raises:
        PlanError: at the first error found.
        ValueError: the tables of all ranks are too large to be checked (``MAX_ENTRIES``).
    """
    _check_tasks(plan.layout, plan.tasks)
    if plan.shape.window is not None:
        _reject(
            plan.tasks,
            ~is_diagonal(plan.tasks),
            f"a rectangle, which a window of {plan.shape.window} forbids",
        )
    _check_cover(plan.layout, plan.tasks, plan.shape.window)
    _require_small_tables(plan)
    validate_exchanges(
        plan.layout,
        plan.tasks,
        [plan.exchange(rank) for rank in range(plan.layout.num_ranks)],
        plan.stand_ins,
    )
    _check_stats(plan)


def _require_small_tables(plan: Plan) -> None:
    """Raise ValueError if the tables of all ranks have too many entries."""
    layout = plan.layout
    tasks = plan.tasks
    calls = int(
        (tasks["q_end"] - tasks["q_start"]).sum()
        + (tasks["kv_end"] - tasks["kv_start"]).sum()
    )
    entries = (
        4 * layout.num_tokens
        + 3 * int(plan.rows_in.sum())
        + 2 * calls
        + 8 * layout.num_ranks**2
    )
    if entries > MAX_ENTRIES:
        raise ValueError(
            f"the exchange tables of all {layout.num_ranks} ranks have some {entries} entries, more than {MAX_ENTRIES} "
            f"that can be checked at once: validate a plan of fewer tokens or ranks"
        )


def _describe(task: np.void) -> str:
    return (
        f"task (doc {task['doc']}, queries [{task['q_start']}, {task['q_end']}), "
        f"keys [{task['kv_start']}, {task['kv_end']}), server {task['server']})"
    )


def _reject(tasks: TaskArray, wrong: np.ndarray, problem: str) -> None:
    """Raise PlanError for the first task marked wrong, if any."""
    if wrong.any():
        raise PlanError(f"{_describe(tasks[int(np.argmax(wrong))])}: {problem}")


def _check_tasks(layout: TokenLayout, tasks: TaskArray) -> None:
    """Check dtype, document, ranges, kind and server of every task, and the canonical order."""
    if tasks.dtype != TASK_DTYPE or tasks.ndim != 1:
        raise PlanError(
            f"tasks must be one-dimensional of dtype {TASK_DTYPE}, got {tasks.ndim}-d of {tasks.dtype}"
        )
    _reject(
        tasks, ~np.isin(tasks["doc"], layout.docs), "the document is not in the layout"
    )
    length = layout.doc_lengths[layout.doc_index(tasks["doc"])]
    q_start, q_end, kv_start, kv_end = (
        tasks[name] for name in ("q_start", "q_end", "kv_start", "kv_end")
    )
    _reject(tasks, (q_start < 0) | (q_end > length), "queries outside the document")
    _reject(tasks, q_start >= q_end, "no queries")
    _reject(tasks, (kv_start < 0) | (kv_end > length), "keys outside the document")
    _reject(tasks, kv_start >= kv_end, "no keys")
    wrong_server = (tasks["server"] < 0) | (tasks["server"] >= layout.num_ranks)
    _reject(tasks, wrong_server, f"the server is not in [0, {layout.num_ranks})")
    kind = (is_diagonal(tasks) & (kv_start <= q_start)) | (kv_end <= q_start)
    _reject(
        tasks,
        ~kind,
        "neither a diagonal (kv_end == q_end, kv_start <= q_start) nor a rectangle (kv_end <= q_start)",
    )
    order = np.lexsort((kv_start, q_start, tasks["doc"]))
    _reject(
        tasks,
        order != np.arange(len(tasks)),
        "not in canonical order (doc, q_start, kv_start)",
    )


def _check_cover(layout: TokenLayout, tasks: TaskArray, window: int | None) -> None:
    """Check the exact cover of the causal pairs, by a sweep along the layout's queries.

    Between neighbouring query breakpoints (in a *cell*) the set of tasks is constant. For any query row p of the cell,
    the keys [0, p] are covered exactly once if and only if the tasks, in order of kv_start, follow each other from key
    0 without gap or overlap, and the last task is the only diagonal (a rectangle never reaches key p). With a window,
    all tasks are diagonals, which start at the first key that their first query attends to.
    """
    base = layout.doc_offsets[layout.doc_index(tasks["doc"])]
    begin = base + tasks["q_start"]
    end = base + tasks["q_end"]
    changes = layout.run_start[1:][np.diff(layout.run_attends)]
    cuts = np.unique(np.concatenate([layout.doc_offsets, changes, begin, end]))
    task, cell, _, _ = split_at(begin, end, cuts)
    order = np.lexsort((tasks["kv_start"][task], cell))
    task = task[order]
    cell = cell[order]
    _check_queries(layout, cuts, cell)

    is_last = np.roll(begins_group(cell), -1)
    due = first_keys(tasks["q_start"], window)[task]
    due[1:] = np.where(is_last[:-1], due[1:], tasks["kv_end"][task[:-1]])
    diagonal = is_diagonal(tasks)[task]
    wrong = (tasks["kv_start"][task] != due) | (diagonal != is_last)
    if wrong.any():
        i = int(np.argmax(wrong))
        where = _query_range(layout, cuts[cell[i]], cuts[cell[i] + 1])
        after = tasks[task[i + 1]] if diagonal[i] and not is_last[i] else None
        raise PlanError(
            f"{where}: {_cover_problem(tasks[task[i]], int(due[i]), after)}"
        )


def _check_queries(layout: TokenLayout, cuts: IntArray, cell: IntArray) -> None:
    """Check that the cells with tasks are those whose queries attend; ``cuts`` delimit the cells."""
    covered = np.isin(np.arange(len(cuts) - 1), cell)
    run_end = layout.run_start + layout.seg_length[layout.run_order]
    wanted = layout.run_attends[np.searchsorted(run_end, cuts[:-1], side="right")]
    if (covered != wanted).any():
        first = int(np.argmax(covered != wanted))
        where = _query_range(layout, cuts[first], cuts[first + 1])
        raise PlanError(
            f"no task has {where}"
            if wanted[first]
            else f"{where} do not attend, but a task has them"
        )


def _cover_problem(task: np.void, due: int, after: np.void | None) -> str:
    """Say what is wrong with a task whose keys are to begin at ``due``; ``after`` follows it, if it is a diagonal."""
    here = _describe(task)
    found = int(task["kv_start"])
    if found < due:
        return f"{here} covers keys [{found}, {due}) a second time"
    if found > due:
        return f"no task covers keys [{due}, {found}); the next is {here}"
    if after is not None:
        return (
            f"{here} is a diagonal, but {_describe(after)} covers the same pairs again"
        )
    return f"no diagonal task follows {here}"


def _query_range(layout: TokenLayout, start: int, end: int) -> str:
    """Return the global range [start, end) in words."""
    doc = int(np.searchsorted(layout.doc_offsets, start, side="right")) - 1
    offset = layout.doc_offsets[doc]
    return f"queries [{start - offset}, {end - offset}) of document {layout.docs[doc]}"


def validate_exchanges(
    layout: TokenLayout,
    tasks: TaskArray,
    exchanges: Sequence[RankExchange],
    stand_ins: StandIns | None = None,
) -> None:
    """Prove that the tables of all ranks, in rank order, agree and carry out ``tasks``, which are valid.

    Every row is identified by its global position and followed from its home over its arrival to the kernel call, where
    it must be the row that the task names. In a call of a joined server, it must be a local row.

    Raises:
        PlanError: at the first disagreement.
    """
    num_ranks = layout.num_ranks
    if len(exchanges) != num_ranks:
        raise PlanError(f"{len(exchanges)} exchange tables for {num_ranks} ranks")
    local = [layout.rank_positions(rank) for rank in range(num_ranks)]
    queries = [layout.rank_positions(rank, queries=True) for rank in range(num_ranks)]
    _check_sizes(exchanges, local, queries)
    q_spaces = _row_spaces(
        queries, [exchange.queries for exchange in exchanges], "queries"
    )
    kv_spaces = _row_spaces(local, [exchange.keys for exchange in exchanges], "keys")
    _check_most(exchanges)
    joined = np.full(len(tasks), HOME) if stand_ins is None else stand_ins.server
    for rank, exchange in enumerate(exchanges):
        where = f"rank {rank}"
        is_own = tasks["server"] == rank
        own = tasks[is_own & (joined == HOME)]
        calls = (exchange.causal, exchange.full)
        _check_calls(layout, where, calls, own, (q_spaces[rank], kv_spaces[rank]))
        called = {server for server, *_ in exchange.stand_ins}
        if called != {*joined[is_own].tolist()} - {HOME}:
            raise PlanError(f"{where}: calls of joined servers {sorted(called)}")
        for server, _, causal, full in exchange.stand_ins:
            served = tasks[is_own & (joined == server)]
            _check_calls(
                layout,
                f"{where}, joined server {server}",
                calls=(causal, full),
                tasks=served,
                spaces=(queries[rank], local[rank]),
            )


def _check_sizes(
    exchanges: Sequence[RankExchange], local: list[IntArray], queries: list[IntArray]
) -> None:
    """Check what every table says of its rank and its local rows."""
    for rank, exchange in enumerate(exchanges):
        found = (
            exchange.rank,
            exchange.num_ranks,
            exchange.keys.num_local,
            exchange.queries.num_local,
        )
        if found != (rank, len(exchanges), len(local[rank]), len(queries[rank])):
            raise PlanError(
                f"rank {rank}: table says (rank, num_ranks, local rows, local queries) = {found}"
            )


def _check_calls(
    layout: TokenLayout,
    where: str,
    calls: tuple[CallTable, CallTable],
    tasks: TaskArray,
    spaces: tuple[IntArray, IntArray],
) -> None:
    """Check the causal and the unmasked call of ``tasks``, in spaces of queries and keys."""
    diagonal = is_diagonal(tasks)
    causal, full = calls
    _check_call(layout, f"{where}, causal call", causal, tasks[diagonal], *spaces)
    _check_call(layout, f"{where}, full call", full, tasks[~diagonal], *spaces)


def _row_spaces(
    local: list[IntArray], exchanges: Sequence[RowExchange], kind: str
) -> list[IntArray]:
    """Return the global position of every row-space index of every rank, by exchanging positions instead of rows."""
    num_ranks = len(local)
    # per server, in order of the homes
    arrived: list[list[IntArray]] = [[] for _ in range(num_ranks)]
    received = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    for rank, exchange in enumerate(exchanges):
        rows = exchange.send_rows
        counts = exchange.send_counts
        if (
            counts.shape != (num_ranks,)
            or (counts < 0).any()
            or counts.sum() != len(rows)
        ):
            raise PlanError(
                f"rank {rank}: {kind}.send_counts do not divide its {len(rows)} send_rows by rank"
            )
        if counts[rank]:
            raise PlanError(f"rank {rank}: sends {counts[rank]} {kind} to itself")
        if len(rows) and (rows.min() < 0 or rows.max() >= len(local[rank])):
            raise PlanError(
                f"rank {rank}: {kind}.send_rows leave its {len(local[rank])} local rows"
            )
        received[:, rank] = counts
        offsets = exclusive_cumsum(counts)
        for peer in np.flatnonzero(counts).tolist():
            sent = local[rank][rows[offsets[peer] : offsets[peer + 1]]]
            if (np.diff(sent) <= 0).any():
                raise PlanError(
                    f"rank {rank} sends {kind} to rank {peer} repeatedly or out of order"
                )
            arrived[peer].append(sent)
    spaces = []
    for rank, exchange in enumerate(exchanges):
        counts = received[rank]
        expected = exchange.recv_counts
        if expected.shape != (num_ranks,) or (counts != expected).any():
            raise PlanError(
                f"rank {rank}: {kind}.recv_counts {expected.tolist()}, but its peers send {counts.tolist()}"
            )
        spaces.append(np.concatenate([local[rank], *arrived[rank]]))
    _check_offsets(exchanges, received.T, kind)
    return spaces


def _check_offsets(
    exchanges: Sequence[RowExchange], counts: IntArray, kind: str
) -> None:
    """Check all offsets against those that follow from ``counts`` [home, server]."""
    for name, sent in (("put_offsets", counts), ("return_offsets", counts.T)):
        wanted = np.where(sent, np.cumsum(sent, axis=0) - sent, 0)
        for rank, exchange in enumerate(exchanges):
            found = (
                exchange.put_offsets
                if name == "put_offsets"
                else exchange.return_offsets
            )
            if not np.array_equal(found, wanted[rank]):
                raise PlanError(
                    f"rank {rank}: {kind}.{name} {found.tolist()}, but the counts give {wanted[rank].tolist()}"
                )


def _check_most(exchanges: Sequence[RankExchange]) -> None:
    """Check the rows of the busiest ranks against the counts of all ranks."""
    wanted = MostRows(
        received_queries=max(exchange.queries.num_received for exchange in exchanges),
        received_keys=max(exchange.keys.num_received for exchange in exchanges),
        sent_queries=max(len(exchange.queries.send_rows) for exchange in exchanges),
        sent_keys=max(len(exchange.keys.send_rows) for exchange in exchanges),
    )
    for rank, exchange in enumerate(exchanges):
        if exchange.most != wanted:
            raise PlanError(
                f"rank {rank}: most is {exchange.most}, but the counts give {wanted}"
            )


def _check_call(
    layout: TokenLayout,
    where: str,
    call: CallTable,
    tasks: TaskArray,
    q_space: IntArray,
    kv_space: IntArray,
) -> None:
    """Check that the call's rows are exactly those its tasks name, in canonical order."""
    base = layout.doc_offsets[layout.doc_index(tasks["doc"])]
    for name, start_field, rows, offsets, longest, starts, space in (
        ("q", "q_start", call.q_rows, call.cu_q, call.max_q, call.q_start, q_space),
        (
            "kv",
            "kv_start",
            call.kv_rows,
            call.cu_k,
            call.max_k,
            call.kv_start,
            kv_space,
        ),
    ):
        begin = tasks[start_field]
        length = tasks["q_end" if name == "q" else "kv_end"] - begin
        cumulative = exclusive_cumsum(length)
        if offsets.dtype != np.int32 or not np.array_equal(offsets, cumulative):
            raise PlanError(
                f"{where}: cumulative {name} lengths {offsets.tolist()} do not fit the tasks"
            )
        if longest != length.max(initial=0):
            raise PlanError(
                f"{where}: longest {name} range {longest}, but the tasks' is {length.max(initial=0)}"
            )
        if not np.array_equal(starts, begin):
            raise PlanError(
                f"{where}: {start_field} {starts.tolist()} is not that of the tasks"
            )
        if len(rows) != cumulative[-1] or (
            len(rows) and (rows.min() < 0 or rows.max() >= len(space))
        ):
            raise PlanError(
                f"{where}: {name}_rows have the wrong number or leave the {len(space)} rows at hand"
            )
        wanted = np.repeat(base + begin - cumulative[:-1], length) + np.arange(
            cumulative[-1]
        )
        if not np.array_equal(space[rows], wanted):
            i = int(np.argmax(space[rows] != wanted))
            owner = int(np.searchsorted(cumulative, i, side="right")) - 1
            raise PlanError(
                f"{where}: {name}_rows[{i}] is not the row that {_describe(tasks[owner])} names"
            )


def _check_stats(plan: Plan) -> None:
    """Check the byte and task counts of the statistics."""
    stats = plan.stats
    shape = plan.shape
    queries = plan.query_needs
    keys = plan.key_needs
    bytes_in = queries.rows_in * shape.query_bytes + keys.rows_in * shape.kv_bytes
    bytes_out = queries.rows_out * shape.query_bytes + keys.rows_out * shape.kv_bytes
    for name, found, wanted in (
        ("bytes_in", stats.bytes_in, bytes_in),
        ("bytes_out", stats.bytes_out, bytes_out),
        ("total_bytes", stats.total_bytes, bytes_in.sum()),
        ("num_tasks", stats.num_tasks, len(plan.tasks)),
    ):
        if not np.array_equal(found, wanted):
            raise PlanError(f"stats.{name} is {found}, but the tasks give {wanted}")
