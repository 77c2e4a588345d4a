"""Tiling in two levels, for ranks in nodes: what a node has no room for goes to other nodes, the rest stays inside.

1. A node whose load exceeds what its ranks may have gives the surplus, from its most overloaded ranks, to nodes with
   slack. One tiling deals with all of these.
2. Then every node deals out what is still over among its own ranks. What the first step left of a run, rows against all
   keys from some position K on, is tiled as a run of a document that begins at K.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from torchtitan_cad.planning.intervals import IntArray, sum_by_index
from torchtitan_cad.planning.model.cost import TileAreaCost
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.limits import server_loads
from torchtitan_cad.planning.model.tasks import TaskArray, is_diagonal, merge_queries
from torchtitan_cad.planning.planners.tiling.tile import Problem, tile

MARGIN = 200
"""The first step leaves 1 / MARGIN of every node's limit free, so that the second finds a tiling."""

MOST_SEGMENTS = 2**24
"""Segments of the second step's layout times nodes over their limit, at most. A document over n ranks of which each
gives away other keys makes n^2 of them."""


def tile_by_node(problem: Problem, limit: IntArray, node: IntArray, granularity: int) -> TaskArray | None:
    """Deal out at most ``limit`` [num_ranks] tiles per rank, inside nodes first, as tasks; None if that fails.

    ``node`` [num_ranks] is every rank's node, ascending.
    """
    cost, layout, home = TileAreaCost(granularity), problem.layout, problem.home
    loads = server_loads(home, cost, layout.num_ranks)
    moved = _between_nodes(loads, limit, node)
    tasks = tile(problem, loads + moved, granularity) if moved.any() else home
    if tasks is None:
        return None
    loads = server_loads(tasks, cost, layout.num_ranks)
    over = np.unique(node[loads > limit])
    active = is_diagonal(tasks) & np.isin(node[tasks["server"]], over)
    done = [tasks[~active]]
    if (found := _from_first_key(layout, tasks[active], MOST_SEGMENTS // max(1, len(over)))) is None:
        return None
    shifted, view, doc, start = found
    for each in over.tolist():
        mine = shifted[node[shifted["server"]] == each]
        own = server_loads(mine, cost, layout.num_ranks)
        within = np.where(node == each, limit - loads + own, own)
        inside = tile(replace(problem, layout=view, home=mine), within, granularity)
        if inside is None:
            return None
        done.append(_restored(inside, doc, start))
    return merge_queries(np.concatenate(done))


def _between_nodes(loads: IntArray, limit: IntArray, node: IntArray) -> IntArray:
    """int64 [num_ranks] tiles that each rank gives to other nodes (negative) or may take from them."""
    nodes = int(node[-1]) + 1
    allowed = sum_by_index(node, limit, nodes)
    surplus = sum_by_index(node, loads, nodes) - (allowed - allowed // MARGIN)
    change = np.zeros(len(loads), dtype=np.int64)
    # Most overloaded ranks give first, roomiest take first; each up to its own excess or room.
    for sign in (1, -1):
        excess = np.maximum(sign * (loads - limit), 0)
        order = np.lexsort((-excess, node))
        before = np.cumsum(excess[order]) - excess[order]
        first = np.searchsorted(node[order], np.arange(nodes))
        left = np.maximum(sign * surplus, 0)[node[order]] - (before - before[first][node[order]])
        change[order] -= sign * np.clip(left, 0, excess[order])
    return change


def _from_first_key(
    layout: TokenLayout, tasks: TaskArray, most: int
) -> tuple[TaskArray, TokenLayout, IntArray, IntArray] | None:
    """Diagonals as full-prefix tasks of documents that begin at their first key.

    Returns the tasks in canonical order, the layout of those documents, and by document of that layout the original
    document and the position at which it begins. None if that layout has more than so many segments.
    """
    begins, index = np.unique(np.stack([tasks["doc"], tasks["kv_start"]], axis=1), axis=0, return_inverse=True)
    doc, start = begins[:, 0], begins[:, 1]
    seg_doc, seg_end = layout.seg_doc, layout.seg_start + layout.seg_length
    first, stop = np.searchsorted(doc, seg_doc, side="left"), np.searchsorted(doc, seg_doc, side="right")
    if int((stop - first).sum()) > most:
        return None
    source = np.repeat(np.arange(len(seg_doc)), stop - first)
    offsets = np.cumsum(stop - first) - (stop - first)
    target = np.arange(len(source)) - np.repeat(offsets, stop - first) + np.repeat(first, stop - first)
    a = np.maximum(layout.seg_start[source] - start[target], 0)
    b = np.maximum(seg_end[source] - start[target], 0)
    # Not from_arrays: documents appear once per first key, so that the view may have more tokens than a layout.
    keep = b > a
    rank, first_query, length = layout.seg_rank[source][keep], a[keep], (b - a)[keep]
    view = TokenLayout(layout.num_ranks, rank, target[keep], first_query, length, np.ones(len(rank), dtype=bool))
    shifted = tasks.copy()
    shifted["doc"] = index.reshape(-1)
    for name in ("q_start", "q_end", "kv_start", "kv_end"):
        shifted[name] -= tasks["kv_start"]
    return merge_queries(shifted), view, doc, start


def _restored(tasks: TaskArray, doc: IntArray, start: IntArray) -> TaskArray:
    """Tasks of the layout made by ``_from_first_key`` in terms of the original documents."""
    restored = tasks.copy()
    restored["doc"] = doc[tasks["doc"]]
    for name in ("q_start", "q_end", "kv_start", "kv_end"):
        restored[name] += start[tasks["doc"]]
    return restored
