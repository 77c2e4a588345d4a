# SPDX-License-Identifier: BSD-3-Clause
"""Task arrays: the records of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan_cad.planning.intervals import BoolArray, IntArray, begins_group
from torchtitan_cad.planning.model.layout import TokenLayout

TASK_FIELDS = ("doc", "q_start", "q_end", "kv_start", "kv_end", "server")
ORDER_FIELDS = ("doc", "q_start", "kv_start")
TASK_DTYPE = np.dtype([(name, np.int64) for name in TASK_FIELDS])

DOC, Q_START, Q_END, KV_START, KV_END, SERVER = range(6)
"""Columns of tasks in compiled code: int64 [n, 6], documents as indices. Tables with more columns begin with these."""
TASK_COLUMNS = 6

TaskArray = npt.NDArray[np.void]
"""Structured array of dtype TASK_DTYPE, one record per task; positions are half-open ranges inside the document."""

HOME = -1
"""stands for no joined server: the task's rank computes it"""


@dataclass(frozen=True)
class StandIns:
    """The tasks of a plan that joined servers compute.

    Attributes:
        server: int64 [num_tasks] number of the server that stands in for the task's home; ``HOME``: none does.
        share: of all attention of the plan.
        seconds: by number of a server, predicted seconds of its tasks of a layer, forward and backward, rows included.
    """

    server: IntArray
    share: float
    seconds: dict[int, float]


def make_tasks(
    doc: Any, q_start: Any, q_end: Any, kv_start: Any, kv_end: Any, server: Any
) -> TaskArray:
    """Return the task array of columns that broadcast to the shape of ``doc`` [n]."""
    tasks = np.empty(len(doc), dtype=TASK_DTYPE)
    for name, column in zip(
        TASK_FIELDS, (doc, q_start, q_end, kv_start, kv_end, server), strict=True
    ):
        tasks[name] = column
    return tasks


def task_table(layout: TokenLayout, tasks: TaskArray) -> IntArray:
    """Return int64 [n, TASK_COLUMNS] the tasks for compiled code, documents as indices into ``layout.docs``."""
    return np.stack(
        [layout.doc_index(tasks["doc"]), *(tasks[name] for name in TASK_FIELDS[1:])],
        axis=1,
    )


def from_table(docs: IntArray, table: IntArray) -> TaskArray:
    """Return the tasks of a table [n, TASK_COLUMNS] whose documents are indices into ``docs``; neighbours joined."""
    doc, *columns = table.T
    return merge_queries(make_tasks(docs[doc], *columns))


def is_diagonal(tasks: TaskArray) -> BoolArray:
    """Return [n] True for diagonal (bottom-right causal) tasks, False for rectangles."""
    return tasks["kv_end"] == tasks["q_end"]


def canonical(tasks: TaskArray) -> TaskArray:
    """Return the tasks sorted by (doc, q_start, kv_start), ties by the other fields; contiguous, of TASK_DTYPE."""
    # the last three are for ties, which no valid plan has
    keys = (*ORDER_FIELDS, "q_end", "kv_end", "server")
    order = np.lexsort([tasks[key] for key in reversed(keys)])
    return np.ascontiguousarray(tasks[order], dtype=TASK_DTYPE)


def merge_queries(tasks: TaskArray) -> TaskArray:
    """Join tasks of one document, server and kind whose query ranges touch and whose keys allow it; canonical order.

    Diagonals need equal kv_start, rectangles equal key ranges. Joining never adds cost and never changes the pairs.
    """
    if len(tasks) == 0:
        return canonical(tasks)
    diagonal = is_diagonal(tasks)
    # For a diagonal kv_end follows q_end, so it does not identify the group.
    key_end: IntArray = np.where(diagonal, -1, tasks["kv_end"])
    order = np.lexsort(
        (tasks["q_start"], key_end, tasks["kv_start"], tasks["server"], tasks["doc"])
    )
    tasks = tasks[order]
    key_end = key_end[order]
    shared = [tasks[name] for name in ("doc", "server", "kv_start")]
    is_first = begins_group(*shared, key_end)
    is_first[1:] |= tasks["q_start"][1:] != tasks["q_end"][:-1]
    begins = np.flatnonzero(is_first)
    ends = np.append(begins[1:], len(tasks)) - 1
    merged = tasks[begins].copy()
    merged["q_end"] = tasks["q_end"][ends]
    merged["kv_end"] = np.where(key_end[begins] < 0, merged["q_end"], merged["kv_end"])
    return canonical(merged)


def first_keys(q_start: IntArray, window: int | None) -> IntArray:
    """Return the first key that each query of ``q_start`` attends to."""
    return (
        np.zeros_like(q_start)
        if window is None
        else np.maximum(0, q_start - (window - 1))
    )


def home_tasks(layout: TokenLayout, window: int | None = None) -> TaskArray:
    """Return one diagonal per maximal range of a document's queries on one rank, in canonical order.

    It has all keys that its queries attend to: the full prefix, or with a ``window`` those of the first query and all
    that follow.
    """
    order = layout.run_order[layout.run_attends]
    rank = layout.seg_rank[order]
    doc = layout.seg_doc[order]
    start = layout.seg_start[order]
    end = start + layout.seg_length[order]
    is_first = begins_group(doc, rank)
    is_first[1:] |= start[1:] != end[:-1]
    is_last = np.roll(is_first, -1)
    q_start = start[is_first]
    q_end = end[is_last]
    return make_tasks(
        doc=doc[is_first],
        q_start=q_start,
        q_end=q_end,
        kv_start=first_keys(q_start, window),
        kv_end=q_end,
        server=rank[is_first],
    )
