# SPDX-License-Identifier: BSD-3-Clause
"""Pack the rows of an exchange and write them to peers' memory in one pass.

A table on the device has the address of every rank's memory, to which all ranks can write. The rows to send are split
into blocks for one peer each, so that one launch serves all peers and all routes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import smid

from torchtitan_cad.planning.exchange.messages import BUFFER_ALIGNMENT
from torchtitan_cad.planning.intervals import concat_ranges
from torchtitan_cad.runtime.packing import Message, RowFormat
from torchtitan_cad.runtime.transport.base import rows_to_device
from torchtitan_cad.runtime.triton.rows import (
    WIDTH,
    Kernel,
    Numbers,
    Words,
    last_from,
    padded,
    pointer,
    row_of,
    select,
    words_of,
)

BLOCK_ROWS = tl.constexpr(64)
"""rows: maximum of an entry of the block table; a program moves ``WIDTH`` words of each at a time"""
PROGRAMS = 24
"""programs: maximum of a launch, one per SM; the other SMs are free for the work that hides the exchange. On an H200,
into its own memory, 24 move 630 GB/s; NVLink takes 450 each way."""
WARPS = 32
"""warps of a program, whose registers are more than half of an SM's: no two programs share one"""
MOST_TENSORS = 8
"""tensors of an exchange; the most are dO, two statistics, Q, K, V and a part of K"""
_PAGE = tl.constexpr(BUFFER_ALIGNMENT)
"""bytes: rows of a route begin at multiples"""


@dataclass(frozen=True)
class Blocks:
    """The rows of an exchange that a rank sends, split into blocks of rows for one peer.

    Attributes:
        table: int32 [n, 4] on the device, as ``split_into_blocks`` returns it, of one route after the other.
        counts: blocks of each route.
        rows: int64 [R] rows to send, of one route after the other, to which the table then refers; None sends the rows
            of every route in order.
    """

    table: Tensor
    counts: tuple[int, ...]
    rows: Tensor | None

    @classmethod
    def of(
        cls,
        tables: Sequence[np.ndarray],
        rows: Sequence[Tensor | None],
        device: torch.device,
    ) -> "Blocks":
        """Join the tables of ``split_into_blocks`` and the rows to send of all routes; None for all in order."""
        joined = list[Tensor]()
        end = 0
        if any(x is not None for x in rows):
            for table, of_route in zip(tables, rows, strict=True):
                last = int((table[:, 1] + table[:, 3]).max(initial=0))
                joined.append(
                    torch.arange(last, device=device) if of_route is None else of_route
                )
                table[:, 1] += end
                end += len(joined[-1])
        whole = rows_to_device(np.concatenate(tables), device, np.int32)
        return cls(
            whole, tuple(map(len, tables)), torch.cat(joined) if joined else None
        )


