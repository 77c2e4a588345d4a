# SPDX-License-Identifier: BSD-3-Clause
"""Properties of every plan, on drawn layouts: some with queries left out, unequal ranks and nodes."""

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.layouts import cases, shapes
from tests.lib.reference import check_bound, check_cuts, check_guarantee, check_loads
from tests.lib.tables import check_plan
from torchtitan_cad.planning import TokenLayout, make_plan
from torchtitan_cad.planning.model.tasks import merge_queries

SHARES = st.sampled_from([1.0, 1.0, 1.0, 0.9, 0.5, 0.2, 0.0])
"""Parts of the runs that attend."""


def some_attend(layout, share, seed):
    """The layout with every run cut once, and a share of the runs attending."""
    if share == 1.0:
        return layout
    rng = np.random.default_rng(seed)
    first = rng.integers(0, layout.seg_length + 1)
    lengths = np.stack([first, layout.seg_length - first], axis=1).ravel()
    starts = np.stack([layout.seg_start, layout.seg_start + first], axis=1).ravel()
    rank = np.repeat(layout.seg_rank, 2)
    doc = np.repeat(layout.seg_doc, 2)
    return TokenLayout.from_arrays(
        layout.num_ranks, rank, doc, starts, lengths, rng.random(len(rank)) < share
    )


@st.composite
def problems(draw):
    """A layout to plan, and the options."""
    case = draw(cases)
    layout = some_attend(case.layout(), draw(SHARES), case.seed)
    config = dataclasses.replace(
        case.config,
        split_kv=draw(st.booleans()),
        ranks_per_node=draw(st.sampled_from([None, None, 1, 2, 5])),
    )
    return layout, config


@given(problem=problems(), shape=shapes)
def test_every_layout(problem, shape):
    layout, config = problem
    plan = make_plan(layout, shape, config)
    at_home = dataclasses.replace(config, planner="home")
    home = make_plan(layout, shape, at_home)
    for made in (plan, home):
        check_plan(made)
        check_bound(made)
        assert merge_queries(made.tasks).tolist() == made.tasks.tolist()
    assert home.stats.query_rows_moved == home.stats.tasks_moved == 0
    check_loads(plan)
    check_guarantee(plan, home)
    check_cuts(plan, home)
    assert plan.stats.max_over_mean_before == home.stats.max_over_mean
    # a shard is long on a slow rank
    if config.ranks_per_node is None:
        assert plan.stats.max_over_mean <= home.stats.max_over_mean
