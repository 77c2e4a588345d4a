"""Predicted time of a training step: CAD against packing, on the same batches. Pure numpy; imports planning only.

``simulate(model, cluster, documents, settings, rates)`` returns a ``Report``. ``Costs`` has the seconds of every part
of a layer, for others that weigh bytes against time. docs/simulation.md says what is modelled and what is not.
"""

from torchtitan_cad.simulation.advice import Advice, Choice, Trial, advise
from torchtitan_cad.simulation.batches import Batch, Split, draw_batches
from torchtitan_cad.simulation.costs import Costs
from torchtitan_cad.simulation.inputs import MODELS, SOURCES, Cluster, Documents, Model, Rates, Settings
from torchtitan_cad.simulation.lengths import DEFAULT, named_lengths
from torchtitan_cad.simulation.report import SYSTEMS, Report, SystemReport, losses, speedups, table
from torchtitan_cad.simulation.simulate import simulate
from torchtitan_cad.simulation.variation import VARIED, vary

__all__ = [
    "DEFAULT",
    "MODELS",
    "SOURCES",
    "SYSTEMS",
    "VARIED",
    "Advice",
    "Batch",
    "Choice",
    "Cluster",
    "Costs",
    "Documents",
    "Model",
    "Rates",
    "Report",
    "Settings",
    "Split",
    "SystemReport",
    "Trial",
    "advise",
    "draw_batches",
    "losses",
    "named_lengths",
    "simulate",
    "speedups",
    "table",
    "vary",
]
