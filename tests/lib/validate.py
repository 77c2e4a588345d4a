# SPDX-License-Identifier: BSD-3-Clause
"""Proof that a plan is right: it covers the pairs that attend exactly."""

from __future__ import annotations

import numpy as np

from torchtitan_cad.planning import TASK_DTYPE, Plan, TokenLayout
from torchtitan_cad.planning.intervals import (
    IntArray,
    begins_group,
    split_at,
)
from torchtitan_cad.planning.model.tasks import (
    TaskArray,
    first_keys,
    is_diagonal,
)


class PlanError(ValueError):
    """A plan is wrong; the message names the task, document and rank."""


def validate_plan(plan: Plan) -> None:
    """Prove that the tasks cover every pair that attends exactly once.

    The proof is exact, not sampled. Its time is linear in the tasks' overlaps along the queries.

    Raises:
        PlanError: at the first error found.
    """
    _check_tasks(plan.layout, plan.tasks)
    if plan.shape.window is not None:
        _reject(
            plan.tasks,
            ~is_diagonal(plan.tasks),
            f"a rectangle, which a window of {plan.shape.window} forbids",
        )
    _check_cover(plan.layout, plan.tasks, plan.shape.window)


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
