"""What a chunk gives away for a rank that has too much work, estimated."""

from __future__ import annotations

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray
from torchtitan_cad.planning.jit import jit_inner
from torchtitan_cad.planning.placement.table import KEY_BYTES, PER_PAIR, QUERY_BYTES, TYPICAL

SPARE = 0.4
"""Helpers side by side beyond those that pieces of the best shape need, as pieces do not fill rooms exactly; fitted to
plans."""


@jit_inner
def _beside(excess: float, rows: float, keys: float, prices: FloatArray) -> tuple[float, float]:
    """(helpers side by side, strips) in which ``rows`` x ``keys`` cost the fewest bytes.

    Less than one strip where rows of other chunks join these in a piece, so that its keys are read once for all.
    """
    helpers = max(1.0, excess / prices[TYPICAL])
    best = np.sqrt(helpers * keys * prices[KEY_BYTES] / (rows * prices[QUERY_BYTES]))
    return max(1.0, best + SPARE), helpers / max(1.0, best)


@jit_inner
def give_away(start: float, rows: float, excess: float, prices: FloatArray) -> tuple[float, ...]:
    """(work, bytes out of queries, bytes into helpers, keys not imported, keys read, strips) of giving work away.

    At most the work ``excess`` is given, as one block of a chunk of so many ``rows`` from the document's row ``start``.
    """
    pairs = excess / prices[PER_PAIR]
    best = (0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
    least = np.inf
    for way in range(2):
        if way == 0:  # all rows
            width = min(start, pairs / rows)
            height, spared = rows, width
        else:
            height = min(rows, max(1.0, np.sqrt(pairs * prices[KEY_BYTES] / prices[QUERY_BYTES])))
            reach = start + rows
            if height * (reach - height) < pairs:  # more rows, up to the middle of the triangle
                root = reach * reach / 4 - pairs
                height = min(rows, reach / 2 - np.sqrt(root) if root > 0 else reach / 2)
            width = min(pairs / height, reach - height)
            spared = 0.0
        if width <= 0:
            continue
        given = height * width * prices[PER_PAIR]
        beside, strips = _beside(given, height, width, prices)
        queries = height * beside * prices[QUERY_BYTES]
        keys = width * strips * prices[KEY_BYTES]
        value = (queries + keys - spared * prices[KEY_BYTES]) / given
        if given < 0.98 * excess:
            value *= 2
        if value < least:
            least = value
            best = (given, queries, queries + keys, spared, width, strips)
    return best
