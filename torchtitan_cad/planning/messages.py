"""Messages between ranks: bytes of their rows, and the trips in which results return. Imports planning only.

A home gets one row back for each of its rows and each server that has used it: where a document spans many ranks, many
times what any server receives. Receive buffers are made for what servers receive. What returns to a home takes as many
trips as its buffer needs, the next rows in the order of arrival in each. All ranks derive the trips from the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from .shape import LSE_BYTES, AttentionShape

ROW_ALIGNMENT = 16
"""Bytes; every part of a row starts aligned for any dtype, and for the widest loads of a GPU."""

EXCHANGES_PER_CALL = 2
"""Exchanges of one core attention that may be in flight, each with a receive buffer: queries and keys."""

HEADROOM = 1.25
"""Size of the first receive buffers over what the first plan needs, unless capacities say what any plan may need."""

MIN_TRIP_BYTES = 2**27
"""A return of up to so many bytes is one trip even if servers receive less, so that ordinary plans return at once: a
trip costs a dozen launches and, under ping-pong, the third of a call can no longer hide. Four buffers of this size,
with headroom, are 0.7 GB."""


@dataclass(frozen=True)
class RowBytes:
    """Bytes of a row of every message that the engine exchanges for a layer (see docs/architecture.md).

    Attributes:
        forward_queries: Q. outputs: O and log-sum-exp.
        backward_queries: dO, log-sum-exp, delta and, unless servers keep it, Q. query_gradients: dQ.
        keys: K and V. key_gradients: dK and dV.
    """

    forward_queries: int
    outputs: int
    backward_queries: int
    query_gradients: int
    keys: int
    key_gradients: int

    @classmethod
    def of(cls, shape: AttentionShape, *, keep: bool) -> RowBytes:
        """With ``keep`` servers keep received Q, K and V for backward."""
        query = _aligned(shape.num_heads * shape.head_dim * shape.dtype_bytes)
        statistic = _aligned(shape.num_heads * max(LSE_BYTES, shape.dtype_bytes))
        key = _aligned(shape.num_kv_heads * shape.head_dim * shape.dtype_bytes)
        backward = (1 if keep else 2) * query + 2 * statistic
        return cls(query, query + statistic, backward, query, 2 * key, 2 * key)

    @property
    def query_results(self) -> int:
        """Of the widest message that returns to the homes of queries."""
        return max(self.outputs, self.query_gradients)

    def received(self, queries: int, keys: int) -> int:
        """Bytes of the largest message of a server that receives so many rows."""
        return max(queries * max(self.forward_queries, self.backward_queries), keys * self.keys)


@dataclass(frozen=True)
class Trips:
    """Of the rows that return to a home, each of ``count`` trips brings the next ``rows``, as far as there are any."""

    count: int
    rows: int


@dataclass(frozen=True)
class MostRows:
    """Most rows of a plan that any rank receives as a server, and that any sends as a home, once per server.

    Results return for as many rows as are sent.
    """

    received_queries: int
    received_keys: int
    sent_queries: int
    sent_keys: int

    def trips(self, row_bytes: RowBytes) -> tuple[Trips, Trips]:
        """In which the results for queries and for keys return."""
        room = max(row_bytes.received(self.received_queries, self.received_keys), MIN_TRIP_BYTES)
        return (
            _trips(self.sent_queries, room // row_bytes.query_results),
            _trips(self.sent_keys, room // row_bytes.key_gradients),
        )

    def exchange_bytes(self, row_bytes: RowBytes, trips: tuple[Trips, Trips]) -> int:
        """Most bytes that any rank receives in one exchange."""
        queries, keys = trips
        received = row_bytes.received(self.received_queries, self.received_keys)
        return max(received, queries.rows * row_bytes.query_results, keys.rows * row_bytes.key_gradients)


def _trips(rows: int, most: int) -> Trips:
    """Equal trips, as few as bring at most ``most`` rows each."""
    count = max(1, -(-rows // max(1, most)))
    return Trips(count, -(-rows // count))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT
