"""Tables of a rank's rows of one kind, queries or keys: where they travel, and how results become rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from torchtitan_cad.planning.exchange.calls import combine_early
from torchtitan_cad.planning.exchange.messages import BUFFERS_PER_CALL, Trips
from torchtitan_cad.planning.exchange.tables import RowExchange
from torchtitan_cad.planning.intervals import concat_ranges
from torchtitan_cad.runtime.combine import Combination
from torchtitan_cad.runtime.transport.base import Kind, Route, rows_to_device


@dataclass(frozen=True)
class Trip:
    """Results of one kind that return to their homes in one exchange.

    Attributes:
        kind: of the rows that the results belong to.
        combination: results so far, and then those that return if rows move -> local rows. The results so far are those
            of the kernel calls in their order, or what an earlier combination has made of them.
        is_last: no other follows.
    """

    kind: Kind
    route: Route
    combination: Combination
    is_last: bool


@dataclass(frozen=True)
class RowTables:
    """Tables of one kind of rows. The row space has the local rows first, then those of others that this rank serves.

    Attributes:
        num_local: local rows. num_served: rows of others.
        out: trips of local rows to their servers. home: trips of results to their homes; one of each at least.
        served: results of the kernel calls, in their order -> rows of others, to be returned.
        local: results of the calls -> local rows, before others' return; None: with those of the first trip.
    """

    num_local: int
    num_served: int
    out: list[Route]
    served: Combination
    local: Combination | None
    home: list[Trip]

    @classmethod
    def build(
        cls,
        exchange: RowExchange,
        kind: Kind,
        computed: list[np.ndarray],
        trips: Trips,
        device: torch.device,
        *,
        moves: bool,
        is_padded: bool,
    ) -> "RowTables":
        """Build the tables on ``device``.

        Args:
            computed: of every kernel call the rows of the row space that it computes; -1: none.
            moves: whether any rank sends rows.
            is_padded: whether as many rows are received and sent as ``send_rows`` has; -1: none.
        """
        num_local, send_rows = exchange.num_local, exchange.send_rows
        padded_to = len(send_rows) if is_padded else None
        num_served = exchange.num_received if padded_to is None else padded_to
        served = Combination.build([np.where(x < num_local, -1, x - num_local) for x in computed], num_served, device)
        so_far, local = [np.where(rows < num_local, rows, -1) for rows in computed], None
        if moves and combine_early(sum(map(len, computed)), num_local):
            local, so_far = Combination.build(so_far, num_local, device), [np.arange(num_local)]
        trips_out, trips_home = getattr(trips, f"{kind}_out"), getattr(trips, f"{kind}_home")
        before_out, before_home = (trips.queries_out, trips.queries_home) if kind == "keys" else ((), ())
        counts = exchange.send_counts, exchange.recv_counts, exchange.put_offsets
        back = exchange.recv_counts, exchange.send_counts, exchange.return_offsets
        routes = partial(_routes, device=device, padded_to=padded_to)
        home: list[Trip] = []
        # A home's rows return in the order in which it has sent them.
        returned = np.split(send_rows, np.cumsum(trips_home[:-1]))
        for route, rows in zip(routes("results", None, back, trips_home, len(before_home)), returned, strict=True):
            combination = Combination.build([*so_far, rows] if moves else so_far, num_local, device)
            home.append(Trip(kind, route, combination, is_last=len(home) == len(returned) - 1))
            so_far = [np.arange(num_local)]
        out = routes(kind, np.maximum(send_rows, 0), counts, trips_out, len(before_out))
        return cls(num_local, num_served, out, served, local, home)


def _routes(
    kind: Kind,
    rows: np.ndarray | None,
    counts: tuple[np.ndarray, np.ndarray, np.ndarray],
    trips: Sequence[int],
    first_buffer: int,
    *,
    device: torch.device,
    padded_to: int | None,
) -> list[Route]:
    """Divide a route into one for each trip: the next rows in the order of arrival.

    Args:
        rows: what is sent; None for all in order.
        counts: per rank, rows sent and received, and where those sent begin at their receiver.
        trips: of each the most rows that it brings any rank.
        first_buffer: number of the first trip among all; the trips use the buffers by turns.
        padded_to: rows of tensors of the only trip.
    """
    sent, received, offsets = counts
    first_sent, first_received = np.cumsum(sent) - sent, np.cumsum(received) - received
    routes, end, of_trip = [], 0, rows
    for number, most_rows in enumerate(trips):
        begin, end = end, end + most_rows
        first, sent_now = _within(offsets, sent, begin, end)
        _, received_now = _within(first_received, received, begin, end)
        if len(trips) > 1:
            index = concat_ranges(first_sent + first - offsets, sent_now)
            of_trip = index if rows is None else rows[index]
        of_peers = sent_now, received_now, np.where(sent_now, first - begin, 0)
        sent_now, received_now, at = (each.tolist() for each in of_peers)
        device_rows = None if of_trip is None else rows_to_device(of_trip, device)
        buffer = (first_buffer + number) % BUFFERS_PER_CALL
        routes.append(Route(kind, device_rows, sent_now, received_now, at, most_rows, buffer, padded_to))
    return routes


def _within(first: np.ndarray, counts: np.ndarray, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ranges of ``counts`` rows from ``first``, as far as they lie in [begin, end)."""
    head, tail = np.clip(first, begin, end), np.clip(first + counts, begin, end)
    return head, tail - head
