# SPDX-License-Identifier: BSD-3-Clause
"""Predicted time of a training step: CAD against packing, on the same batches. No torch.

``simulate(Inputs(model, cluster, documents, configuration))`` returns a ``Report``; the configuration is a
``[cad]`` table with the division of a step. ``Costs`` has the seconds of every part of a layer. docs/tools.md says what
is modelled.
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
    Inputs,
    Model,
    Rates,
    is_option,
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
    "Inputs",
    "Model",
    "Rates",
    "Report",
    "Search",
    "Trial",
    "advise",
    "draw_batches",
    "is_option",
    "named_lengths",
    "simulate",
]
