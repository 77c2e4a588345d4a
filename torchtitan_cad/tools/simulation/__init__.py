# SPDX-License-Identifier: BSD-3-Clause
"""Predicted time of a training step: CAD against packing, on the same batches. Pure numpy; imports planning only.

``simulate(model, cluster, documents, configuration, rates)`` returns a ``Report``. ``Costs`` has the seconds of every
part of a layer, for others that weigh bytes against time. docs/tools.md says what is modelled and what is not.
"""

from torchtitan_cad.tools.simulation.advice import Advice, advise
from torchtitan_cad.tools.simulation.batches import (
    DEFAULT,
    Batch,
    draw_batches,
    named_lengths,
)
from torchtitan_cad.tools.simulation.costs import Costs
from torchtitan_cad.tools.simulation.inputs import (
    MANY_RANKS,
    MODELS,
    OPEN,
    SOURCES,
    Cluster,
    Configuration,
    Documents,
    Model,
    Rates,
)
from torchtitan_cad.tools.simulation.search import Search, Trial
from torchtitan_cad.tools.simulation.systems import SYSTEMS, Report, simulate

__all__ = [
    "DEFAULT",
    "MANY_RANKS",
    "MODELS",
    "OPEN",
    "SOURCES",
    "SYSTEMS",
    "Advice",
    "Batch",
    "Cluster",
    "Configuration",
    "Costs",
    "Documents",
    "Model",
    "Rates",
    "Report",
    "Search",
    "Trial",
    "advise",
    "draw_batches",
    "named_lengths",
    "simulate",
]
