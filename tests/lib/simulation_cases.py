# SPDX-License-Identifier: BSD-3-Clause
"""Small inputs for tests of the simulation. Functions take changes of the cluster, the rates and the configuration."""

from dataclasses import fields, replace

import numpy as np

from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.tools.simulation.batches import Batch, draw_batches
from torchtitan_cad.tools.simulation.costs import Costs
from torchtitan_cad.tools.simulation.disaggregated import Disaggregated
from torchtitan_cad.tools.simulation.inputs import (
    OPEN,
    Cluster,
    Configuration,
    Documents,
    Inputs,
    Model,
    Rates,
)
from torchtitan_cad.tools.simulation.step import Step
from torchtitan_cad.tools.simulation.systems import Report, simulate

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


def cluster(**changes) -> Cluster:
    return Cluster(**{"ranks": 8, "ranks_per_node": 2, "fsdp": False, **changes})


def documents(lengths=(300, 700, 1500, 4000, 9000), **changes) -> Documents:
    return Documents(
        np.array(lengths),
        **{"row_tokens": 16384, "step_tokens": 8 * 16384, "batches": 1, **changes},
    )


def configuration(**changes) -> Configuration:
    """The loader's homes, and a tolerance that does not depend on rates."""
    return Configuration(**{"tolerance": 0.02, "placement": "loader", **changes})


def inputs(**changes) -> Inputs:
    """Inputs with the changes, which are told apart by their names; those of no other record are of documents."""

    def of(kind):
        names = {field.name for field in fields(kind)} & changes.keys()
        return {name: changes.pop(name) for name in names}

    model = changes.pop("model", MODEL)
    machines = cluster(**of(Cluster))
    asked = configuration(**of(Configuration))
    rates = Rates(**of(Rates))
    return Inputs(model, machines, documents(**changes), asked, rates)


def step(batch: Batch | None = None, **changes) -> Step:
    made = inputs(**changes)
    tile = made.configuration.planner_config().cost_tile
    costs = Costs(made.model, made.cluster, made.rates, tile)
    return Step(costs, batch or draw_batches(made.documents)[0], made.configuration)


def cad(batch: Batch | None = None, **changes) -> Disaggregated:
    return Disaggregated(step(batch, **changes))


def run(*, open: set[str] | None = None, **changes) -> Report:
    """A report; by default systems choose ``cp``, microbatches and schedule, as far as they are not given."""
    choices = frozenset(
        {"cp", "microbatches", "schedule"} - changes.keys() if open is None else open
    )
    assert choices <= OPEN
    return simulate(replace(inputs(**{"nano_batches": 2, **changes}), open=choices))
