# SPDX-License-Identifier: BSD-3-Clause
"""The communication-aware greedy of DistCA (arXiv 2510.18121, section 4.2 and appendix B): a baseline to compare with.

Servers with capacity take work, the emptiest first. Each takes, again and again, the candidate with the most work per
byte among the query ranges of overloaded servers, until it is full or nobody is overloaded. A candidate is cut to the
work that is needed, and where it is cut is chosen for bytes: the range [a, b) of a document costs
``c_q (b - a) + c_kv b`` bytes and about ``(b^2 - a^2) / 2`` work, so for given work the best range has
``a = b c_q / (c_q + c_kv)``.

Unlike the paper's, this greedy only sheds what exceeds (1 + tolerance) x mean, fills receivers to the same level,
counts keys a receiver already holds as free, and bounds the maximum load (planning/model/limits.py): where shards are
too coarse for the tolerance, the level rises in steps to the guaranteed one, at which a shard always fits somewhere.

All tasks are full-prefix diagonals. Bytes are those of queries and keys; the worst rank's share is not considered.
"""

from __future__ import annotations

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray, IntArray, begins_group
from torchtitan_cad.planning.jit import jit, jit_inner
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import TileAreaCost
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.limits import load_limits, server_loads
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.model.tasks import (
    DOC,
    KV_END,
    KV_START,
    Q_END,
    Q_START,
    SERVER,
    TASK_COLUMNS,
    TaskArray,
    from_table,
    home_tasks,
    task_table,
)
from torchtitan_cad.planning.sorting import comes_before, pop, push

LEVELS = 8
"""steps from the tolerated to the guaranteed load"""

# Entries of the rules: granularity of the costs, grid of the cuts (tokens), bytes per query and per key moved.
GRAIN, STEP, PER_QUERY, PER_KEY = range(4)


def plan_greedy(
    layout: TokenLayout,
    shape: AttentionShape,
    config: PlannerConfig,
    cost: TileAreaCost,
) -> TaskArray:
    """Return full-prefix tasks within the guaranteed load, in time ~ servers x items x log(longest document)."""
    search = _Search(layout, shape, config, cost)
    limits = load_limits(layout, config, cost, search.loads)
    for step in range(LEVELS + 1):
        rise = (limits.guaranteed - limits.tolerated) * step // LEVELS
        level = limits.tolerated + rise
        search.fill(np.full(layout.num_ranks, level))
    items = search.items[: search.count]
    items[:, KV_END] = items[:, Q_END]
    return from_table(layout.docs, items)


class _Search:
    """State of one greedy search: the server of every query range, and the load of every server."""

    def __init__(
        self,
        layout: TokenLayout,
        shape: AttentionShape,
        config: PlannerConfig,
        cost: TileAreaCost,
    ) -> None:
        home = home_tasks(layout)
        self.items = task_table(layout, home)
        self.loads = server_loads(home, cost, layout.num_ranks)
        self.count = len(self.items)
        self._prefix = cost.prefix_cost(int(layout.doc_lengths.max(initial=0)))
        self._rules = np.array(
            [cost.granularity, config.min_shard, shape.query_bytes, shape.kv_bytes],
            dtype=np.int64,
        )
        self._held = _home_ranges(layout)
        # Every document of every server: its number, and the rows of the ranges that the server holds.
        server = self._held[:, SERVER]
        doc = self._held[:, DOC]
        first = np.flatnonzero(begins_group(server, doc))
        end = np.append(first, len(self._held))[1:]
        self._docs = doc[first]
        self._ranges = np.stack([first, end], axis=1)
        servers = np.arange(layout.num_ranks + 1)
        self._first_doc = np.searchsorted(server[first], servers)
        self._received = np.zeros(len(layout.docs), dtype=np.int64)
        self._held_ranges = np.zeros((len(layout.docs), 2), dtype=np.int64)

    def fill(self, levels: IntArray) -> None:
        """Move work from servers above their level of ``levels`` [num_ranks] to those below, the emptiest first."""
        for server in np.argsort(self.loads - levels, kind="stable"):
            if self.loads[server] >= levels[server] or (self.loads <= levels).all():
                return
            of_server = slice(self._first_doc[server], self._first_doc[server + 1])
            docs = self._docs[of_server]
            self._received[:] = 0
            self._held_ranges[docs] = self._ranges[of_server]
            self._fill_one(server, levels)
            self._held_ranges[docs] = 0

    def _fill_one(self, server: int, levels: IntArray) -> None:
        """Move work to one server, again with more rows for items as often as they have filled all."""
        while True:
            if self.count + 2 > len(self.items):
                free = np.empty((len(self.items) + 2, TASK_COLUMNS), np.int64)
                self.items = np.concatenate([self.items, free])
            self.count = _fill_server(
                server,
                levels,
                self.loads,
                self.items,
                self.count,
                self._received,
                self._held,
                self._held_ranges,
                self._prefix,
                self._rules,
                np.empty(len(self.items)),
                np.empty(len(self.items), dtype=np.int64),
            )
            if self.count + 2 <= len(self.items):
                return


