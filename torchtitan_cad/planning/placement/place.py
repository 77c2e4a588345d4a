"""Homes that move little: which rank should hold which tokens of a batch.

``docs/placement.md`` describes the problem, the algorithm and what each part of it gains.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from itertools import chain, product

import numpy as np

from torchtitan_cad.planning.compile_once import Report, compiled_by
from torchtitan_cad.planning.exchange.traffic import measure_traffic, node_of_ranks
from torchtitan_cad.planning.intervals import FloatArray, IntArray, exclusive_cumsum, split_at
from torchtitan_cad.planning.jit import is_plain_python
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import CostModel, TileAreaCost
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.limits import CapacityError, Speeds
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.placement.dealing import Chunks, Ranks, make_state
from torchtitan_cad.planning.placement.scratch import make_scratch
from torchtitan_cad.planning.placement.search import Documents, SearchOptions, search
from torchtitan_cad.planning.plan import PLANNED, Plan, checked_planner, plan_once, warm_up
from torchtitan_cad.planning.planners.tiling.planner import is_tiled_once, quick_figures

_logger = logging.getLogger(__name__)

WORK = (0.7, 1.1)
"""Work of a chunk over the mean rank's, at most."""

LEAST = (0.5, 0.75, 1.0, 1.25, 2.0)
"""Tokens of a chunk, at least, over those of the best rectangle of a rank's mean work."""

MOST = (1.0, 1.5, 10.0)
"""The same, at most."""

FEWEST = 8
"""A chunk has at least one part in so many of the tokens of a rank."""

TRIES = ((4, 1.5), (20, 0.2))
"""(what is short, weight of the worst rank) of the dealings tried, one after the other, until one is better than the
given homes. Documents of less work than one part in so many of the mean rank's are short: not cut, but to fill the last
room. The weight is that of the worst rank's bytes, relative to the best seen, over those of all ranks."""

TRIES_FEW = ((4, 0.6), (4, 1.0), (8, 4.0), (30, 0.3))
"""Those that compete where ranks are few, as the estimate is coarse there and plans are quickly made."""

FEW = 16
"""Ranks up to which they are few."""

FEW_EFFORT = 3
"""Factor on the numbers of dealings and moves tried where ranks are few."""

SEEDS_FEW = 2
"""Dealings for each entry of ``TRIES_FEW``, by other random numbers, where quick plans tell which is best."""

CHANGES = 60
"""How often the best of these dealings is changed, and changed back unless a quick plan then has fewer bytes."""

CHANGE_MOVES = 3000
"""Moves tried for a change."""

WORST = 3
"""Weight of the worst rank's bytes where homes are compared: these, over those by the plan for the given homes, count
so many times as much as the same ratio of all bytes."""

FEWEST_CHOICES = 6
"""Choices tried, however many the ranks."""

EFFORT = 512
"""Ranks up to which so many dealings are tried as ``EFFORTS`` says; with n times as many fewer, by the square root of
n."""

EFFORTS = (24, 48, 24000)
"""Choices tried, dealings with one document cut otherwise, and moves; the last on up to ``MANY`` ranks, with n times as
many more, by the square root of n."""

MANY = 64
"""See ``EFFORTS``. From so many ranks on a quick plan for the given homes may do."""

SHARE = 0.96
"""Bytes of all ranks over those of the given homes, both as estimated, at most, where ranks are many."""

THREADS = 3
"""Plans that are made side by side, at most."""

CLEARLY = Fraction(4, 3)
"""Bytes of the worst rank by a quick plan for the given homes over those by the plan for new ones, at least, for which
the quick plan will do if it has no fewer bytes in total. The usual plan for the given homes has a few percent fewer."""

MORE = Fraction(103, 100)
"""Bytes of all ranks over those of the given homes, at most: what may be paid for a better worst rank."""


