# SPDX-License-Identifier: BSD-3-Clause
"""The validator accepts right plans and nothing else."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.layouts import LLAMA, cases
from tests.lib.plans import random_tasks
from tests.lib.reference import check_exchanges, check_json, covers_exactly
from tests.lib.refusals import refusal
from tests.lib.tables import check_plan, check_stats, validate_exchanges
from tests.lib.validate import validate_plan
from torchtitan_cad.planning import (
    Plan,
    PlannerConfig,
    TokenLayout,
    make_plan,
)
from torchtitan_cad.planning.model.tasks import (
    TASK_FIELDS,
    canonical,
    make_tasks,
)

SMALL = PlannerConfig(min_shard=4, tile=4)


@settings(max_examples=settings.default.max_examples // 2)
@given(case=cases, seed=st.integers(0, 2**32 - 1))
def test_random_plans_with_rectangles(case, seed):
    """Both kinds of task, any server: tables and bytes are right for every valid plan."""
    layout = case.small(5, 30).layout()
    tasks = random_tasks(np.random.default_rng(seed), layout)
    plan = Plan.from_tasks(layout, LLAMA, SMALL, tasks)
    assert covers_exactly(layout, tasks)
    check_plan(plan)
    check_exchanges(plan)
    check_json(plan)


@given(case=cases, seed=st.integers(0, 2**32 - 1), data=st.data())
def test_verdict_is_that_of_brute_force(case, seed, data):
    """Change one field of one task, or drop or double one: the validator and counting every pair agree."""
    layout = case.small(5, 30).layout()
    tasks = random_tasks(np.random.default_rng(seed), layout)
    if len(tasks) == 0:
        return
    i = data.draw(st.integers(0, len(tasks) - 1))
    change = data.draw(st.sampled_from(["drop", "double", *TASK_FIELDS]))
    if change == "drop":
        tasks = np.delete(tasks, i)
    elif change == "double":
        tasks = np.append(tasks, tasks[i : i + 1])
    else:
        tasks[change][i] += data.draw(st.sampled_from([-7, -2, -1, 1, 2, 7]))
    plan = Plan(layout, LLAMA, SMALL, canonical(tasks))
    if covers_exactly(layout, tasks):
        assert change in ("server", "doc")
        validate_plan(plan)
    else:
        with pytest.raises(AssertionError):
            validate_plan(plan)


LAYOUT = TokenLayout.from_segments([[(0, 0, 10)], [(0, 10, 6), (1, 0, 4)]])
RIGHT = [
    (0, 0, 8, 0, 8, 0),
    (0, 8, 16, 0, 8, 1),
    (0, 8, 12, 8, 12, 0),
    (0, 12, 16, 8, 16, 1),
    (1, 0, 4, 0, 4, 0),
]


def plan_of(records: list[tuple[int, ...]]) -> Plan:
    """Plan with these tasks in canonical order and the statistics of the right ones."""
    right = Plan.from_tasks(LAYOUT, LLAMA, SMALL, make_tasks(*np.array(RIGHT).T))
    records = sorted(records, key=lambda task: (task[0], task[1], task[3]))
    columns = np.array(records, dtype=np.int64).reshape(-1, 6).T
    return dataclasses.replace(right, tasks=make_tasks(*columns))


def check_refused(plan: Plan) -> None:
    with pytest.raises(AssertionError):
        validate_plan(plan)


def test_wrong_tasks():
    """Other values of single fields are drawn above."""
    for index, task in enumerate(RIGHT):
        check_refused(plan_of([*RIGHT[:index], *RIGHT[index + 1 :]]))
        check_refused(plan_of([*RIGHT, task]))
    check_refused(plan_of([]))
    right = plan_of(RIGHT)
    check_refused(dataclasses.replace(right, tasks=right.tasks[::-1]))
    check_refused(dataclasses.replace(right, tasks=np.zeros((3, 6), dtype=np.int64)))
    shape = dataclasses.replace(LLAMA, window=4)
    for name in ("kv_start", "kv_end"):
        windows = make_plan(LAYOUT, shape, SMALL)
        windows.tasks[name][1] -= 1
        check_refused(windows)


def test_wrong_statistics():
    stats = make_plan(LAYOUT, LLAMA, SMALL).stats
    for change in (
        {"total_bytes": stats.total_bytes + 1},
        {"num_tasks": 99},
        {"bytes_in": stats.loads},
    ):
        wrong = make_plan(LAYOUT, LLAMA, SMALL)
        wrong.__dict__["stats"] = dataclasses.replace(stats, **change)
        with pytest.raises(AssertionError):
            check_stats(wrong)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("owner", ["queries", "keys", "causal", "full", "most"])
def test_every_entry_of_the_tables_counts(rank, owner):
    """Raise any single number of any table by one and the tables are rejected."""
    plan = plan_of(RIGHT)
    tasks = plan.tasks
    tables = [plan.exchange(number) for number in range(2)]
    validate_exchanges(LAYOUT, tasks, tables)
    original = getattr(tables[rank], owner)
    for field in dataclasses.fields(original):
        value = getattr(original, field.name)
        for i in range(np.size(value)):
            wrong = np.array(value)
            wrong.reshape(-1)[i] += 1
            entry = wrong if np.ndim(value) else int(wrong)
            replaced = dataclasses.replace(original, **{field.name: entry})
            broken = list(tables)
            broken[rank] = dataclasses.replace(tables[rank], **{owner: replaced})
            with pytest.raises(AssertionError):
                validate_exchanges(LAYOUT, tasks, broken)


def test_table_of_a_rank_is_missing():
    plan = plan_of(RIGHT)
    with pytest.raises(AssertionError):
        validate_exchanges(LAYOUT, plan.tasks, [plan.exchange(0)])


def test_no_such_rank():
    with refusal():
        make_plan(LAYOUT, LLAMA).exchange(2)
