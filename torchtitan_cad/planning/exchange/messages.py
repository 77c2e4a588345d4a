# SPDX-License-Identifier: BSD-3-Clause
"""Messages between ranks: the size of receive buffers, and the chunks in which rows travel.

Every exchange brings rows into receive buffers of one size; a core attention in flight has ``BUFFERS_PER_CALL`` of
them, which lie side by side. Queries and keys that fit into all of them travel together. Otherwise each kind travels in
chunks that fit into one buffer, in the order of arrival, and the chunks alternate between the buffers. All ranks derive
them from the same plan. A home gets one row back for each of its rows and each server that has used the row. If a
document spans many ranks, these are many times the rows that any server receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torchtitan_cad.planning.model.shape import AttentionShape, RowBytes
from torchtitan_cad.planning.text import brief, is_number

BUFFER_ALIGNMENT = 512
"""bytes: receive buffers begin and end at multiples."""

BUFFERS_PER_CALL = 2
"""receive buffers of one core attention."""

MAX_BUFFER_BYTES = 2**40
"""bytes: maximum of a receive buffer."""

RECEIVE_BUFFER_GB = 0.65
"""GB: default for all receive buffers of a rank, per nano-batch. With Llama 3 8B, 32K tokens per rank and placement,
rows to serve then nearly always take one chunk."""


@dataclass(frozen=True)
class Chunks:
    """Chunks of each kind of rows: per chunk, the most rows that it brings to any rank.

    Queries and keys that take one chunk each travel together. Otherwise the chunks of queries come first, and chunk i
    of both uses buffer i mod ``BUFFERS_PER_CALL``.
    """

    queries_out: tuple[int, ...]
    keys_out: tuple[int, ...]
    queries_home: tuple[int, ...]
    keys_home: tuple[int, ...]


@dataclass(frozen=True)
class MostRows:
    """Most rows of a plan that any rank receives as a server, and that any rank sends as a home, once per server.

    As many results return to a home as it sends rows.
    """

    received_queries: int
    received_keys: int
    sent_queries: int
    sent_keys: int

    def chunks(self, row_bytes: RowBytes, buffer_bytes: int) -> Chunks:
        """Divide rows of all kinds into chunks for receive buffers of ``buffer_bytes``."""
        out = _divide(
            (self.received_queries, self.received_keys),
            (row_bytes.queries_out, row_bytes.keys),
            buffer_bytes,
        )
        home = _divide(
            (self.sent_queries, self.sent_keys),
            (row_bytes.queries_home, row_bytes.key_gradients),
            buffer_bytes,
        )
        return Chunks(*out, *home)

    def kept_bytes(self, row_bytes: RowBytes) -> int:
        """Return the bytes of Q, K and V that a server receives, and may keep for backward, at most."""
        return (
            self.received_queries * row_bytes.forward_queries
            + self.received_keys * row_bytes.keys
        )

    def are_kept(self, shape: AttentionShape, bytes_per_call: float) -> bool:
        """Tell whether servers keep the Q, K and V that they receive, if each may keep ``bytes_per_call``."""
        return 0 < self.kept_bytes(RowBytes.of(shape)) <= bytes_per_call

    def in_one_chunk(self) -> Chunks:
        """Return one chunk of each kind, for receive buffers of any size."""
        return Chunks(
            queries_out=(self.received_queries,),
            keys_out=(self.received_keys,),
            queries_home=(self.sent_queries,),
            keys_home=(self.sent_keys,),
        )


def aligned(num_bytes: int) -> int:
    """Return the first byte, from ``num_bytes`` on, at which rows may begin."""
    return -(-num_bytes // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT


def _divide(
    rows: tuple[int, ...], row_bytes: tuple[int, ...], buffer_bytes: int
) -> list[tuple[int, ...]]:
    """Divide the rows of every kind into chunks: one if all fit together, else the fewest of at least one row each."""
    kinds = list(zip(rows, row_bytes, strict=True))
    together = sum(aligned(num * size) for num, size in kinds)
    if together <= BUFFERS_PER_CALL * buffer_bytes:
        return [(num,) for num in rows]
    return [_even_chunks(num, most=buffer_bytes // size) for num, size in kinds]


def _even_chunks(num: int, most: int) -> tuple[int, ...]:
    """Divide rows into the fewest chunks of at most ``most`` rows, or of one row each, and about equal size."""
    count = max(1, -(-num // max(1, most)))
    ends = [num * number // count for number in range(count + 1)]
    return tuple(end - begin for begin, end in pairwise(ends))


def buffer_bytes(gigabytes: float | None = None, nano_batches: int = 1) -> int:
    """Return the bytes of one receive buffer of a rank, which has ``BUFFERS_PER_CALL`` of them per nano-batch.

    Args:
        gigabytes: all receive buffers of a rank, the key ``receive_buffer_gb``; None: ``RECEIVE_BUFFER_GB`` per
            nano-batch.

    Raises:
        ValueError: ``gigabytes`` is not a positive number.
    """
    if gigabytes is None:
        gigabytes = RECEIVE_BUFFER_GB * max(1, nano_batches)
    if not is_number(gigabytes) or gigabytes <= 0:
        raise ValueError(
            f"receive_buffer_gb = {brief(gigabytes)}: set a positive number, such as {RECEIVE_BUFFER_GB}"
        )
    num_bytes = int(
        min(
            gigabytes * 1e9 / (BUFFERS_PER_CALL * max(1, nano_batches)),
            MAX_BUFFER_BYTES,
        )
    )
    return max(num_bytes // BUFFER_ALIGNMENT, 1) * BUFFER_ALIGNMENT
