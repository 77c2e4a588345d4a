# SPDX-License-Identifier: BSD-3-Clause
"""Small inputs for tests of the simulation. Functions take changes of the cluster, the rates and the configuration."""

from dataclasses import fields, replace
from typing import Any

import numpy as np

from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.tools.simulation import (
    OPEN,
    Batch,
    Cluster,
    Configuration,
    Costs,
    Documents,
    Model,
    Rates,
    Report,
    draw_batches,
    simulate,
)
from torchtitan_cad.tools.simulation.disaggregated import Disaggregated
from torchtitan_cad.tools.simulation.step import Step

MODEL = Model(
    layers=4, hidden=1024, heads=8, kv_heads=2, head_dim=128, ffn=4096, vocabulary=1024
)
SHAPE = MODEL.shape(1)
BESIDE = (
    AttentionKind("chunked", 1, SHAPE, block=1024),
    AttentionKind("window", 1, replace(SHAPE, window=128)),
)
KINDS = replace(MODEL, attention=(AttentionKind("full", 2, SHAPE), *BESIDE))
"""The model with layers of three kinds of attention."""
FAST = 1e30
"""Bytes per second of a network that takes no time."""


def cluster(**changes: Any) -> Cluster:
    return Cluster(**{"ranks": 8, "ranks_per_node": 2, "fsdp": False, **changes})


def documents(lengths: Any = (300, 700, 1500, 4000, 9000), **changes: Any) -> Documents:
    return Documents(
        np.array(lengths),
        **{"row_tokens": 16384, "step_tokens": 8 * 16384, "batches": 1, **changes},
    )


def inputs(
    changes: dict[str, Any],
) -> tuple[Model, Cluster, Configuration, Rates, dict[str, Any]]:
    """Model, cluster, configuration and rates with the changes, and the changes of documents, which are left."""
    made = []
    for kind, make in (
        (Cluster, cluster),
        (Configuration, Configuration),
        (Rates, Rates),
    ):
        names = {field.name for field in fields(kind)}
        made.append(
            make(**{key: value for key, value in changes.items() if key in names})
        )
        changes = {key: value for key, value in changes.items() if key not in names}
    return changes.pop("model", MODEL), *made, changes


def step(batch: Batch | None = None, **changes: Any) -> Step:
    model, machines, configuration, rates, rest = inputs(changes)
    costs = Costs(model, machines, rates, configuration.planner.cost_tile)
    return Step(costs, batch or draw_batches(documents(**rest))[0], configuration)


def cad(
    batch: Batch | None = None, planner: str = "local_search", **changes: Any
) -> Disaggregated:
    return Disaggregated(step(batch, **changes), planner)


def run(*, open: set[str] | None = None, **changes: Any) -> Report:
    """A report; by default systems choose ``cp``, microbatches and schedule, as far as they are not given."""
    choices = frozenset(
        {"cp", "microbatches", "schedule"} - changes.keys() if open is None else open
    )
    assert choices <= OPEN
    model, machines, configuration, rates, rest = inputs({"nano_batches": 2, **changes})
    return simulate(
        model, machines, documents(**rest), configuration, rates, open=choices
    )
