"""Exchange tables and the indexes they are built from; that they carry out plans is in test_properties.py."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_cad.planning import Plan, PlannerConfig, RankExchange
from torchtitan_cad.planning.transfers import offsets_by_rank, order_by_rank

from .layouts import LLAMA, Case, cases
from .random_plans import random_tasks


@pytest.mark.parametrize("num_ranks", [1, 7, 2**16, 2**16 + 1, 10**6])
def test_order_by_rank_is_stable(num_ranks: int) -> None:
    rank = np.random.default_rng(0).integers(0, num_ranks, size=500)
    rank[:3] = num_ranks - 1
    order, offsets = order_by_rank(rank, num_ranks), offsets_by_rank(rank, num_ranks)
    assert order.tolist() == sorted(range(500), key=lambda i: (rank[i], i))
    assert len(offsets) == num_ranks + 1
    assert (rank[order[offsets[num_ranks - 1] :]] == num_ranks - 1).all()


@settings(max_examples=100)
@given(case=cases, seed=st.integers(0, 2**32 - 1))
def test_sent_rows_are_those_that_leave_home(case: Case, seed: int) -> None:
    layout = Case(case.family, min(case.num_ranks, 6), 1 + case.tokens % 60, 8, 0.0, 1, case.seed).layout()
    plan = Plan.from_tasks(layout, LLAMA, PlannerConfig(), random_tasks(layout, np.random.default_rng(seed)))
    for needs in (plan.query_needs, plan.key_needs):
        sent, offsets = needs.sent
        moved = [i for i in range(len(needs.home)) if needs.home[i] != needs.server[i]]
        assert sent.tolist() == sorted(moved, key=lambda i: (needs.home[i], i))
        for rank in range(layout.num_ranks):
            assert (needs.home[sent[offsets[rank] : offsets[rank + 1]]] == rank).all()
            rows = [int(needs.length[i]) for i in moved]
            assert needs.rows_in()[rank] == sum(n for n, i in zip(rows, moved, strict=True) if needs.server[i] == rank)
            assert needs.rows_out()[rank] == sum(n for n, i in zip(rows, moved, strict=True) if needs.home[i] == rank)


@settings(max_examples=50)
@given(case=cases, seed=st.integers(0, 2**32 - 1))
def test_tables_depend_on_layout_and_tasks_alone(case: Case, seed: int) -> None:
    """Of a plan read from a file, in another order of ranks, they are the same."""
    layout = Case(case.family, min(case.num_ranks, 6), 1 + case.tokens % 60, 8, 0.0, 1, case.seed).layout()
    plan = Plan.from_tasks(layout, LLAMA, PlannerConfig(), random_tasks(layout, np.random.default_rng(seed)))
    tables = [plan.exchange(rank) for rank in range(layout.num_ranks)]
    again = Plan.from_json(plan.to_json())
    for rank in reversed(range(layout.num_ranks)):
        assert_same(again.exchange(rank), tables[rank])


def assert_same(one: RankExchange, other: RankExchange) -> None:
    for name, value in dataclasses.asdict(one).items():
        np.testing.assert_equal(value, dataclasses.asdict(other)[name], err_msg=name)
