# SPDX-License-Identifier: BSD-3-Clause
"""Predicted time of a training step: CAD against packing, on the same batches. No torch.

``systems.simulate(Inputs(model, cluster, documents, configuration))`` returns a ``Report``; the configuration is a
``[cad]`` table with the division of a step. ``Costs`` has the seconds of every part of a layer. docs/results.md says
what is modelled.
"""
