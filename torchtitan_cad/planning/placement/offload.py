# SPDX-License-Identifier: BSD-3-Clause
"""An estimate of the block that a chunk offloads where its rank has too much work."""

from __future__ import annotations

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray
from torchtitan_cad.planning.jit import jit_inner
from torchtitan_cad.planning.placement.state import (
    KEY_BYTES,
    PER_PAIR,
    QUERY_BYTES,
    SPARE,
    TYPICAL,
)


@jit_inner
def _beside(
    excess: float, rows: float, keys: float, prices: FloatArray
) -> tuple[float, float]:
    """Return the (helpers side by side, strips) in which a block of ``rows`` x ``keys`` costs the fewest bytes.

    There is less than one strip if rows of other chunks join the block, so that its keys are read once for all.
    """
    helpers = max(1.0, excess / prices[TYPICAL])
    best = np.sqrt(helpers * keys * prices[KEY_BYTES] / (rows * prices[QUERY_BYTES]))
    return max(1.0, best + prices[SPARE]), helpers / max(1.0, best)


@jit_inner
def offload(
    start: float, rows: float, excess: float, prices: FloatArray
) -> tuple[float, ...]:
    """Return (work, bytes of queries out, bytes into helpers, keys not imported, keys read, strips) of the best block.

    The block has at most the work ``excess``. It belongs to a chunk of ``rows`` rows from row ``start`` of a document.
    """
    pairs = excess / prices[PER_PAIR]
    best = (0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
    least = np.inf
    for all_rows in (True, False):
        if all_rows:
            width = min(start, pairs / rows)
            height = rows
            spared = width
        else:
            height = min(
                rows, max(1.0, np.sqrt(pairs * prices[KEY_BYTES] / prices[QUERY_BYTES]))
            )
            reach = start + rows
            # more rows, up to the middle of the triangle
            if height * (reach - height) < pairs:
                root = reach * reach / 4 - pairs
                height = min(rows, reach / 2 - np.sqrt(root) if root > 0 else reach / 2)
            width = min(pairs / height, reach - height)
            spared = 0.0
        if width <= 0:
            continue
        offloaded = height * width * prices[PER_PAIR]
        beside, strips = _beside(offloaded, height, width, prices)
        queries = height * beside * prices[QUERY_BYTES]
        keys = width * strips * prices[KEY_BYTES]
        value = (queries + keys - spared * prices[KEY_BYTES]) / offloaded
        if offloaded < 0.98 * excess:
            value *= 2
        if value < least:
            least = value
            best = (offloaded, queries, queries + keys, spared, width, strips)
    return best
