"""Small inputs for tests of the simulation."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchtitan_cad.simulation import Cluster, Documents, Model

MODEL = Model(layers=4, hidden=1024, heads=8, kv_heads=2, head_dim=128, ffn=4096, vocabulary=1024)
FAST = 1e30
"""Bytes per second of a network that takes no time."""


def cluster(**changes: Any) -> Cluster:
    return Cluster(**{"ranks": 8, "ranks_per_node": 2, "pp": 1, "fsdp": False, **changes})


def documents(lengths: Any = (300, 700, 1500, 4000, 9000), **changes: Any) -> Documents:
    return Documents(np.array(lengths), **{"row_tokens": 16384, "step_tokens": 8 * 16384, "batches": 1, **changes})
