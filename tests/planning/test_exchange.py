"""Exchange tables and the indexes they are built from; that they carry out plans is in test_properties.py."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.layouts import LLAMA, Case, cases
from tests.plans import random_tasks
from torchtitan_cad.planning import Plan, PlannerConfig, RankExchange
from torchtitan_cad.planning.exchange.needs import offsets_by_rank, order_by_rank


@pytest.mark.parametrize("num_ranks", [1, 7, 2**16, 2**16 + 1, 10**6])
def test_order_by_rank_is_stable(num_ranks: int) -> None:
    rank = np.random.default_rng(0).integers(0, num_ranks, size=500)
    rank[:3] = num_ranks - 1
    order, offsets = order_by_rank(rank, num_ranks), offsets_by_rank(rank, num_ranks)
    assert order.tolist() == sorted(range(500), key=lambda i: (rank[i], i))
    assert len(offsets) == num_ranks + 1
    assert (rank[order[offsets[num_ranks - 1] :]] == num_ranks - 1).all()


@given(case=cases, seed=st.integers(0, 2**32 - 1))
def test_needs_count_the_rows_that_leave_home(case: Case, seed: int) -> None:
    layout = Case(case.family, min(case.num_ranks, 6), 1 + case.tokens % 60, 8, 0.0, 1, case.seed).layout()
    plan = Plan.from_tasks(layout, LLAMA, PlannerConfig(), random_tasks(np.random.default_rng(seed), layout))
    home = np.concatenate(
        [np.full(n, r) for r, n in zip(layout.run_rank, layout.seg_length[layout.run_order], strict=True)] or [[]]
    )
    node = np.arange(layout.num_ranks) // 2
    for needs, begin, end in ((plan.query_needs, "q_start", "q_end"), (plan.key_needs, "kv_start", "kv_end")):
        counts = np.zeros((layout.num_ranks, layout.num_ranks), dtype=np.int64)
        for server in range(layout.num_ranks):
            used = np.zeros(layout.num_tokens, dtype=bool)
            for task in plan.tasks[plan.tasks["server"] == server]:
                base = layout.doc_offsets[layout.doc_index(task["doc"].reshape(1))[0]]
                used[base + task[begin] : base + task[end]] = True
            counts[:, server] = np.bincount(home[used].astype(np.int64), minlength=layout.num_ranks)
            counts[server, server] = 0
        np.testing.assert_equal(needs.rows_in(), counts.sum(axis=0))
        np.testing.assert_equal(needs.rows_out(), counts.sum(axis=1))
        inside = np.where(node[:, None] == node, counts, 0)
        np.testing.assert_equal(needs.rows_inside(node), [inside.sum(axis=0), inside.sum(axis=1)])
        for rank in range(layout.num_ranks):
            sent = needs.sent_by(rank)
            found = np.bincount(sent.peer, weights=sent.end - sent.start, minlength=layout.num_ranks)
            np.testing.assert_equal(found, counts[rank])
            peers = np.flatnonzero(counts[rank])
            wanted = np.where(counts[rank], counts[:rank].sum(axis=0), 0)
            np.testing.assert_equal(needs.put_offsets(rank, peers), wanted)
            peers = np.flatnonzero(counts[:, rank])
            wanted = np.where(counts[:, rank], counts[:, :rank].sum(axis=1), 0)
            np.testing.assert_equal(needs.return_offsets(rank, peers), wanted)


@given(case=cases, seed=st.integers(0, 2**32 - 1))
def test_tables_depend_on_layout_and_tasks_alone(case: Case, seed: int) -> None:
    """Of a plan read from a file, in another order of ranks, they are the same."""
    layout = Case(case.family, min(case.num_ranks, 6), 1 + case.tokens % 60, 8, 0.0, 1, case.seed).layout()
    plan = Plan.from_tasks(layout, LLAMA, PlannerConfig(), random_tasks(np.random.default_rng(seed), layout))
    tables = [plan.exchange(rank) for rank in range(layout.num_ranks)]
    again = Plan.from_json(plan.to_json())
    for rank in reversed(range(layout.num_ranks)):
        assert_same(again.exchange(rank), tables[rank])


def assert_same(one: RankExchange, other: RankExchange) -> None:
    for name, value in dataclasses.asdict(one).items():
        np.testing.assert_equal(value, dataclasses.asdict(other)[name], err_msg=name)
