# SPDX-License-Identifier: BSD-3-Clause
"""Planning one microbatch: homes for its nano-batches, and plans of the least predicted time.

With ``tolerance = "auto"`` queries stay home where moving does not gain. A plan of lower tolerance balances better and
moves more bytes. Which plan is faster depends on the batch and on the machine: the exchange costs only the time by
which it exceeds the work that hides it.

Where rows are cut in the middle, the later nano-batch attends to keys of the earlier nano-batch, and the plan moves
these keys again. The keys of a document that lies in one nano-batch move once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from torchtitan_cad.planning.intervals import IntArray, end_to_end
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.placement.place import place_and_plan
from torchtitan_cad.planning.plan import Plan, make_plan, moved_by
from torchtitan_cad.planning.timed import LayerTimes

TOLERANCES = (0.0, 0.02, 0.15, 0.4)
"""The tolerances that are tried, ascending."""
LEAST_GAIN = 0.01
"""A plan that is predicted to save less than this share of the time at home is not taken."""


def plan_in_place(
    layouts: Sequence[TokenLayout], shape: AttentionShape, config: PlannerConfig
) -> list[Plan]:
    """Plan the nano-batches of a microbatch for the homes that they have."""
    return [make_plan(layout, shape, config) for layout in layouts]


def stay_home(
    layouts: Sequence[TokenLayout], shape: AttentionShape, config: PlannerConfig
) -> list[Plan]:
    """Plan the nano-batches such that every query is served at home."""
    return plan_in_place(layouts, shape, replace(config, planner="home"))


def place_microbatch(
    layouts: Sequence[TokenLayout], shape: AttentionShape, config: PlannerConfig
) -> list[Plan]:
    """Place and plan a microbatch: one nano-batch, two by rows, or two of which the later attends to the earlier.

    In the last case the second layout holds all tokens, those of the earlier nano-batch first on every rank and as keys
    only. Documents are divided between these nano-batches first, and then placed within each. At most one document lies
    in both, the longest that fits in neither.

    Returns:
        Plans whose layouts have as many tokens of each nano-batch on every rank. The given layouts are kept if no
        better ones are found.

    Raises:
        ValueError: as ``make_plan``.
    """
    if layouts[-1].seg_attends.all():
        return [place_and_plan(layout, shape, config) for layout in layouts]
    earlier, every = layouts
    given_plans = plan_in_place(layouts, shape, config)
    before = moved_by(*given_plans)
    if not before.worst:
        return given_plans
    earlier_capacities = earlier.tokens_per_rank
    begun = divide_documents(every.doc_lengths, int(earlier_capacities.sum()))
    # Within a nano-batch, the tokens of a document that is cut count as a document of their own.
    first_layout = _lay_out(every.docs, begun, earlier_capacities)
    later = every.doc_lengths - begun
    second_layout = _lay_out(every.docs, later, every.queries_per_rank)
    first = place_and_plan(first_layout, shape, config)
    second = place_and_plan(second_layout, shape, config)
    shift = begun[every.doc_index(second.layout.seg_doc)]
    plans = [first, with_earlier_keys(first, second, shift)]
    score = moved_by(*plans).score(before)
    is_better = score < before.score(before)
    return plans if is_better else given_plans


def plan_by_time(
    layouts: Sequence[TokenLayout],
    shape: AttentionShape,
    config: PlannerConfig,
    times: LayerTimes,
    *,
    place: bool = False,
) -> list[Plan]:
    """Plan a microbatch's nano-batches for the least predicted time over ``TOLERANCES``, and maybe place them.

    They stay home, with ``stay_home``, where no plan saves ``LEAST_GAIN``. Tolerances rise until the exchange is
    hidden: then balance alone counts, which higher ones only worsen. ``Plan.config`` tells which was chosen. Equal
    inputs give equal plans.

    Raises:
        ValueError: as ``make_plan``.
    """
    best = stay_home(layouts, shape, config)
    balanced_seconds = sum(times.best_seconds(plan) for plan in best)
    seconds_at_home = times.microbatch_seconds(best)
    best_seconds = (1 - LEAST_GAIN) * seconds_at_home
    if config.planner == "home" or balanced_seconds > best_seconds:
        return best
    make = place_microbatch if place else plan_in_place
    for tolerance in TOLERANCES:
        with_tolerance = replace(config, tolerance=tolerance)
        plans = make(layouts, shape, with_tolerance)
        seconds = times.microbatch_seconds(plans)
        if seconds < best_seconds:
            best = plans
            best_seconds = seconds
        if not any(times.exposed_seconds(plan) for plan in plans):
            break
    return best


def with_earlier_keys(first: Plan, second: Plan, shift: IntArray | int = 0) -> Plan:
    """Plan the later of two nano-batches with the earlier one's tokens as keys.

    Args:
        shift: [S] tokens of its document in the earlier nano-batch, by segment of the later one's layout.
    """
    keys = first.layout
    queries = second.layout
    layout = TokenLayout.from_arrays(
        keys.num_ranks,
        np.append(keys.seg_rank, queries.seg_rank),
        np.append(keys.seg_doc, queries.seg_doc),
        np.append(keys.seg_start, queries.seg_start + shift),
        np.append(keys.seg_length, queries.seg_length),
        np.repeat([False, True], [len(keys.seg_rank), len(queries.seg_rank)]),
    )
    return make_plan(layout, second.shape, second.config)


def divide_documents(lengths: IntArray, capacity: int) -> IntArray:
    """Return int64 [D]: how many first tokens of every document are in the earlier nano-batch, of ``capacity`` tokens.

    Documents go, the longest first, to the nano-batch with less attention among those with capacity. The first document
    that fits in neither nano-batch is cut such that the earlier nano-batch is full.
    """
    begun = np.zeros_like(lengths)
    capacities = [capacity, int(lengths.sum()) - capacity]
    work = [0, 0]
    for doc in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[doc])
        fits = [nano for nano in (0, 1) if length <= capacities[nano]]
        chosen = min(fits, key=work.__getitem__, default=None)
        cut = {0: length, 1: 0, None: capacities[0]}[chosen]
        begun[doc] = cut
        for nano, (start, end) in enumerate(((0, cut), (cut, length))):
            capacities[nano] -= end - start
            work[nano] += end**2 - start**2
    return begun


def _lay_out(docs: IntArray, lengths: IntArray, capacities: IntArray) -> TokenLayout:
    """Lay documents of these ids and lengths end to end over ranks with ``capacities`` [num_ranks] tokens."""
    used = lengths > 0
    source, rank, start, end = end_to_end(lengths[used], capacities)
    return TokenLayout.from_arrays(
        len(capacities), rank, docs[used][source], start, end - start
    )