def place(
    layout: TokenLayout, shape: AttentionShape, config: PlannerConfig | None = None, cost: CostModel | None = None
) -> TokenLayout:
    """Deal the tokens to ranks anew, so that the plan that follows loads no rank with many bytes.

    Every rank has as many tokens as in ``layout``, in document order. Equal inputs give equal homes on every rank.
    A layout that leaves queries out keeps its homes, and so does one for which no better are found: neither the bytes
    of the worst rank nor, beyond ``MORE``, those of all ranks exceed those of a plan for the given homes. On many
    ranks a quick plan for these has to do if new homes are better by far, see ``CLEARLY``.

    Raises:
        ValueError: as ``make_plan``.
    """
    warm_up()
    config = config or PlannerConfig()
    cost = TileAreaCost(config.cost_tile) if cost is None else cost
    if layout.num_ranks == 1 or not layout.num_tokens or not layout.seg_attends.all():
        return layout
    checked_planner(layout, config, cost)
    few = layout.num_ranks <= FEW
    nodes = node_of_ranks(config, layout.num_ranks)[-1] + 1
    tries = list(product(TRIES_FEW if few else TRIES, (True, False) if nodes > 1 else (False,)))

    def deal_and_plan(options: tuple[tuple[int, float], bool]) -> Plan | None:
        (short, weight), by_node = options
        dealt, _ = Dealer(layout, shape, config, cost, short).deal(weight, by_node)
        return try_plan(dealt, shape, config, cost)

    with ThreadPoolExecutor(THREADS) as threads:
        plans: Iterator[Plan | None] = map(deal_and_plan, tries)
        if layout.num_ranks >= MANY and is_tiled_once(config, cost):
            quick = threads.submit(quick_figures, layout, shape, config, cost)
            first = next(plans)
            if first is not None and _is_clear(first, quick.result()):
                return _keep(first)
            plans = chain([first], plans)
        given = threads.submit(try_plan, layout, shape, config, cost)
        if few and is_tiled_once(config, cost):
            plans = _climb(layout, shape, config, cost, given, threads)
        elif few:
            plans = threads.map(deal_and_plan, tries)
        best, least = None, Fraction(1 + WORST)
        for plan in plans:
            if plan is not None and (value := _value(plan, given.result())) < least:
                best, least = plan, value
                if not few:
                    break
    old = given.result()
    if old is not None:
        _keep(old)
    best = old if best is None else best
    return layout if best is None else _keep(best)


def _climb(
    layout: TokenLayout,
    shape: AttentionShape,
    config: PlannerConfig,
    cost: CostModel,
    given: Future[Plan | None],
    threads: ThreadPoolExecutor,
) -> Iterator[Plan | None]:
    """Plan the best of some dealings, and what it becomes by changes after which quick plans have fewer bytes."""

    def quick(homes: TokenLayout) -> tuple[int, int] | None:
        return quick_figures(homes, shape, config, cost)

    def deal(
        options: tuple[tuple[int, float], int],
    ) -> tuple[Dealer, float, TokenLayout, Chunks, tuple[int, int] | None]:
        (short, weight), seed = options
        dealer = Dealer(layout, shape, config, cost, short)
        homes, chunks = dealer.deal(weight, by_node=False, seed=seed)
        return dealer, weight, homes, chunks, quick(homes)

    dealt = list(threads.map(deal, product(TRIES_FEW, range(SEEDS_FEW))))
    plan = given.result()
    before = None if plan is None else figures(plan)
    if before is None or not before[1]:  # nothing to gain
        return iter(())
    dealer, weight, first, chunks, now = min(dealt, key=lambda each: _ratios(each[-1], before))
    best, homes = _ratios(now, before), first
    for seed in range(CHANGES):
        other, changed = dealer.deal(weight, by_node=False, seed=1 + seed, before=chunks)
        if (value := _ratios(quick(other), before)) < best:
            best, homes, chunks = value, other, changed
    return threads.map(partial(try_plan, shape=shape, config=config, cost=cost), dict.fromkeys((homes, first)))


def _keep(plan: Plan) -> TokenLayout:
    """Return the plan's layout, which keeps the plan."""
    plan.layout.__dict__[PLANNED] = plan
    return plan.layout


def warm_up_placement(report: Report = _logger.info) -> None:
    """Load placement's compiled code, and the planner's; has it compiled if no process of this machine has yet.

    Args:
        report: as for ``warm_up``.
    """
    warm_up(report)
    if not is_plain_python():
        _place_small_batch()


def _place_small_batch() -> None:
    layout = TokenLayout.from_segments([[(0, 0, 2048)], [(1, 0, 1024), (2, 0, 1024)]])
    shape = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=64, dtype_bytes=2)
    config = PlannerConfig()
    Dealer(layout, shape, config, TileAreaCost(config.cost_tile), 1).deal(1.0, by_node=False)


compiled_by(_place_small_batch, "_search")


def _is_clear(plan: Plan, quick: tuple[int, int] | None) -> bool:
    """Tell whether a plan is so much better than a quick one for the given homes that no other is needed for these."""
    if quick is None:
        return False
    total, worst = figures(plan)
    return total <= quick[0] and CLEARLY * worst <= quick[1]


