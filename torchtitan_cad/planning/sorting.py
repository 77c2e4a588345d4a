"""Sorting in compiled code."""

from __future__ import annotations

import numpy as np

from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.jit import jit_inner


@jit_inner
def order_of(values: IntArray) -> IntArray:
    """Return the indices [n] that sort the values [n]: sorting takes long to compile, so it is here alone."""
    return np.argsort(values)
