"""Cutting a call into fixed tiles of query rows."""

from collections.abc import Iterator
from typing import NamedTuple

from torchtitan_cad.runtime.kernels.base import VarlenArgs

QUERY_TILE = 128
"""Rows of a tile. Tiles begin at multiples of it in document positions, however a document is cut into tasks."""


class Tile(NamedTuple):
    """Query rows [q_lo, q_hi) and the keys they see, as rows of the packed tensors.

    Every row sees the keys [k_lo, k_mid). The keys [k_mid, k_hi) are seen under a square lower-triangular mask: as many
    keys as the tile has rows in a causal call, none otherwise.
    """

    q_lo: int
    q_hi: int
    k_lo: int
    k_mid: int
    k_hi: int


def iter_tiles(call: VarlenArgs) -> Iterator[Tile]:
    """Return the tiles of all tasks, in order, without the rows that see no key."""
    cu_q, cu_k = call.cu_q_host.tolist(), call.cu_k_host.tolist()
    for task, position in enumerate(call.q_start.tolist()):
        q_lo, q_end, k_lo, k_end = cu_q[task], cu_q[task + 1], cu_k[task], cu_k[task + 1]
        while q_lo < q_end:
            q_hi = min(q_lo + QUERY_TILE - position % QUERY_TILE, q_end)
            if call.causal:
                k_hi = k_end - (q_end - q_hi)
                first = max(q_lo, q_hi - (k_hi - k_lo))
                if first < q_hi:
                    yield Tile(first, q_hi, k_lo, k_hi - (q_hi - first), k_hi)
            elif k_end > k_lo:
                yield Tile(q_lo, q_hi, k_lo, k_end, k_end)
            position += q_hi - q_lo
            q_lo = q_hi
