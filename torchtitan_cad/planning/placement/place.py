"""Homes that move little: which rank should hold which tokens of a batch.

``docs/placement.md`` describes the problem, the algorithm and what each part of it gains.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from itertools import chain, product
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
from torchtitan_cad.planning.plan import PLANNED, Plan, checked_planner, plan_once, warm_up
from torchtitan_cad.planning.planners.tiling.planner import is_tiled_once, quick_figures

_logger = logging.getLogger(__name__)

Figures: TypeAlias = tuple[int, int]
"""Bytes of all ranks, and of the worst."""


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
    """Weight of the worst rank's bytes: these, over those by the plan for the given homes, count so many times as much
    as the same ratio of all bytes."""


CONTESTS = (
    Contest(FEW, (Aim(4, 0.6), Aim(4, 1.0), Aim(8, 4.0), Aim(30, 0.3)), 2, 60, Fraction(3)),
    Contest(64, (Aim(4, 0.5), Aim(4, 1.5), Aim(4, 0.5, 1.0), Aim(4, 1.5, 1.0)), 2, 0, Fraction(3, 10)),
)
"""The first that is for so many ranks is held if quick plans can be made."""

AIMS = (Aim(4, 1.5), Aim(20, 0.2))
"""Those of the dealings tried without a contest, one after the other, until one is better than the given homes."""

THREADS = 4
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
    few, has_quick = layout.num_ranks <= FEW, is_tiled_once(config, cost)
    contest = next((each for each in CONTESTS if layout.num_ranks <= each.ranks), None) if has_quick else None
    nodes = node_of_ranks(config, layout.num_ranks)[-1] + 1
    aims = list(product(CONTESTS[0].aims if few else AIMS, (True, False) if nodes > 1 else (False,)))

    def deal_and_plan(options: tuple[Aim, bool]) -> Plan | None:
        aim, by_node = options
        return try_plan(Dealer(layout, shape, config, cost, aim).deal(by_node)[0], shape, config, cost)

    with ThreadPoolExecutor(THREADS) as threads:
        if few:
            old = try_plan(layout, shape, config, cost)
            before = None if old is None else figures(old)
            if old is not None and before == (0, 0):
                return _keep(old)
            if contest is None:
                plans: Iterator[Plan | None] = threads.map(deal_and_plan, aims)
            else:
                plans = _compete(contest, layout, shape, config, cost, lambda: before, threads)
        else:
            before = None
            plans = map(deal_and_plan, aims)
            if has_quick:
                quick = threads.submit(quick_figures, layout, shape, config, cost)
                if contest is not None:
                    plans = chain(_compete(contest, layout, shape, config, cost, quick.result, threads), plans)
                first = next(plans)
                if first is not None and _is_clear(first, quick.result()):
                    return _keep(first)
                plans = chain([first], plans)
            old = try_plan(layout, shape, config, cost)
        better = (plan for plan in plans if plan is not None and _is_better(plan, old))
        best = next(better, None)
        if before is not None and best is not None:
            best = min(chain([best], better), key=lambda plan: _ratios(figures(plan), before, CONTESTS[0].worst))
    if old is not None:
        _keep(old)
    best = old if best is None else best
    return layout if best is None else _keep(best)


def _compete(
    contest: Contest,
    layout: TokenLayout,
    shape: AttentionShape,
    config: PlannerConfig,
    cost: CostModel,
    given: Callable[[], Figures | None],
    threads: ThreadPoolExecutor,
) -> Iterator[Plan | None]:
    """Plan the best of some dealings, and what it becomes by changes after which quick plans have fewer bytes."""

    def quick(homes: TokenLayout) -> Figures | None:
        return quick_figures(homes, shape, config, cost)

    def deal(options: tuple[Aim, int]) -> tuple[Dealer, TokenLayout, Chunks, Figures | None]:
        aim, seed = options
        dealer = Dealer(layout, shape, config, cost, aim)
        homes, chunks = dealer.deal(by_node=False, seed=seed)
        return dealer, homes, chunks, quick(homes)

    dealt = list(threads.map(deal, product(contest.aims, range(contest.seeds))))
    before = given()
    if before is None or not before[1]:  # nothing to gain
        return iter(())
    dealer, first, chunks, now = min(dealt, key=lambda each: _ratios(each[-1], before, contest.worst))
    best, homes = _ratios(now, before, contest.worst), first
    for seed in range(int(dealer.effort * contest.changes)):
        other, changed = dealer.deal(by_node=False, seed=1 + seed, before=chunks)
        if (value := _ratios(quick(other), before, contest.worst)) < best:
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
    Dealer(layout, shape, config, TileAreaCost(config.cost_tile), Aim(1, 1.0)).deal(by_node=False)


compiled_by(_place_small_batch, "_search")


def _is_clear(plan: Plan, quick: Figures | None) -> bool:
    """Tell whether a plan is so much better than a quick one for the given homes that no other is needed for these."""
    if quick is None:
        return False
    total, worst = figures(plan)
    return total <= quick[0] and worst < quick[1] >= CLEARLY * worst


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
