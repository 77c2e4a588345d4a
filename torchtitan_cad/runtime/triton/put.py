"""Packs rows and writes them into peers' memory in one pass.

Every rank's memory has an address that all ranks can write to; a table of these addresses lies on the device. The rows
to send are split into blocks, each for one peer, so that one launch serves all peers.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_cad.runtime.triton.rows import column_blocks

BLOCK_ROWS = 32
"""Rows of one entry of the block table."""
PROGRAMS = 24
"""Most programs of a launch, on an SM each, so that the other SMs are free for the work that hides the exchange. NCCL
and DeepEP saturate NVLink with 16 to 24 SMs; for these kernels the number has not been measured."""
_WARPS = 16
_TILE_WORDS = 4096
_WIDTH = 256
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def split_into_blocks(
    send_counts: Sequence[int],
    put_offsets: Sequence[int],
    peers: Sequence[int] | None = None,
    padded_to: int | None = None,
) -> Tensor:
    """Return the host table int32 [n, 4]: peer, first row among those to send, first row at the peer, number of rows.

    Args:
        send_counts, put_offsets: per rank, as in ``Route``.
        peers: those to make blocks for; None for all.
        padded_to: rows; blocks without rows are added, as many as so many rows could take.
    """
    counts, offsets = torch.tensor(send_counts), torch.tensor(put_offsets)
    starts = counts.cumsum(0) - counts
    if peers is not None:
        served = torch.zeros_like(counts)
        served[list(peers)] = 1
        counts = counts * served
    blocks = -(-counts // BLOCK_ROWS)
    peer = torch.repeat_interleave(blocks)
    inside = (torch.arange(len(peer)) - (blocks.cumsum(0) - blocks)[peer]) * BLOCK_ROWS
    rows = (counts[peer] - inside).clamp(max=BLOCK_ROWS)
    table = torch.stack((peer, starts[peer] + inside, offsets[peer] + inside, rows), dim=1).to(torch.int32)
    if padded_to is None:
        return table
    return torch.cat((table, table.new_zeros(padded_to // BLOCK_ROWS + len(counts) - len(table), 4)))


def put_rows(
    parts: Sequence[Tensor],
    places: Sequence[int],
    rows: Tensor | None,
    blocks: Tensor,
    addresses: Tensor,
    begin: int,
    row_bytes: int,
    failed: Tensor,
) -> None:
    """Write rows of every part into the peers' memory, in one launch on at most ``PROGRAMS`` SMs.

    Args:
        parts: [N, ...] contiguous, any dtypes. rows: int64 [R] which of their rows; None for all in order.
        places: byte at which each part begins in a row of the message.
        blocks: as ``split_into_blocks`` makes it, on the device.
        addresses: int64 [num_ranks] of the peers' memory, multiples of 16.
        begin: byte at which the first row that any rank receives begins. row_bytes: from one row to the next.
        failed: int64 [1]; unless 0, nothing is written.
    """
    placed = [(part, place) for part, place in zip(parts, places, strict=True) if part.numel()]
    if not len(blocks) or not placed:
        return
    views, row_words, num_words = [], [], []
    for part, place in placed:
        num_bytes = part[0].numel() * part.dtype.itemsize
        word_bytes = math.gcd(num_bytes, row_bytes, begin, place, part.data_ptr(), 8)
        views.append(part.view(-1).view(_WORDS[word_bytes]))
        row_words.append(row_bytes // word_bytes)
        num_words.append(num_bytes // word_bytes)
    widths, first = column_blocks(num_words, _WIDTH)
    tiles = len(blocks) * first[-1]
    _put_rows[(min(PROGRAMS, tiles),)](
        tuple(views),
        blocks if rows is None else rows,
        blocks,
        addresses,
        begin,
        failed,
        tiles,
        PLACES=tuple(place for _, place in placed),
        ROW_WORDS=tuple(row_words),
        NUM_WORDS=tuple(num_words),
        WIDTHS=widths,
        FIRST=first,
        TILE_WORDS=_TILE_WORDS,
        BLOCK_ROWS=BLOCK_ROWS,
        HAS_ROWS=rows is not None,
        ALIGNED=begin % 16 == 0,
        num_warps=_WARPS,
    )


@triton.jit(do_not_specialize=["begin", "tiles"])
def _put_rows(
    parts,
    rows,
    blocks,
    addresses,
    begin,
    failed,
    tiles,
    PLACES: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    WIDTHS: tl.constexpr,
    FIRST: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    COLUMNS: tl.constexpr = FIRST[len(parts)]
    if tl.load(failed) == 0:
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            block = blocks + tile // COLUMNS * 4
            column = tile % COLUMNS
            for p in tl.static_range(len(parts)):
                if (column >= FIRST[p]) & (column < FIRST[p + 1]):
                    address = tl.load(addresses + tl.load(block)) + begin + PLACES[p]
                    _put_tile(
                        parts[p],
                        rows,
                        block,
                        address,
                        column - FIRST[p],
                        ROW_WORDS[p],
                        NUM_WORDS[p],
                        WIDTHS[p],
                        TILE_WORDS,
                        BLOCK_ROWS,
                        HAS_ROWS,
                        ALIGNED and PLACES[p] % 16 == 0,
                    )


@triton.jit
def _put_tile(
    part,
    rows,
    block,
    address,
    column,
    ROW_WORDS: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Write a block of rows, and of their words as many columns as a tile is wide."""
    STEP_ROWS: tl.constexpr = min(BLOCK_ROWS, max(1, TILE_WORDS // WIDTH))
    first = tl.load(block + 1)
    row = tl.load(block + 2)
    num_rows = tl.load(block + 3)
    target = address.to(tl.pointer_type(part.dtype.element_ty))
    if ALIGNED:
        target = tl.multiple_of(target, 16)  # so that stores are as wide as loads
    words = column * WIDTH + tl.arange(0, WIDTH)
    for step in range(0, BLOCK_ROWS, STEP_ROWS):
        i = step + tl.arange(0, STEP_ROWS)
        source = (first + i).to(tl.int64)
        if HAS_ROWS:
            source = tl.load(rows + source, mask=i < num_rows, other=0)
        mask = (i < num_rows)[:, None] & (words < NUM_WORDS)[None, :]
        values = tl.load(part + source[:, None] * NUM_WORDS + words[None, :], mask=mask)
        tl.store(target + (row + i).to(tl.int64)[:, None] * ROW_WORDS + words[None, :], values, mask=mask)
