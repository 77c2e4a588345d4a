# SPDX-License-Identifier: BSD-3-Clause
"""Heaps for compiled code.

A heap holds indices into an array of keys. The least key comes first, and among equal keys the lowest index.
"""

from __future__ import annotations

from torchtitan_cad.planning.intervals import FloatArray, IntArray
from torchtitan_cad.planning.jit import jit_inner


@jit_inner
def comes_before(keys: FloatArray, one: int, other: int) -> bool:
    """Tell whether index ``one`` comes before the ``other``."""
    return keys[one] < keys[other] or (keys[one] == keys[other] and one < other)


@jit_inner
def push(heap: IntArray, size: int, keys: FloatArray, index: int) -> int:
    """Add an index to a heap of ``size``; returns the new size."""
    at = size
    while at > 0 and comes_before(keys, index, heap[(at - 1) // 2]):
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = index
    return size + 1


@jit_inner
def pop(heap: IntArray, size: int, keys: FloatArray) -> int:
    """Remove the first index from a heap of ``size`` and return it."""
    top = heap[0]
    last = heap[size - 1]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size - 1:
            break
        if child + 1 < size - 1 and comes_before(keys, heap[child + 1], heap[child]):
            child += 1
        if not comes_before(keys, heap[child], last):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = last
    return top
