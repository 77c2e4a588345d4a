# SPDX-License-Identifier: BSD-3-Clause
"""An estimate of the bytes of the plan that the homes of chunks lead to.

Every rank keeps its own work up to its limit, keys nearest the diagonal first. The work above the limit goes to ranks
with capacity: either all rows of a chunk against early keys, which the rank then need not import, or the chunk's last
rows against as many keys as make the best rectangle. A rank with capacity takes blocks of the best shape, which may
join rows of several chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray, IntArray
from torchtitan_cad.planning.jit import jit, jit_inner
from torchtitan_cad.planning.placement.chunks import Chunks


class Prices(NamedTuple):
    """What the estimate is made of.

    Attributes:
        limit: work that a rank keeps.
        per_pair: work of a (query, key) pair.
        query_bytes, key_bytes: bytes of a query and of a key.
        typical: work that fits on a typical rank with capacity.
        help: [1] bytes into a rank for work that others offload / square root of the work that fits on it; updated.
        worst_weight: weight of the worst rank in the objective.
        spare: helpers added to those side by side, as blocks do not fill capacities exactly.
    """

    limit: float
    per_pair: float
    query_bytes: float
    key_bytes: float
    typical: float
    help: FloatArray
    worst_weight: float
    spare: float


@jit_inner
def _beside(
    excess: float, rows: float, keys: float, prices: Prices
) -> tuple[float, float]:
    """Return the (helpers side by side, strips) in which a block of ``rows`` x ``keys`` costs the fewest bytes.

    There is less than one strip if rows of other chunks join the block, so that its keys are read once for all.
    """
    helpers = max(1.0, excess / prices.typical)
    best = np.sqrt(helpers * keys * prices.key_bytes / (rows * prices.query_bytes))
    return max(1.0, best + prices.spare), helpers / max(1.0, best)


@jit_inner
def offload(
    start: float, rows: float, excess: float, prices: Prices
) -> tuple[float, float, float, float]:
    """Return (work, bytes of queries out, bytes into helpers, keys not imported) of the best block.

    The block has at most the work ``excess``. It belongs to a chunk of ``rows`` rows from row ``start`` of a document.
    """
    pairs = excess / prices.per_pair
    best = (0.0, 0.0, 0.0, 0.0)
    least = np.inf
    for all_rows in (True, False):
        if all_rows:
            width = min(start, pairs / rows)
            height = rows
            spared = width
        else:
            square = np.sqrt(pairs * prices.key_bytes / prices.query_bytes)
            height = min(rows, max(1.0, square))
            reach = start + rows
            # more rows, up to the middle of the triangle
            if height * (reach - height) < pairs:
                root = reach * reach / 4 - pairs
                height = min(rows, reach / 2 - np.sqrt(root) if root > 0 else reach / 2)
            width = min(pairs / height, reach - height)
            spared = 0.0
        if width <= 0:
            continue
        offloaded = height * width * prices.per_pair
        beside, strips = _beside(offloaded, height, width, prices)
        queries = height * beside * prices.query_bytes
        into = queries + width * strips * prices.key_bytes
        value = (into - spared * prices.key_bytes) / offloaded
        if offloaded < 0.98 * excess:
            value *= 2
        if value < least:
            least = value
            best = (offloaded, queries, into, spared)
    return best


@jit_inner
def _keys(chunks: Chunks, rank: int) -> tuple[float, float]:
    """Return the keys that chunks of a rank read from other ranks, and that other ranks read from it."""
    count = chunks.num_held[rank]
    into = 0
    out = 0
    for one in range(count):
        i = chunks.members[rank, one]
        reads = chunks.start[i]
        readers = chunks.behind[i]
        for other in range(count):
            j = chunks.members[rank, other]
            if chunks.doc[j] == chunks.doc[i]:
                if j > i:
                    readers -= 1
                    reads = 0
                elif j < i and reads > 0:
                    reads -= chunks.length[j]
        into += max(0, reads)
        out += readers * chunks.length[i]
    return float(into), float(out)


@jit_inner
def estimate_rank(chunks: Chunks, prices: Prices, rank: int) -> None:
    """Estimate the bytes of a rank anew."""
    keys_in, keys_out = _keys(chunks, rank)
    queries = 0.0
    helped = 0.0
    offloading = 0
    excess = chunks.load[rank] - prices.limit
    while excess > 1e-9 * prices.limit:
        least = np.inf
        chosen = -1
        best = (0.0, 0.0, 0.0, 0.0)
        for at in range(chunks.num_held[rank]):
            if offloading >> at & 1:
                continue
            i = chunks.members[rank, at]
            block = offload(
                float(chunks.start[i]), float(chunks.length[i]), excess, prices
            )
            if block[0] <= 0:
                continue
            num_bytes = block[2] - block[3] * prices.key_bytes
            value = num_bytes / block[0] * (2 - block[0] / excess)
            if value < least:
                least = value
                chosen = at
                best = block
        if chosen < 0:
            break
        offloading |= 1 << chosen
        excess -= best[0]
        queries += best[1]
        helped += best[2]
        keys_in = max(0.0, keys_in - best[3])
    # A rank with capacity gets as many bytes of queries as of keys.
    helps = prices.help[0] * np.sqrt(max(0.0, prices.limit - chunks.load[rank]))
    bytes_in = keys_in * prices.key_bytes
    bytes_out = keys_out * prices.key_bytes
    held = min(helps / 2, 1.0 * bytes_out)
    chunks.helped[rank] = helped
    chunks.num_bytes[rank] = bytes_in + helped - held
    chunks.power[rank] = _power(bytes_in + helps - held) + _power(
        bytes_out + queries - held
    )


@jit_inner
def estimate_ranks(chunks: Chunks, prices: Prices, homes: IntArray) -> None:
    """Estimate the bytes of the ranks in ``homes`` [2, 2, 3] of (rank, start, length) anew."""
    for row in range(2):
        estimate_rank(chunks, prices, homes[row, 0, 0])
        estimate_rank(chunks, prices, homes[row, 1, 0])


@jit_inner
def _power(value: float) -> float:
    square = value * value
    return square * square * (square * square)


@jit_inner
def objective(chunks: Chunks, prices: Prices) -> float:
    """Return total bytes + worst_weight x number of ranks x worst rank's bytes.

    A power mean of order 8 over the bytes in and out of all ranks stands for the worst rank's bytes.
    """
    num_ranks = len(chunks.num_held)
    total = 0.0
    power = 0.0
    for rank in range(num_ranks):
        total += chunks.num_bytes[rank]
        power += chunks.power[rank]
    worst = np.sqrt(np.sqrt(np.sqrt(power / (2 * num_ranks))))
    return total + prices.worst_weight * num_ranks * worst


@jit
def estimate(chunks: Chunks, prices: Prices) -> float:
    """Estimate the bytes of all ranks anew and return the objective; updates the price ``help`` before."""
    helped = 0.0
    roots = 0.0
    for rank in range(len(chunks.num_held)):
        estimate_rank(chunks, prices, rank)
        helped += chunks.helped[rank]
        roots += np.sqrt(max(0.0, prices.limit - chunks.load[rank]))
    prices.help[0] = helped / max(1e-9, roots)
    for rank in range(len(chunks.num_held)):
        estimate_rank(chunks, prices, rank)
    return objective(chunks, prices)
