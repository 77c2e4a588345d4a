"""Messages between ranks: bytes of their rows, and the trips in which rows travel.

Every exchange brings rows into receive buffers of one size, ``BUFFERS_PER_CALL`` of each core attention under way. Rows
that do not fit travel in several trips, the next rows in the order of arrival in each, which use the buffers by turns.
All ranks derive the trips from the same plan. A home gets one row back for each of its rows and each server that has
used it: where a document spans many ranks, many times what any server receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torchtitan_cad.planning.model.shape import RowBytes
from torchtitan_cad.planning.text import brief, is_number

BUFFER_ALIGNMENT = 512
"""bytes: receive buffers begin and end at multiples."""

BUFFERS_PER_CALL = 2
"""Receive buffers of one core attention: one brings queries while the other brings keys."""

MAX_BUFFER_BYTES = 2**40
"""bytes: largest receive buffer that can be asked for."""

RECEIVE_BUFFER_GB = 1.0
"""GB: receive buffers of a rank for each nano-batch, by default. Of Llama 3 8B at 32K tokens a rank, what servers
receive by placed homes then nearly always takes one trip (bench/memory.py)."""


@dataclass(frozen=True)
class Trips:
    """Trips in which rows of every kind travel: of each, the most rows that it brings any rank.

    The trips of queries come first, then those of keys; trip i of both together uses buffer i mod ``BUFFERS_PER_CALL``.
    Queries and keys that take one trip each travel together.
    """

    queries_out: tuple[int, ...]
    keys_out: tuple[int, ...]
    queries_home: tuple[int, ...]
    keys_home: tuple[int, ...]


@dataclass(frozen=True)
class MostRows:
    """Most rows of a plan that any rank receives as a server, and that any sends as a home, once per server.

    Results return for as many rows as are sent.
    """

    received_queries: int
    received_keys: int
    sent_queries: int
    sent_keys: int

    def trips(self, row_bytes: RowBytes, buffer_bytes: int) -> Trips:
        """Divide rows of all kinds into trips for receive buffers of ``buffer_bytes``."""
        return Trips(
            _divide(self.received_queries, buffer_bytes // row_bytes.queries_out),
            _divide(self.received_keys, buffer_bytes // row_bytes.keys),
            _divide(self.sent_queries, buffer_bytes // row_bytes.queries_home),
            _divide(self.sent_keys, buffer_bytes // row_bytes.key_gradients),
        )

    def in_one_trip(self) -> Trips:
        """Return one trip of each kind, whatever the size of buffers."""
        rows = (self.received_queries, self.received_keys, self.sent_queries, self.sent_keys)
        return Trips(*((each,) for each in rows))


def _divide(rows: int, most: int) -> tuple[int, ...]:
    """Divide rows into as few trips of at most ``most`` rows (at least one) as can be, each as full as the others."""
    count = max(1, -(-rows // max(1, most)))
    return tuple(end - begin for begin, end in pairwise(rows * number // count for number in range(count + 1)))


def buffer_bytes(gigabytes: float | None = None, nano_batches: int = 1) -> int:
    """Return the bytes of one of a rank's receive buffers, ``BUFFERS_PER_CALL`` for every nano-batch.

    Args:
        gigabytes: all of them together, the key ``receive_buffer_gb``; None: ``RECEIVE_BUFFER_GB`` a nano-batch.

    Raises:
        ValueError: no positive number.
    """
    if gigabytes is None:
        gigabytes = RECEIVE_BUFFER_GB * max(1, nano_batches)
    if not is_number(gigabytes) or gigabytes <= 0:
        raise ValueError(f"receive_buffer_gb = {brief(gigabytes)}: set a positive number, such as {RECEIVE_BUFFER_GB}")
    num_bytes = int(min(gigabytes * 1e9 / (BUFFERS_PER_CALL * max(1, nano_batches)), MAX_BUFFER_BYTES))
    return max(num_bytes // BUFFER_ALIGNMENT, 1) * BUFFER_ALIGNMENT