def _value(plan: Plan, given: Plan | None) -> Fraction:
    """Compare a plan with that for the given homes by ``_ratios``; 1 + ``WORST`` if that one is no worse."""
    if given is None:
        return Fraction(1)
    (total, worst), (given_total, given_worst) = figures(plan), figures(given)
    if worst >= given_worst or total > MORE * given_total:
        return Fraction(1 + WORST)
    return _ratios((total, worst), (given_total, given_worst))  # of given homes that have a worst rank


def _ratios(these: tuple[int, int] | None, others: tuple[int, int]) -> Fraction:
    """Sum these bytes, of all ranks and ``WORST`` times the worst, over the others; more than any for None."""
    if these is None:
        return Fraction(2**62)
    return Fraction(these[0], others[0]) + WORST * Fraction(these[1], others[1])


def try_plan(layout: TokenLayout, shape: AttentionShape, config: PlannerConfig, cost: CostModel) -> Plan | None:
    """Return the plan for a layout; None if none keeps the capacities."""
    try:
        return plan_once(layout, shape, config, cost)
    except CapacityError:
        return None


def figures(plan: Plan) -> tuple[int, int]:
    """Sum the bytes of all ranks, and those of the worst: see ``Traffic.weighted``."""
    node = node_of_ranks(plan.config, plan.layout.num_ranks)
    traffic = measure_traffic(plan.shape, plan.query_needs, plan.key_needs, node)
    return traffic.weighted(plan.config.inter_node_weight)


