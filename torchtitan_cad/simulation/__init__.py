"""Predicted time of a training step: CAD against packing, on the same batches. Pure numpy; imports planning only.

``simulate(model, cluster, documents, settings, rates)`` returns a ``Report``. ``Costs`` has the seconds of every part
of a layer, for others that weigh bytes against time. docs/simulation.md says what is modelled and what is not.
"""

from torchtitan_cad.simulation.advice import Advice, advise
from torchtitan_cad.simulation.batches import Batch, Split, draw_batches
from torchtitan_cad.simulation.costs import Costs
from torchtitan_cad.simulation.inputs import MODELS, SOURCES, Cluster, Documents, Model, Rates, Settings
from torchtitan_cad.simulation.lengths import DEFAULT, named_lengths
from torchtitan_cad.simulation.report import SYSTEMS, Report, losses, speedups, table
from torchtitan_cad.simulation.search import Configuration, Trial
from torchtitan_cad.simulation.simulate import simulate

__all__ = [
    "DEFAULT",
    "MODELS",
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
    "Settings",
    "Split",
    "Trial",
    "advise",
    "draw_batches",
    "losses",
    "named_lengths",
    "simulate",
    "speedups",
    "table",
]
