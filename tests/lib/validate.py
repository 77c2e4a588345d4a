# SPDX-License-Identifier: BSD-3-Clause
"""Proof that a plan is right: it covers the pairs that attend exactly."""

import numpy as np

from torchtitan_cad.planning import TASK_DTYPE, Plan, TokenLayout
from torchtitan_cad.planning.intervals import IntArray, begins_group, split_at
from torchtitan_cad.planning.model.tasks import TaskArray, first_keys, is_diagonal


def validate_plan(plan: Plan) -> None:
    """Assert that the tasks cover every pair that attends exactly once.

    The proof is exact, not sampled. Its time is linear in the tasks' overlaps along the queries.
    """
    _check_tasks(plan.layout, plan.tasks)
    if plan.shape.window is not None:
        assert is_diagonal(plan.tasks).all(), "a window forbids rectangles"
    _check_cover(plan.layout, plan.tasks, plan.shape.window)


def _check_tasks(layout: TokenLayout, tasks: TaskArray) -> None:
    """Check dtype, document, ranges, kind and server of every task, and the canonical order."""
    assert (tasks.dtype, tasks.ndim) == (TASK_DTYPE, 1)
    doc, q_start, q_end, kv_start, kv_end, server = (
        tasks[name]
        for name in ("doc", "q_start", "q_end", "kv_start", "kv_end", "server")
    )
    assert np.isin(doc, layout.docs).all()
    length = layout.doc_lengths[layout.doc_index(doc)]
    for start, end in ((q_start, q_end), (kv_start, kv_end)):
        assert ((start >= 0) & (start < end) & (end <= length)).all()
    assert ((server >= 0) & (server < layout.num_ranks)).all()
    is_rectangle = kv_end <= q_start
    assert ((is_diagonal(tasks) & (kv_start <= q_start)) | is_rectangle).all()
    order = np.lexsort((kv_start, q_start, doc))
    assert (np.diff(order) == 1).all(), "not in canonical order"


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
    is_right = (tasks["kv_start"][task] == due) & (is_diagonal(tasks)[task] == is_last)
    assert is_right.all(), f"{tasks[task[~is_right]]}: keys are due from {due}"


def _check_queries(layout: TokenLayout, cuts: IntArray, cell: IntArray) -> None:
    """Check that the cells with tasks are those whose queries attend; ``cuts`` delimit the cells."""
    covered = np.isin(np.arange(len(cuts) - 1), cell)
    run_end = layout.run_start + layout.seg_length[layout.run_order]
    wanted = layout.run_attends[np.searchsorted(run_end, cuts[:-1], side="right")]
    assert np.array_equal(covered, wanted), f"other queries attend in {cuts}"
