# SPDX-License-Identifier: BSD-3-Clause
"""Layouts and plans for tests: not only those a planner would make."""

import json
from itertools import pairwise

import numpy as np

from tests.lib.layouts import scattered
from torchtitan_cad.planning import (
    TASK_DTYPE,
    AttentionShape,
    Plan,
    PlannerConfig,
    TokenLayout,
)
from torchtitan_cad.planning.model.tasks import TASK_FIELDS, TaskArray, canonical
from torchtitan_cad.planning.serialize import layout_from_dict, shape_from_dict

TILE = 128


def written_plan(text: str) -> Plan:
    """The plan of what ``Plan.to_json`` returned, compared with its fingerprint and statistics."""
    data = json.loads(text)
    records = [tuple(task[name] for name in TASK_FIELDS) for task in data["tasks"]]
    plan = Plan.from_tasks(
        layout_from_dict(data),
        shape_from_dict(data),
        PlannerConfig(**data["config"]),
        np.array(records, dtype=TASK_DTYPE),
    )
    assert plan.fingerprint() == data["fingerprint"]
    assert {**plan.stats.to_dict(), "plan_seconds": 0} == {
        **data["stats"],
        "plan_seconds": 0,
    }
    return plan


def random_layout(
    rng: np.random.Generator, num_ranks: int, max_length: int = 700
) -> TokenLayout:
    """Documents of odd lengths, of which runs live on different ranks; a rank may be empty."""
    count = rng.integers(1, 2 * num_ranks + 2)
    lengths = rng.integers(1, max_length, size=count).tolist()
    return TokenLayout.from_segments(scattered(rng, lengths, num_ranks))


def random_plan(
    rng: np.random.Generator,
    layout: TokenLayout,
    shape: AttentionShape,
    *,
    aligned: bool,
    split_kv: bool,
) -> Plan:
    """Any legal plan: queries cut anywhere (at tiles if ``aligned``), keys too if ``split_kv``, servers at random."""
    tasks = random_tasks(rng, layout, aligned=aligned, split_kv=split_kv)
    return Plan.from_tasks(layout, shape, PlannerConfig(split_kv=split_kv), tasks)


def random_tasks(
    rng: np.random.Generator,
    layout: TokenLayout,
    *,
    aligned: bool = False,
    split_kv: bool = True,
) -> TaskArray:
    """The tasks of such a plan."""
    tasks = []
    for doc, length in zip(
        layout.docs.tolist(), layout.doc_lengths.tolist(), strict=True
    ):
        for start, end in _random_ranges(rng, 0, length, aligned):
            parts = _random_ranges(rng, 0, start, aligned) if split_kv and start else []
            # The last part of the prefix may stay with the diagonal.
            diagonal_start = start if parts else 0
            if parts and rng.random() < 0.5:
                diagonal_start = parts.pop()[0]
            for keys in (*parts, (diagonal_start, end)):
                tasks.append((doc, start, end, *keys, rng.integers(layout.num_ranks)))
    return canonical(np.array(tasks, dtype=TASK_DTYPE))


def _random_ranges(
    rng: np.random.Generator, start: int, end: int, aligned: bool
) -> list[tuple[int, int]]:
    cuts = rng.integers(start, end, size=int(rng.integers(0, 4)))
    if aligned:
        cuts = cuts // TILE * TILE
    bounds = sorted({start, end, *(c for c in cuts.tolist() if start < c < end)})
    return list(pairwise(bounds))