def _home_ranges(layout: TokenLayout) -> IntArray:
    """Return [S, TASK_COLUMNS] the ranges of tokens that servers hold, by server, document and position."""
    table = np.zeros((len(layout.seg_doc), TASK_COLUMNS), dtype=np.int64)
    table[:, DOC] = layout.doc_index(layout.seg_doc)
    table[:, SERVER] = layout.seg_rank
    table[:, Q_START] = layout.seg_start
    table[:, Q_END] = layout.seg_start + layout.seg_length
    order = np.lexsort((table[:, Q_START], table[:, DOC], table[:, SERVER]))
    return table[order]


@jit_inner
def _cost(prefix: IntArray, rules: IntArray, start: int, end: int) -> int:
    """Cost of queries [start, end) of a document against their full prefix."""
    return prefix[-(-end // rules[GRAIN])] - prefix[start // rules[GRAIN]]


@jit_inner
def _last_start(
    prefix: IntArray, rules: IntArray, start: int, end: int, work: int
) -> int:
    """Largest cut a >= start such that [a, end) costs at least ``work``, as [start, end) does."""
    step = rules[STEP]
    # cut number ``low`` stands for ``start`` itself
    low = start // step
    high = (end - 1) // step
    while low < high:
        middle = (low + high + 1) // 2
        if _cost(prefix, rules, middle * step, end) >= work:
            low = middle
        else:
            high = middle - 1
    return max(start, low * step)


@jit_inner
def _first_end(
    prefix: IntArray, rules: IntArray, start: int, end: int, work: int, is_best: bool
) -> int:
    """Smallest cut b in (start, end] such that [a, b) costs at least ``work``, or ``end``.

    The first query a is ``start`` or, with ``is_best``, b c_q / (c_q + c_kv).
    """
    step = rules[STEP]
    # cut number ``high`` stands for ``end`` itself
    low = start // step + 1
    high = -(-end // step)
    begin = start
    while low < high:
        middle = (low + high) // 2
        if is_best:
            begin = (
                middle
                * step
                * rules[PER_QUERY]
                // (rules[PER_QUERY] + rules[PER_KEY])
                // step
                * step
            )
        if _cost(prefix, rules, begin, middle * step) >= work:
            high = middle
        else:
            low = middle + 1
    return min(end, low * step)


@jit_inner
def _missing_keys(stop: int, received: int, held: IntArray) -> int:
    """Keys of [0, stop) that a server lacks if it holds the sorted ranges ``held`` and has received [0, received)."""
    missing = max(0, stop - received)
    for i in range(len(held)):
        missing -= max(0, min(stop, held[i, Q_END]) - max(received, held[i, Q_START]))
    return missing


@jit_inner
def _best_range(
    item: IntArray,
    excess: int,
    capacity: int,
    received: int,
    held: IntArray,
    prefix: IntArray,
    rules: IntArray,
) -> tuple[float, int, int]:
    """(work per byte, start, end) of the best part of an item to move; work per byte 0 when no part fits.

    ``excess`` is the work that its server should shed, ``capacity`` the work that the receiver can take. The parts
    tried are the optimum of the closed form, the tail, the head, and the last part that needs no further keys.
    """
    start = item[Q_START]
    end = item[Q_END]
    step = rules[STEP]
    work = min(excess, capacity, _cost(prefix, rules, start, end))
    best = 0.0
    best_start = start
    best_end = end
    stops = (
        _first_end(prefix, rules, start, end, work, True),
        end,
        start,
        received // step * step,
    )
    for stop in stops:
        if stop > end or stop < start:
            continue
        if stop == start or _cost(prefix, rules, start, stop) < work:
            a = start
            b = _first_end(prefix, rules, start, end, work, False)
            if _cost(prefix, rules, a, b) > capacity:
                b = (b - 1) // step * step
        else:
            a = _last_start(prefix, rules, start, stop, work)
            b = stop
            if _cost(prefix, rules, a, b) > capacity:
                a = (a // step + 1) * step
        if a >= b:
            continue
        moved = min(_cost(prefix, rules, a, b), excess)
        volume = rules[PER_QUERY] * (b - a) + rules[PER_KEY] * _missing_keys(
            b, received, held
        )
        efficiency = moved / volume
        if efficiency > best:
            best = efficiency
            best_start = a
            best_end = b
    return best, best_start, best_end


@jit_inner
def _split(items: IntArray, count: int, i: int, start: int, end: int) -> int:
    """Cut item i down to [start, end) and append the rests as new items; returns the new count."""
    for side in range(2):
        a = items[i, Q_START] if side == 0 else end
        b = start if side == 0 else items[i, Q_END]
        if a < b:
            items[count, DOC] = items[i, DOC]
            items[count, SERVER] = items[i, SERVER]
            items[count, Q_START] = a
            items[count, Q_END] = b
            items[count, KV_START] = 0
            count += 1
    items[i, Q_START] = start
    items[i, Q_END] = end
    return count


@jit
def _fill_server(  # noqa: PLR0913  numba unpacks no objects
    server: int,
    levels: IntArray,
    loads: IntArray,
    items: IntArray,
    count: int,
    received: IntArray,
    held: IntArray,
    held_ranges: IntArray,
    prefix: IntArray,
    rules: IntArray,
    keys: FloatArray,
    heap: IntArray,
) -> int:
    """Move work from servers above their level to ``server``, which is below its own; returns the number of items.

    Updates loads [num_ranks], items [rows, 6] and received [num_docs] (the length of the prefix whose keys the
    server has received), and stops early when the item table is full. ``held`` lists the home ranges of all servers;
    those of document d on this server are the rows held_ranges[d, 0] to held_ranges[d, 1].

    Candidates wait in a heap, ordered by their last known work per byte, the highest first. A candidate that has
    become worse than the next one is put back. ``keys`` and ``heap`` [rows] are scratch.
    """
    size = 0
    fresh = 0
    while loads[server] < levels[server] and count + 2 <= len(items):
        for i in range(fresh, count):
            doc = items[i, DOC]
            excess = loads[items[i, SERVER]] - levels[items[i, SERVER]]
            if excess > 0:
                ranges = held[held_ranges[doc, 0] : held_ranges[doc, 1]]
                capacity = levels[server] - loads[server]
                keys[i] = -_best_range(
                    items[i], excess, capacity, received[doc], ranges, prefix, rules
                )[0]
                if keys[i] < 0:
                    size = push(heap, size, keys, i)
        fresh = count
        if size == 0:
            break
        i = pop(heap, size, keys)
        size -= 1
        doc = items[i, DOC]
        source = items[i, SERVER]
        excess = loads[source] - levels[source]
        capacity = levels[server] - loads[server]
        efficiency = 0.0
        if excess > 0:
            ranges = held[held_ranges[doc, 0] : held_ranges[doc, 1]]
            efficiency, start, end = _best_range(
                items[i], excess, capacity, received[doc], ranges, prefix, rules
            )
        is_worse = -efficiency > keys[i]
        keys[i] = -efficiency
        if is_worse and efficiency > 0 and size > 0 and comes_before(keys, heap[0], i):
            size = push(heap, size, keys, i)
            continue
        if efficiency > 0:
            count = _split(items, count, i, start, end)
            items[i, SERVER] = server
            work = _cost(prefix, rules, start, end)
            loads[server] += work
            loads[source] -= work
            received[doc] = max(received[doc], end)
    return count
