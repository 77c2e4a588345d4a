"""Homes that move little: which rank should hold which tokens of a batch.

``docs/placement.md`` describes the problem, the algorithm and what each part of it gains.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from itertools import chain, islice, product
from typing import NamedTuple, TypeAlias

from torchtitan_cad.planning.compile_once import Report, compiled_by
from torchtitan_cad.planning.exchange.traffic import measure_traffic, node_of_ranks
from torchtitan_cad.planning.jit import is_plain_python
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import CostModel, TileAreaCost
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.limits import CapacityError
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.placement.dealer import FEW, Aim, Dealer
from torchtitan_cad.planning.placement.dealing import Chunks
from torchtitan_cad.planning.plan import Plan, checked_planner, keep, plan_once, warm_up
from torchtitan_cad.planning.planners.tiling.planner import is_tiled_once, quick_figures

_logger = logging.getLogger(__name__)

Figures: TypeAlias = tuple[int, int]
"""Bytes of all ranks, and of the worst."""

Plans: TypeAlias = tuple[Plan | None, Plan | None]
"""For the best homes and for the given ones; None where no plan keeps the capacities."""


class Contest(NamedTuple):
    """Dealings of which quick plans tell the best."""

    ranks: int
    """Ranks up to which it is held."""
    aims: tuple[Aim, ...]
    seeds: int
    """Dealings for every aim, by other random numbers."""
    changes: int
    """How often the best is changed, and changed back unless a quick plan then has fewer bytes."""
    worst: Fraction
    """Weight of the worst rank's bytes: these, over those with the given homes, count so many times as much as the same
    ratio of all bytes."""


CONTESTS = (
    Contest(FEW, (Aim(4, 0.6), Aim(4, 1.0), Aim(8, 4.0), Aim(30, 0.3)), 2, 60, Fraction(3)),
    Contest(64, (Aim(4, 0.5), Aim(4, 1.5), Aim(4, 0.5, 1.0), Aim(4, 1.5, 1.0)), 2, 0, Fraction(3, 10)),
)
"""The first that is for so many ranks is held if quick plans can be made; for few ranks, if these share a node."""

AIMS = (Aim(4, 1.5), Aim(20, 0.2))
"""Those of the dealings tried without a contest, one after the other, until one is better than the given homes."""

THREADS = 4
"""Dealings and plans that are made side by side, at most."""

COMPARED = 2
"""Homes better than the given ones of which the best is taken, where a contest was held on ranks in nodes: its winner
and one dealt by node, as a rule."""

MORE = Fraction(103, 100)
"""Bytes of all ranks over those of the given homes, at most: what may be paid for a better worst rank."""


def place(
    layout: TokenLayout, shape: AttentionShape, config: PlannerConfig | None = None, cost: CostModel | None = None
) -> TokenLayout:
    """Deal the tokens to ranks anew, so that the plan that follows loads no rank with many bytes.

    Every rank has as many tokens as in ``layout``, in document order. Equal inputs give equal homes on every rank.
    A layout that leaves queries out keeps its homes, and so does one for which no better are found: neither the bytes
    of the worst rank nor, beyond ``MORE``, those of all ranks exceed those of a plan for the given homes. Bytes between
    nodes count ``inter_node_weight`` times, and plans are compared without regard to ``buffer_bytes``.

    Raises:
        ValueError: as ``make_plan``.
    """
    warm_up()
    config = config or PlannerConfig()
    cost = TileAreaCost(config.cost_tile) if cost is None else cost
    if layout.num_ranks == 1 or not layout.num_tokens or not layout.seg_attends.all():
        return layout
    checked_planner(layout, config, cost)
    request = _Request(layout, shape, config, cost)
    search = _best_on_few if layout.num_ranks <= FEW else _best_on_many
    with ThreadPoolExecutor(THREADS) as threads:
        best, old = search(request, is_tiled_once(request.blind, cost), threads)
    for plan in filter(None, (best, old)):
        keep(plan)
    return layout if best is None else best.layout


class _Request(NamedTuple):
    """What ``place`` is asked."""

    layout: TokenLayout
    shape: AttentionShape
    config: PlannerConfig
    cost: CostModel

    @property
    def has_nodes(self) -> bool:
        """Tell whether ranks are on several nodes."""
        return bool(node_of_ranks(self.config, self.layout.num_ranks)[-1])

    @property
    def ways(self) -> tuple[bool, ...]:
        """Return whether to deal by node: both where there are nodes."""
        return (True, False) if self.has_nodes else (False,)

    @property
    def blind(self) -> PlannerConfig:
        """The config without nodes, of which quick plans know nothing."""
        return replace(self.config, ranks_per_node=None)

    def plan(self, homes: TokenLayout) -> Plan | None:
        """Plan as usual; None if no plan keeps the capacities."""
        return try_plan(homes, self.shape, self.config, self.cost)

    def quick(self, homes: TokenLayout) -> Figures | None:
        """Return the bytes of a quick plan, wherever the nodes are."""
        return quick_figures(homes, self.shape, self.blind, self.cost)

    def dealer(self, aim: Aim) -> Dealer:
        """Return a dealer of the tokens."""
        return Dealer(self.layout, self.shape, self.config, self.cost, aim)

    def deal_and_plan(self, options: tuple[Aim, bool]) -> Plan | None:
        """Plan one dealing, for this aim and by node or not."""
        aim, by_node = options
        return self.plan(self.dealer(aim).deal(by_node)[0])


def _best_on_few(request: _Request, has_quick: bool, threads: ThreadPoolExecutor) -> Plans:
    """Plan for the best homes, the given ones among them, and for the given ones."""
    contest, old = CONTESTS[0], request.plan(request.layout)
    if old is not None and figures(old) == (0, 0):
        return old, old
    if has_quick and not request.has_nodes:
        plans = _compete(contest, request, lambda: None if old is None else figures(old), threads)
    else:
        plans = threads.map(request.deal_and_plan, product(contest.aims, request.ways))
    return _best(plans, old, contest.worst), old


def _best_on_many(request: _Request, has_quick: bool, threads: ThreadPoolExecutor) -> Plans:
    """Return what ``_best_on_few`` does, but mostly take the first homes that are better than the given ones."""
    contest = next((each for each in CONTESTS if has_quick and request.layout.num_ranks <= each.ranks), None)
    given = threads.submit(request.plan, request.layout)
    ways = request.ways if contest else request.ways[:1]  # plans with nodes take long on many ranks
    plans: Iterator[Plan | None] = map(request.deal_and_plan, product(AIMS, ways))
    if contest is not None:
        quick = threads.submit(request.quick, request.layout)
        plans = chain(_compete(contest, request, quick.result, threads), plans)
    first = next(plans)  # while the other thread plans for the given homes
    compared = COMPARED if contest and request.has_nodes else 1
    old = given.result()
    return _best(chain([first], plans), old, CONTESTS[0].worst, compared), old


def _best(plans: Iterator[Plan | None], old: Plan | None, worst: Fraction, compared: int | None = None) -> Plan | None:
    """Return the best of the first few plans that are better than the old one, which is returned if none is."""
    better = (plan for plan in plans if plan is not None and _is_better(plan, old))
    if old is None:
        return next(better, None)
    before = figures(old)
    return min(islice(better, compared), key=lambda plan: _ratios(figures(plan), before, worst), default=old)


def _compete(
    contest: Contest, request: _Request, given: Callable[[], Figures | None], threads: ThreadPoolExecutor
) -> Iterator[Plan | None]:
    """Plan the best of some dealings, and what it becomes by changes after which quick plans have fewer bytes.

    Args:
        given: the bytes of the given homes.
    """

    def deal(options: tuple[Aim, int]) -> tuple[Dealer, TokenLayout, Chunks, Figures | None]:
        aim, seed = options
        dealer = request.dealer(aim)
        homes, chunks = dealer.deal(by_node=False, seed=seed)
        return dealer, homes, chunks, request.quick(homes)

    dealt = list(threads.map(deal, product(contest.aims, range(contest.seeds))))
    before = given()
    if before is None or not before[1]:  # nothing to gain
        return iter(())
    dealer, first, chunks, now = min(dealt, key=lambda each: _ratios(each[-1], before, contest.worst))
    best, homes = _ratios(now, before, contest.worst), first
    for seed in range(int(dealer.part_of_moves * contest.changes)):
        other, changed = dealer.deal(by_node=False, seed=1 + seed, before=chunks)
        if (value := _ratios(request.quick(other), before, contest.worst)) < best:
            best, homes, chunks = value, other, changed
    return threads.map(request.plan, dict.fromkeys((homes, first)))


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
    Dealer(layout, shape, config, TileAreaCost(config.cost_tile), Aim(1, 1.0)).deal(by_node=False)


compiled_by(_place_small_batch, "_search")


def _is_better(plan: Plan, given: Plan | None) -> bool:
    """Tell whether homes have fewer bytes for the worst rank, by their plan, and not many more in total."""
    if given is None:
        return True
    (total, worst), (given_total, given_worst) = figures(plan), figures(given)
    return worst < given_worst and total <= MORE * given_total


def _ratios(these: Figures | None, others: Figures, worst: Fraction) -> Fraction:
    """Sum these bytes, of all ranks and ``worst`` times the worst, over the others; more than any for None."""
    if these is None:
        return Fraction(2**62)
    return Fraction(these[0], others[0]) + worst * Fraction(these[1], others[1])


def try_plan(layout: TokenLayout, shape: AttentionShape, config: PlannerConfig, cost: CostModel) -> Plan | None:
    """Return the plan for a layout; None if none keeps the capacities."""
    try:
        return plan_once(layout, shape, config, cost)
    except CapacityError:
        return None


def figures(plan: Plan) -> Figures:
    """Sum the bytes of all ranks, and those of the worst: see ``Traffic.weighted``."""
    node = node_of_ranks(plan.config, plan.layout.num_ranks)
    traffic = measure_traffic(plan.shape, plan.query_needs, plan.key_needs, node)
    return traffic.weighted(plan.config.inter_node_weight)
