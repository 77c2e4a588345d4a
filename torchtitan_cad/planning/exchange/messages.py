"""Messages between ranks: bytes of their rows, and the trips in which results return.

A home gets one row back for each of its rows and each server that has used it: where a document spans many ranks, many
times what any server receives. Receive buffers are made for what servers receive, one for queries and one for keys.
What returns to a home takes as many trips as they need, in the two by turns, the next rows in the order of arrival in
each. All ranks derive the trips from the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torchtitan_cad.planning.model.config import MAX_BUFFER_BYTES
from torchtitan_cad.planning.model.shape import LSE_BYTES, AttentionShape
from torchtitan_cad.planning.text import brief, is_number

ROW_ALIGNMENT = 16
"""Bytes; every part of a row starts aligned for any dtype, and for the widest loads of a GPU."""

SLOTS_PER_CALL = 2
"""Receive buffers of one core attention: slot 0 is made for the queries that servers receive, slot 1 for the keys."""

HEADROOM = 1.2
"""Size of receive buffers over what the plan needs that they are made for, unless capacities say what any plan needs.
With less they grow more often, with 1.5 they end larger."""

RECEIVE_BUFFER_GB = 2.0
"""What the receive buffers of a rank take, at most, as far as plans can be made so."""

MIN_TRIP_BYTES = 2**27
"""A return of up to so many bytes is one trip even if servers receive less, so that ordinary plans return at once: a
trip costs a dozen launches and, under ping-pong, the third of a call can no longer hide. Four buffers of this size,
with headroom, are 0.6 GB."""


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
        """Count the bytes of a row of every message; with ``keep`` servers keep received Q, K and V for backward."""
        query = _aligned(shape.num_heads * shape.head_dim * shape.dtype_bytes)
        statistic = _aligned(shape.num_heads * max(LSE_BYTES, shape.dtype_bytes))
        key = _aligned(shape.num_kv_heads * shape.head_dim * shape.dtype_bytes)
        backward = (1 if keep else 2) * query + 2 * statistic
        return cls(query, query + statistic, backward, query, 2 * key, 2 * key)

    @property
    def query_results(self) -> int:
        """Bytes of a row of the widest message that returns to the homes of queries."""
        return max(self.outputs, self.query_gradients)

    def received(self, queries: int, keys: int) -> tuple[int, int]:
        """Return the bytes of the largest messages, of queries and of keys, of a server that receives so many rows."""
        return queries * max(self.forward_queries, self.backward_queries), keys * self.keys

    def slot_bytes(self, queries: int, keys: int) -> tuple[int, int]:
        """Return the bytes of receive buffers, for queries and for keys, of servers that receive so many rows at most.

        What returns to a home takes as many trips as such buffers need.
        """
        for_queries, for_keys = self.received(queries, keys)
        return max(for_queries, MIN_TRIP_BYTES), max(for_keys, MIN_TRIP_BYTES)


@dataclass(frozen=True)
class Trips:
    """Exchanges in which rows return to a home; each brings the next ones, as far as there are any.

    Attributes:
        rows: of each trip, at most. They use the buffers of a core attention one after the other.
        first_slot: which one the first trip uses, see ``SLOTS_PER_CALL``.
    """

    rows: tuple[int, ...]
    first_slot: int

    @property
    def count(self) -> int:
        """Trips that the rows take."""
        return len(self.rows)

    @property
    def slots(self) -> list[int]:
        """Buffer that each trip uses."""
        return [(self.first_slot + number) % SLOTS_PER_CALL for number in range(self.count)]


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
        """Divide the results for queries, and those for keys, which follow in backward, into trips."""
        rooms = row_bytes.slot_bytes(self.received_queries, self.received_keys)
        queries = _trips(self.sent_queries, [room // row_bytes.query_results for room in rooms], 0)
        first_slot = queries.count % SLOTS_PER_CALL
        return queries, _trips(self.sent_keys, [room // row_bytes.key_gradients for room in rooms], first_slot)

    def slot_bytes(self, row_bytes: RowBytes) -> tuple[int, int]:
        """Compute the most bytes that a rank receives in one exchange, in the buffers for queries and for keys."""
        most = list(row_bytes.received(self.received_queries, self.received_keys))
        for trips, num_bytes in zip(
            self.trips(row_bytes), (row_bytes.query_results, row_bytes.key_gradients), strict=True
        ):
            for slot, rows in zip(trips.slots, trips.rows, strict=True):
                most[slot] = max(most[slot], rows * num_bytes)
        return most[0], most[1]


def _trips(rows: int, most: Sequence[int], first_slot: int) -> Trips:
    """As few trips as bring at most ``most`` rows in each slot, each as full as the others."""
    room = [max(1, most[(first_slot + number) % SLOTS_PER_CALL]) for number in range(SLOTS_PER_CALL)]
    turns, rest = divmod(rows, sum(room))
    last = next(number for number, bring in enumerate(accumulate(room, initial=0)) if rest <= bring)
    rooms = (room * (turns + 1))[: max(1, SLOTS_PER_CALL * turns + last)]
    ends = [rows * end // sum(rooms) for end in accumulate(rooms, initial=0)]
    return Trips(tuple(end - begin for begin, end in pairwise(ends)), first_slot)


def buffer_bytes(gigabytes: float, nano_batches: int = 1) -> int:
    """Divide GB by all receive buffers, ``SLOTS_PER_CALL`` of every nano-batch, for ``PlannerConfig.buffer_bytes``.

    Raises:
        ValueError: no positive number.
    """
    if not is_number(gigabytes) or gigabytes <= 0:
        raise ValueError(f"receive_buffer_gb = {brief(gigabytes)}: set a positive number, such as {RECEIVE_BUFFER_GB}")
    num_bytes = gigabytes * 1e9 / (SLOTS_PER_CALL * max(1, nano_batches))
    return int(min(max(1, num_bytes), MAX_BUFFER_BYTES))


def with_headroom(num_bytes: int, buffer_bytes: int | None, at_least: int = 0) -> int:
    """Return the bytes of a receive buffer for messages of ``num_bytes``, with headroom, and ``at_least`` so many.

    But for what it must hold it is no larger than ``buffer_bytes``, which plans keep where they can.
    """
    wanted = max(int(num_bytes * HEADROOM), at_least)
    return wanted if buffer_bytes is None else max(num_bytes, min(wanted, buffer_bytes))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT
