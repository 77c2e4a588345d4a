# SPDX-License-Identifier: BSD-3-Clause
"""Tables of a rank's rows of one kind, queries or keys: their chunks, and the combination of results."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

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
        moves: bool,
        is_padded: bool,
    ) -> "RowTables":
        """Build the tables on ``device``.

        Args:
            computed: per kernel call, the rows of the row space that it computes, or -1 for padding.
            moves: True if any rank sends rows.
            is_padded: True if ``send_rows`` is padded with -1; the tensors of received rows then are as long.
        """
        num_local, send_rows = exchange.num_local, exchange.send_rows
        padded_to = len(send_rows) if is_padded else None
        num_remote = exchange.num_received if padded_to is None else padded_to
        build = partial(Combination.build, device=device, in_place=not is_padded)
        remote = build([np.where(x < num_local, -1, x - num_local) for x in computed], num_remote)
        so_far, local = [np.where(rows < num_local, rows, -1) for rows in computed], None
        if moves and combine_early(sum(map(len, computed)), num_local):
            local, so_far = build(so_far, num_local), [np.arange(num_local)]
        chunks_out, chunks_home = getattr(chunks, f"{kind}_out"), getattr(chunks, f"{kind}_home")
        before_out, before_home = (chunks.queries_out, chunks.queries_home) if kind == "keys" else ((), ())
        counts = exchange.send_counts, exchange.recv_counts, exchange.put_offsets
        back = exchange.recv_counts, exchange.send_counts, exchange.return_offsets
        routes = partial(_routes, device=device, padded_to=padded_to)
        home: list[Chunk] = []
        # Results return to a home in the order of its sent rows.
        returned = np.split(send_rows, np.cumsum(chunks_home[:-1]))
        for route, rows in zip(routes("results", None, back, chunks_home, len(before_home)), returned, strict=True):
            combination = build([*so_far, rows] if moves else so_far, num_local)
            home.append(Chunk(kind, route, combination, is_last=len(home) == len(returned) - 1))
            so_far = [np.arange(num_local)]
        out = routes(kind, np.maximum(send_rows, 0), counts, chunks_out, len(before_out))
        return cls(num_local, num_remote, out, remote, local, home)


def _routes(
    kind: Kind,
    rows: np.ndarray | None,
    counts: tuple[np.ndarray, np.ndarray, np.ndarray],
    chunks: Sequence[int],
    first_buffer: int,
    *,
    device: torch.device,
    padded_to: int | None,
) -> list[Route]:
    """Return one route per chunk, which divide the rows in their order of arrival.

    Args:
        rows: rows to send; None for all in order.
        counts: per rank, rows sent, rows received, and where the sent rows begin at their receiver.
        chunks: per chunk, the most rows that it brings to any rank.
        first_buffer: number of the first chunk; chunks alternate between the buffers.
        padded_to: rows of the tensors, if there is only one chunk.
    """
    sent, received, offsets = counts
    first_sent, first_received = np.cumsum(sent) - sent, np.cumsum(received) - received
    routes, end, of_chunk = [], 0, rows
    for number, most_rows in enumerate(chunks):
        begin, end = end, end + most_rows
        first, sent_now = _within(offsets, sent, begin, end)
        _, received_now = _within(first_received, received, begin, end)
        if len(chunks) > 1:
            index = concat_ranges(first_sent + first - offsets, sent_now)
            of_chunk = index if rows is None else rows[index]
        of_peers = sent_now, received_now, np.where(sent_now, first - begin, 0)
        sent_now, received_now, at = (each.tolist() for each in of_peers)
        device_rows = None if of_chunk is None else rows_to_device(of_chunk, device)
        buffer = (first_buffer + number) % BUFFERS_PER_CALL
        routes.append(Route(kind, device_rows, sent_now, received_now, at, most_rows, buffer, padded_to))
    return routes


def _within(first: np.ndarray, counts: np.ndarray, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Return first row and count of the ranges of ``counts`` rows from ``first``, cut to [begin, end)."""
    head, tail = np.clip(first, begin, end), np.clip(first + counts, begin, end)
    return head, tail - head
