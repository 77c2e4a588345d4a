# SPDX-License-Identifier: BSD-3-Clause
"""Tables of a rank's rows of one kind, queries or keys: their chunks, and the combination of results."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from torchtitan_cad.planning.exchange.calls import combine_early
from torchtitan_cad.planning.exchange.messages import BUFFERS_PER_CALL, Chunks
from torchtitan_cad.planning.exchange.tables import RowExchange
from torchtitan_cad.planning.intervals import concat_ranges
from torchtitan_cad.runtime.combine import Combination
from torchtitan_cad.runtime.transport.base import Kind, Route, rows_to_device


@dataclass(frozen=True)
class Chunk:
    """Results of one kind that return to their homes in one exchange.

    Attributes:
        kind: kind of the rows that the results belong to.
        combination: maps the results so far and, if rows move, the returned results to local rows. The results so far
            are those of the kernel calls in their order, or the output of an earlier combination.
        is_last: True for the last chunk of this kind.
    """

    kind: Kind
    route: Route
    combination: Combination
    is_last: bool


@dataclass(frozen=True)
class RowTables:
    """Tables of one kind of rows, see NOTE [Row spaces] of planning/exchange/tables.py.

    Attributes:
        num_local: local rows.
        num_remote: rows of other ranks.
        out: chunks of local rows to their servers, at least one.
        remote: maps the results of the kernel calls, in their order, to rows of other ranks.
        local: maps the results of the kernel calls to local rows before others return; None: the first chunk does.
        home: chunks of results to their homes, at least one.
    """

    num_local: int
    num_remote: int
    out: list[Route]
    remote: Combination
    local: Combination | None
    home: list[Chunk]

    @classmethod
    def build(
        cls,
        exchange: RowExchange,
        kind: Kind,
        computed: list[np.ndarray],
        chunks: Chunks,
        device: torch.device,
        *,
        num_own: int,
        moves: bool,
    ) -> "RowTables":
        """Build the tables on ``device``.

        Args:
            computed: per kernel call, the rows of the row space that it computes.
            num_own: the first calls, which this rank makes itself; others read local rows only.
            moves: True if any rank sends rows.
        """
        num_local = exchange.num_local
        num_remote = exchange.num_received
        combine = partial(Combination.build, device=device)
        remote = combine(
            [
                np.where(rows < num_local, -1, rows - num_local)
                for rows in computed[:num_own]
            ],
            num_remote,
        )
        so_far = [np.where(rows < num_local, rows, -1) for rows in computed]
        num_computed = sum(len(rows) for rows in computed)
        local = None
        if moves and combine_early(num_computed, num_local):
            local = combine(so_far, num_local)
            so_far = [np.arange(num_local)]
        out, routes_home = _routes(exchange, kind, chunks, device)
        home: list[Chunk] = []
        # Results return in the order of the sent rows.
        ends = np.cumsum([route.most_rows for route in routes_home], dtype=int)
        returned_rows = np.split(exchange.send_rows, ends[:-1])
        for route, rows in zip(routes_home, returned_rows, strict=True):
            targets = [*so_far, rows] if moves else so_far
            combination = combine(targets, num_local, num_reusable=len(so_far))
            is_last = route is routes_home[-1]
            home.append(Chunk(kind, route, combination, is_last))
            so_far = [np.arange(num_local)]
        return cls(num_local, num_remote, out, remote, local, home)


def _routes(
    exchange: RowExchange, kind: Kind, chunks: Chunks, device: torch.device
) -> tuple[list[Route], list[Route]]:
    """Return the routes of rows to their servers, and of results home.

    Chunks alternate between the buffers, those of queries first.
    """
    there = _Counts(exchange.send_counts, exchange.recv_counts, exchange.put_offsets)
    back = _Counts(exchange.recv_counts, exchange.send_counts, exchange.return_offsets)
    out = partial(_divide, kind, exchange.send_rows, there, device)
    home = partial(_divide, "results", None, back, device)
    if kind == "queries":
        return out(chunks.queries_out, 0), home(chunks.queries_home, 0)
    return (
        out(chunks.keys_out, len(chunks.queries_out)),
        home(chunks.keys_home, len(chunks.queries_home)),
    )


class _Counts(NamedTuple):
    """Per rank, rows sent, rows received, and where the sent rows begin at their receiver."""

    sent: np.ndarray
    received: np.ndarray
    offsets: np.ndarray


def _divide(
    kind: Kind,
    rows: np.ndarray | None,
    counts: _Counts,
    device: torch.device,
    chunks: Sequence[int],
    first_buffer: int,
) -> list[Route]:
    """Return one route per chunk, which divide the rows in their order of arrival.

    Args:
        rows: rows to send; None for all in order.
        chunks: per chunk, the most rows that it brings to any rank.
        first_buffer: number of the first chunk; chunks alternate between the buffers.
    """
    first_sent = np.cumsum(counts.sent) - counts.sent
    first_received = np.cumsum(counts.received) - counts.received
    routes: list[Route] = []
    end = 0
    for number, most_rows in enumerate(chunks):
        begin = end
        end = begin + most_rows
        first, sent = _within(counts.offsets, counts.sent, begin, end)
        _, received = _within(first_received, counts.received, begin, end)
        chunk_rows = rows
        if len(chunks) > 1:
            index = concat_ranges(first_sent + first - counts.offsets, sent)
            chunk_rows = index if rows is None else rows[index]
        route = Route(
            kind=kind,
            rows=None if chunk_rows is None else rows_to_device(chunk_rows, device),
            send_counts=sent.tolist(),
            recv_counts=received.tolist(),
            put_offsets=np.where(sent, first - begin, 0).tolist(),
            most_rows=most_rows,
            buffer=(first_buffer + number) % BUFFERS_PER_CALL,
        )
        routes.append(route)
    return routes


def _within(
    first: np.ndarray, counts: np.ndarray, begin: int, end: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return first row and count of the ranges of ``counts`` rows from ``first``, cut to [begin, end)."""
    head = np.clip(first, begin, end)
    tail = np.clip(first + counts, begin, end)
    return head, tail - head