class Dealer:
    """Deals the tokens of a layout; documents of less work than one part in ``short`` of the mean rank's stay whole."""

    def __init__(
        self, layout: TokenLayout, shape: AttentionShape, config: PlannerConfig, cost: CostModel, short: int
    ) -> None:
        num_ranks, tile, grid = layout.num_ranks, cost.granularity, config.min_shard
        lengths, room = layout.doc_lengths, layout.tokens_per_rank
        prefix = cost.prefix_cost(int(lengths.max())).astype(np.float64)
        work, pairs = prefix[-(-lengths // tile)], lengths.astype(np.float64) * (lengths + 1) / 2
        mean = float(work.sum()) / num_ranks
        speeds = Speeds.of(config, num_ranks)
        speed = np.array([float(value) for value in speeds.values])[speeds.index]
        self._layout = layout
        self._ranks = Ranks(room, (1 + config.tolerance) * mean * speed, speed, node_of_ranks(config, num_ranks))
        few, per_pair = num_ranks <= FEW, work.sum() / pairs.sum()
        self._prices = np.array([shape.query_bytes, shape.kv_bytes, per_pair], dtype=np.float64)
        most = max(grid, int(room.max()) // grid * grid)
        fewest = max(grid, most // FEWEST // grid * grid)
        best_rows = float(np.sqrt(pairs.sum() / num_ranks * shape.kv_bytes / shape.query_bytes))
        scale = float(np.sqrt(EFFORT / max(EFFORT, num_ranks)))
        most_choices, dealings = int(scale * EFFORTS[0]), int(scale * EFFORTS[1])
        moves = int(EFFORTS[2] * np.sqrt(max(MANY, num_ranks) / MANY))
        dealings, moves = (FEW_EFFORT * each if few else each for each in (dealings, moves))
        self._efforts = np.array([dealings, moves], dtype=np.int64)
        self._choices = _choices(mean, best_rows, fewest, most, grid, max(FEWEST_CHOICES, most_choices))
        is_long = (work * short > mean) | (lengths > most)
        whole = np.flatnonzero(~is_long)
        self._density = float(work[whole].sum()) / max(1, int(lengths[whole].sum()))
        self._documents = Documents(
            np.ascontiguousarray(lengths),
            layout.doc_offsets.astype(np.float64),
            np.flatnonzero(is_long),
            whole[np.argsort(-lengths[whole], kind="stable")],
            prefix,
            np.array([tile, grid, fewest, most]),
        )
        self._given, self._load = _given_chunks(layout, is_long, prefix, tile)
        chunks = max(int((lengths[is_long] // fewest + 3).sum()) + num_ranks, len(self._given.doc))
        self._chunks = Chunks(*_tables(chunks, "iiifi"))
        self._weights = np.zeros(3)
        self._state = make_state(num_ranks)
        self._scratch = make_scratch(num_ranks, chunks)

    def deal(
        self, weight: float, by_node: bool, seed: int = 0, before: Chunks | None = None
    ) -> tuple[TokenLayout, Chunks]:
        """Return the best layout found, the worst rank's bytes weighing ``weight`` times those of all, and its chunks.

        With ``by_node`` documents stay in one node where they can. With chunks that the same dealer dealt ``before``
        these are changed by a few moves.
        """
        num_before, efforts = 0, self._efforts
        if before is not None:
            num_before, efforts = len(before.doc), np.array([0, CHANGE_MOVES])
            for column, had in zip(self._chunks, before, strict=True):
                column[:num_before] = had
        ranks = self._ranks if by_node else self._ranks._replace(node=np.zeros_like(self._ranks.node))
        share = np.inf if len(ranks.room) <= FEW else SHARE
        given, how = (self._given, self._load), (self._choices, self._density, self._prices)
        random = np.array([seed])
        options = SearchOptions(*how, float(weight), share, *given, efforts, self._weights, num_before, random)
        count, home = search(self._documents, options, ranks, self._state, self._chunks, self._scratch)
        doc, start, length, rank = (
            column[:count] for column in (self._chunks.doc, self._chunks.start, self._chunks.length, self._chunks.rank)
        )
        whole, loose = np.flatnonzero(home >= 0), np.flatnonzero(home == -1)
        dealt, undealt = rank >= 0, (rank < 0) & (length > 0)
        lengths = self._documents.lengths
        parts = [
            np.stack([rank[dealt], doc[dealt], start[dealt], length[dealt]]),
            np.stack([home[whole], whole, np.zeros_like(whole), lengths[whole]]),
            self._fill_gaps(
                np.append(doc[undealt], loose),
                np.append(start[undealt], np.zeros_like(loose)),
                np.append(length[undealt], lengths[loose]),
            ),
        ]
        chunks = Chunks(doc.copy(), start.copy(), length.copy(), self._chunks.work[:count].copy(), rank.copy())
        return self._build(np.concatenate(parts, axis=1)), chunks

    def _fill_gaps(self, doc: IntArray, start: IntArray, length: IntArray) -> IntArray:
        """Fill the remaining room with the remaining tokens, end to end; [4, n] rank, document, start, length."""
        if not len(doc):
            return np.empty((4, 0), dtype=np.int64)
        gaps = np.flatnonzero(self._state.left)
        begin = exclusive_cumsum(length)
        source, gap, first, end = split_at(begin[:-1], begin[1:], exclusive_cumsum(self._state.left[gaps])[:-1])
        return np.stack([gaps[gap], doc[source], start[source] + first - begin[source], end - first])

    def _build(self, parts: IntArray) -> TokenLayout:
        """Return a layout of parts [4, n], neighbours joined."""
        rank, doc, start, length = parts[:, np.lexsort((parts[2], parts[1], parts[0]))]
        joins = np.zeros(len(rank), dtype=bool)
        joins[1:] = (rank[1:] == rank[:-1]) & (doc[1:] == doc[:-1]) & (start[1:] == (start + length)[:-1])
        first = np.flatnonzero(~joins)
        columns = rank[first], self._layout.docs[doc[first]], start[first], np.add.reduceat(length, first)
        return TokenLayout.from_arrays(self._layout.num_ranks, *columns)


def _given_chunks(layout: TokenLayout, is_long: np.ndarray, prefix: FloatArray, tile: int) -> tuple[Chunks, FloatArray]:
    """Return what the given homes have of documents that are long or on several ranks, and [num_ranks] their work."""
    order = layout.run_order
    start, length, rank = (column[order] for column in (layout.seg_start, layout.seg_length, layout.seg_rank))
    doc = layout.doc_index(layout.seg_doc[order])
    work = prefix[-(-(start + length) // tile)] - prefix[start // tile]
    cut = (is_long | (np.bincount(doc) > 1))[doc]
    chunks = Chunks(doc[cut], start[cut], length[cut], work[cut], rank[cut])
    return chunks, np.bincount(rank, work, layout.num_ranks).astype(np.float64)


def _tables(size: int, kinds: str) -> list[np.ndarray]:
    """Arrays [size], of int64 for every i, of float64 for every f."""
    return [np.empty(size, dtype=np.int64 if kind == "i" else np.float64) for kind in kinds]


def _choices(mean: float, best_rows: float, fewest: int, most: int, grid: int, count: int) -> FloatArray:
    """[n, 3], at most ``count``: work of a chunk, at most, and its tokens, at least and at most."""
    choices = set()
    for work, least, longest in product(WORK, LEAST, MOST):
        if least <= longest:
            lower = min(most, max(fewest, int(least * best_rows) // grid * grid))
            choices.add((work * mean, lower, min(most, max(lower, int(longest * best_rows) // grid * grid))))
    every = np.array(sorted(choices), dtype=np.float64)
    return every[np.linspace(0, len(every) - 1, min(count, len(every))).astype(np.int64)]
