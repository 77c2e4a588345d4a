"""Division of a rank's tasks into kernel calls: every pair of query and key is seen once, by calls of bounded size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_cad.planning.exchange.calls import (
    MAX_CALLS,
    MOST_CALLS,
    MOST_REPEATED,
    Calls,
    bounded,
    halves,
    weighted_rows,
)
from torchtitan_cad.planning.exchange.tables import CallTable
from torchtitan_cad.planning.intervals import exclusive_cumsum
from torchtitan_cad.runtime.combine import TENSOR_BITS

TASKS = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 400), st.booleans()), min_size=1, max_size=8)
"""Queries, keys before them, and whether the task is causal."""


def tables(tasks: list[tuple[int, int, bool]]) -> Calls:
    """Causal and unmasked tasks, one document each: the row of a query or key is its place among all tasks'."""
    calls, base = [], 0
    for causal in (True, False):
        mine = [(queries, max(before, 1)) for queries, before, is_causal in tasks if is_causal is causal]
        if not mine:
            continue
        q_length = np.array([queries for queries, _ in mine])
        k_length = np.array([before + queries * causal for queries, before in mine])
        cu_q, cu_k = exclusive_cumsum(q_length), exclusive_cumsum(k_length)
        first = 1000 * np.arange(len(mine))
        rows = [base + np.arange(cu[-1]) for cu in (cu_q, cu_k)]
        base += int(max(cu_q[-1], cu_k[-1]))
        q_start = first + k_length - q_length * causal
        cu = (cu_q.astype(np.int32), cu_k.astype(np.int32))
        calls.append((CallTable(*rows, *cu, int(q_length.max()), int(k_length.max()), q_start, first), causal))
    return calls


def pairs(calls: Calls) -> list[tuple[int, int]]:
    """Rows of every query and key that see each other, sorted."""
    seen = []
    for table, causal in calls:
        for i in range(table.num_tasks):
            for j, q_row in enumerate(table.q_rows[table.cu_q[i] : table.cu_q[i + 1]].tolist()):
                keys = table.kv_rows[table.cu_k[i] : table.cu_k[i + 1]].tolist()
                visible = int(table.q_start[i] + j - table.kv_start[i] + 1) if causal else len(keys)
                assert not causal or table.q_start[i] + np.diff(table.cu_q)[i] == table.kv_start[i] + len(keys)
                seen += [(q_row, k_row) for k_row in keys[:visible]]
    return sorted(seen)


def total_rows(calls: Calls) -> int:
    return sum(int(weighted_rows(table)[-1]) for table, _ in calls)


@given(TASKS, st.integers(1, 100), st.booleans(), st.booleans())
def test_calls_see_every_pair_once(tasks, num_local: int, split_keys: bool, two_rounds: bool) -> None:
    whole = tables(tasks)
    rounds = halves(whole) if two_rounds else [whole]
    cut = [call for calls in bounded(rounds, num_local, split_keys=split_keys) for call in calls]
    assert pairs(cut) == pairs(whole)
    for table, _ in cut:
        assert table.num_tasks
        assert table.max_q == np.diff(table.cu_q).max()
        assert table.max_k == np.diff(table.cu_k).max()
    assert total_rows(cut) <= (1 + MOST_REPEATED) ** (1 + two_rounds) * total_rows(whole)
    assert len(cut) <= MAX_CALLS < 1 << TENSOR_BITS
    if not split_keys:
        assert sum(table.num_tasks for table, _ in cut) == len(tasks)


@pytest.mark.parametrize(
    ("tasks", "even"),
    [
        ([(768, 0, True), (128, 0, True)], True),  # a document and little else
        ([(100, 300, True), (1024, 200, False), (200, 10, False)], True),
        ([(300, 8000, True)], False),  # its keys would be read twice
        ([(120, 0, True)], False),  # smaller than a tile
        ([(200, 100, False), (220, 100, False)], True),
    ],
)
def test_halves_are_even_where_a_task_can_be_cut(tasks: list[tuple[int, int, bool]], even: bool) -> None:
    whole = tables(tasks)
    first, second = halves(whole)
    assert pairs(first + second) == pairs(whole)
    share = len(pairs(first)) / len(pairs(whole))
    assert (0.375 <= share <= 0.625) == even
    assert len(first) <= len(whole), "no calls are added"
    assert len(second) <= len(whole)


@pytest.mark.parametrize("causal", [True, False])
def test_a_task_of_many_keys_is_cut_along_them(causal: bool) -> None:
    """One task has nine tenths of the rows; its pieces are alike."""
    whole = tables([(16, 4000, causal), (10, 300, False)])
    (kept,) = bounded([whole], 10, split_keys=False)
    (cut,) = bounded([whole], 10, split_keys=True)
    most = total_rows(whole) / MOST_CALLS
    assert max(map(total_rows, ([call] for call in kept))) > 5 * most
    assert max(map(total_rows, ([call] for call in cut))) <= 1.1 * most
    assert pairs(cut) == pairs(whole)
