# SPDX-License-Identifier: BSD-3-Clause
"""The validator accepts right plans and nothing else."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.layouts import LLAMA, cases
from tests.lib.plans import random_tasks
from tests.lib.reference import check_json, covers_exactly
from tests.lib.refusals import refusal
from tests.lib.tables import check_plan, validate_exchanges
from tests.lib.validate import validate_plan
from torchtitan_cad.planning import Plan, PlannerConfig, TokenLayout, make_plan
from torchtitan_cad.planning.model.tasks import TASK_FIELDS, canonical

SMALL = PlannerConfig(min_shard=4, tile=4)


@settings(max_examples=settings.default.max_examples // 2)
@given(case=cases, seed=st.integers(0, 2**32 - 1))
def test_random_plans_with_rectangles(case, seed):
    """Both kinds of task, any server: tables and bytes are right for every valid plan."""
    layout = case.small(5, 30).layout()
    tasks = random_tasks(np.random.default_rng(seed), layout)
    plan = Plan.from_tasks(layout, LLAMA, SMALL, tasks)
    check_plan(plan)
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


@pytest.mark.parametrize("owner", ["queries", "keys", "causal", "full", "most"])
def test_every_entry_of_the_tables_counts(owner):
    """Raise any single number of a table by one and the tables are rejected."""
    tasks = random_tasks(np.random.default_rng(7), LAYOUT)
    plan = Plan.from_tasks(LAYOUT, LLAMA, SMALL, tasks)
    tables = [plan.exchange(rank) for rank in range(2)]
    validate_exchanges(LAYOUT, tasks, tables)
    original = getattr(tables[0], owner)
    for field in dataclasses.fields(original):
        value = np.array(getattr(original, field.name))
        for i in range(value.size):
            wrong = value.copy()
            wrong.reshape(-1)[i] += 1
            entry = wrong if wrong.ndim else int(wrong)
            replaced = dataclasses.replace(original, **{field.name: entry})
            broken = dataclasses.replace(tables[0], **{owner: replaced})
            with pytest.raises(AssertionError):
                validate_exchanges(LAYOUT, tasks, [broken, tables[1]])


def test_no_such_rank():
    with refusal():
        make_plan(LAYOUT, LLAMA).exchange(2)
