# SPDX-License-Identifier: BSD-3-Clause
"""Pack rows and write them to peers' memory in one pass.

A table on the device has the address of every rank's memory, to which all ranks can write. The rows to send are split
into blocks for one peer each, so that one launch serves all peers.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import smid

from torchtitan_cad.runtime.triton.rows import FUSION, Columns, in_column, padded, places, pointer, row_of, select

BLOCK_ROWS = tl.constexpr(32)
"""rows: maximum of an entry of the block table."""
PROGRAMS = 24
"""programs: maximum of a launch, one per SM; the other SMs are free for the work that hides the exchange. On an H200,
into its own memory, 16 move 430 GB/s and 24 move 620; NVLink takes 450 each way."""
WARPS = 16
"""warps of a program"""
_STEP_ROWS = tl.constexpr(16)
"""rows that a program moves at a time"""


def split_into_blocks(
    send_counts: Sequence[int] | np.ndarray,
    put_offsets: Sequence[int] | np.ndarray,
    starts: np.ndarray | None = None,
    padded_to: int | None = None,
) -> Tensor:
    """Return the host table int32 [n, 4]: peer, first row among those to send, first row at the peer, number of rows.

    Args:
        send_counts, put_offsets: per rank, as in ``Route``.
        starts: per rank, where its rows begin among those to send; by default they lie one after the other.
        padded_to: number of rows; empty blocks are added up to the most blocks that this many rows can take.
    """
    counts, offsets = torch.as_tensor(send_counts), torch.as_tensor(put_offsets)
    first = counts.cumsum(0) - counts if starts is None else torch.as_tensor(starts)
    size = BLOCK_ROWS.value
    blocks = -(-counts // size)
    peer = torch.repeat_interleave(blocks)
    inside = (torch.arange(len(peer)) - (blocks.cumsum(0) - blocks)[peer]) * size
    rows = (counts[peer] - inside).clamp(max=size)
    table = torch.stack((peer, first[peer] + inside, offsets[peer] + inside, rows), dim=1).to(torch.int32)
    if padded_to is None:
        return table
    return torch.cat((table, table.new_zeros(padded_to // size + len(counts) - len(table), 4)))


def put_rows(
    tensors: Sequence[Tensor],
    at: Sequence[int],
    rows: Tensor | None,
    blocks: Tensor,
    addresses: Tensor,
    begin: int,
    row_bytes: int,
    failed: Tensor,
    multiprocessors: Tensor | None = None,
) -> None:
    """Write rows of every tensor into the peers' memory, in one launch on at most ``PROGRAMS`` SMs.

    Args:
        tensors: [N, ...] contiguous, any dtypes.
        rows: int64 [R] rows to send; None for all in order.
        at: byte at which each tensor begins in a row of the message.
        blocks: table of ``split_into_blocks``, on the device.
        addresses: int64 [num_ranks] addresses of the peers' memory, multiples of 16.
        begin: byte at which received rows begin in the peers' memory.
        row_bytes: bytes from one row to the next.
        failed: int64 [1]; unless 0, nothing is written.
        multiprocessors: int32 [PROGRAMS], gets the multiprocessor on which each program runs, for measurements.
    """
    placed = [(tensor, place) for tensor, place in zip(tensors, at, strict=True) if tensor.numel()]
    if not len(blocks) or not placed:
        return
    sent = [tensor for tensor, _ in placed]
    sizes = [tensor[0].numel() * tensor.itemsize for tensor in sent]
    columns = Columns.of(sizes, sent, begin, row_bytes, *(place for _, place in placed))
    row_table = 0 if rows is None else rows.data_ptr()
    tiles = len(blocks) * columns.count
    _put_rows[(min(PROGRAMS, tiles),)](
        *(places(sent, sent), columns.table, padded(16 * place for _, place in placed), row_table),
        *(blocks, addresses, begin, row_bytes, failed, tiles, columns.count, multiprocessors),
        WORD=columns.word,
        IS_ALIGNED=columns.is_aligned,
        num_warps=WARPS,
        **FUSION,
    )


@triton.jit(do_not_specialize=["rows", "begin", "row_bytes", "tiles", "num_columns"])
def _put_rows(
    sources,
    columns,
    at,
    rows: tl.int64,
    blocks,
    addresses,
    begin: tl.int64,
    row_bytes: tl.int64,
    failed,
    tiles: tl.int32,
    num_columns: tl.int32,
    multiprocessors,
    WORD: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """Write a block of rows at a time, a column of words of each."""
    if multiprocessors is not None:
        tl.store(multiprocessors + tl.program_id(0), smid())
    if tl.load(failed) == 0:
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            block = blocks + tile // num_columns * 4
            p, words, is_word = in_column(tile % num_columns, columns, IS_ALIGNED)
            place = tl.load(addresses + tl.load(block)) + begin + (select(at, p) >> 4)
            begin_row = tl.load(block + 1)
            target_row = tl.load(block + 2).to(tl.int64)
            num_rows = tl.load(block + 3)
            for step in range(0, BLOCK_ROWS, _STEP_ROWS):
                i = step + tl.arange(0, _STEP_ROWS)
                row = (begin_row + i).to(tl.int64)
                if rows != 0:
                    row = tl.load(pointer(rows, tl.int64, False) + row, mask=i < num_rows, other=0)
                mask = (i < num_rows)[:, None] & is_word[None, :]
                source = pointer(row_of(sources, p, row), WORD, IS_ALIGNED)
                values = tl.load(source[:, None] + words[None, :], mask=mask)
                target = pointer(place + (target_row + i) * row_bytes, WORD, IS_ALIGNED)
                tl.store(target[:, None] + words[None, :], values, mask=mask)
