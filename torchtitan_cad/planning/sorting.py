"""Sorting in compiled code."""

from __future__ import annotations

import numpy as np

from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.jit import jit_inner


@jit_inner
def order_of(values: IntArray) -> IntArray:
    """Indices [n] that sort the values [n]; the one place where compiled code sorts, which takes long to compile."""
    return np.argsort(values)