def split_into_blocks(
    send_counts: Sequence[int] | np.ndarray,
    put_offsets: Sequence[int] | np.ndarray,
    starts: np.ndarray | None = None,
) -> np.ndarray:
    """Return the table int64 [n, 4]: peer, first row among those to send, first row at the peer, number of rows.

    Args:
        send_counts, put_offsets: per rank, as in ``Route``.
        starts: per rank, where its rows begin among those to send; by default they lie one after the other.
    """
    counts = np.asarray(send_counts)
    offsets = np.asarray(put_offsets)
    size = BLOCK_ROWS.value
    first = np.cumsum(counts) - counts if starts is None else starts
    blocks = -(-counts // size)
    peer = np.repeat(np.arange(len(counts)), blocks)
    inside = concat_ranges(np.zeros_like(blocks), blocks) * size
    rows = np.minimum(counts[peer] - inside, size)
    return np.stack((peer, first[peer] + inside, offsets[peer] + inside, rows), axis=1)


def put_rows(
    messages: Sequence[Message],
    blocks: Blocks,
    begins: Sequence[int],
    addresses: Tensor,
    failed: Tensor,
    multiprocessors: Tensor | None = None,
) -> None:
    """Write rows of every message into the peers' memory, in one launch on at most ``PROGRAMS`` SMs.

    Args:
        messages: per route, tensors [N, ...] of any dtypes, and their row format.
        begins: per route, byte at which received rows begin in the peers' memory, a multiple of ``BUFFER_ALIGNMENT``.
        addresses: int64 [num_ranks] addresses of the peers' memory, multiples of 16.
        failed: int64 [1]; unless 0, nothing is written.
        multiprocessors: int32 [PROGRAMS], gets the multiprocessor on which each program runs, for measurements.
    """
    by_route = zip(messages, blocks.counts, strict=True)
    sent = chain.from_iterable(parts for (parts, _), count in by_route if count)
    tensors = [x.contiguous() for x in sent if x.numel()]
    if not tensors:
        return
    sources = [x.data_ptr() for x in tensors]
    formats = tuple([row_format for _, row_format in messages])
    cut = _cut(formats, tuple(begins), blocks.counts, math.gcd(16, *sources))
    _put_rows.launch(
        (min(PROGRAMS, cut.num_tiles), 1, 1),
        (blocks.table, addresses, failed),
        (
            (padded(sources, MOST_TENSORS), cut.strides),
            *cut.tables,
            0 if blocks.rows is None else blocks.rows.data_ptr(),
            0 if multiprocessors is None else multiprocessors.data_ptr(),
            cut.num_tiles,
        ),
        (cut.words.dtype, cut.words.is_aligned),
        num_warps=WARPS,
    )


@dataclass(frozen=True)
class _Cut:
    """The rows to send, cut into tiles: a block of rows of a tensor, and a column of their words.

    Attributes:
        strides: per tensor, bytes from one row to the next.
        tables: per tensor, its first tile, its first block, words of a row, page at which received rows begin, byte of
            such a row at which the tensor's begins, and bytes from one received row to the next.
    """

    num_tiles: int
    words: Words
    strides: Numbers
    tables: tuple[Numbers, ...]


@lru_cache(maxsize=1024)
def _cut(
    formats: tuple[RowFormat, ...],
    begins: tuple[int, ...],
    counts: tuple[int, ...],
    alignment: int,
) -> _Cut:
    """Cut what is the same in every layer, given the ``alignment`` of the tensors."""
    blocks_before = accumulate(counts, initial=0)
    parts = []
    for row_format, begin, count, before in zip(
        formats, begins, counts, blocks_before, strict=False
    ):
        route = row_format.row_bytes, begin // BUFFER_ALIGNMENT, count, before
        if count:
            parts += [(*route, at, size) for at, size, *_ in row_format.fields if size]
    row_bytes, pages, num_blocks, first_blocks, at, sizes = zip(*parts, strict=True)
    words = Words.of(sizes, math.gcd(alignment, *row_bytes, *at))
    tiles = [
        blocks * columns
        for blocks, columns in zip(num_blocks, words.columns, strict=True)
    ]
    *first_tiles, num_tiles = accumulate(tiles, initial=0)
    tables = first_tiles, first_blocks, words.sizes, pages, at, row_bytes
    return _Cut(
        num_tiles,
        words,
        padded(sizes, MOST_TENSORS),
        tuple(padded(table, MOST_TENSORS) for table in tables),
    )


@Kernel
@triton.jit(do_not_specialize=["rows", "multiprocessors", "tiles"])
def _put_rows(
    blocks,
    addresses,
    failed,
    sources,
    first_tiles,
    first_blocks,
    sizes,
    pages,
    at,
    row_bytes,
    rows: tl.int64,
    multiprocessors: tl.int64,
    tiles: tl.int32,
    WORD: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """Write a block of rows at a time, a column of words of each."""
    if multiprocessors != 0:
        tl.store(pointer(multiprocessors, tl.int32, False) + tl.program_id(0), smid())
    if tl.load(failed) == 0:
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            p = last_from(first_tiles, tile)
            size = select(sizes, p)
            columns = tl.cdiv(size, WIDTH)
            of_tensor = tile - select(first_tiles, p)
            block = blocks + (select(first_blocks, p) + of_tensor // columns) * 4
            words, is_word = words_of(of_tensor % columns, size, IS_ALIGNED)
            place = (
                tl.load(addresses + tl.load(block))
                + select(pages, p).to(tl.int64) * _PAGE
                + select(at, p)
            )
            i = tl.arange(0, BLOCK_ROWS)
            is_row = i < tl.load(block + 3)
            row = (tl.load(block + 1) + i).to(tl.int64)
            if rows != 0:
                row = tl.load(
                    pointer(rows, tl.int64, False) + row, mask=is_row, other=0
                )
            mask = is_row[:, None] & is_word[None, :]
            source = pointer(row_of(sources, p, row), WORD, IS_ALIGNED)
            values = tl.load(source[:, None] + words[None, :], mask=mask)
            target_row = (tl.load(block + 2) + i).to(tl.int64)
            target = pointer(
                place + target_row * select(row_bytes, p), WORD, IS_ALIGNED
            )
            tl.store(target[:, None] + words[None, :], values, mask=mask)
