"""Packs rows and writes them into peers' memory in one pass. Imports torch and triton.

Every rank's memory has an address that all ranks can write to; a table of these addresses lies on the device. The rows
to send are split into blocks, each for one peer, so that one launch serves all peers.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_ROWS = 32
"""Rows of one entry of the block table."""
PROGRAMS = 24
"""Most programs of a launch, on an SM each, so that the other SMs are free for the work that hides the exchange. NCCL
and DeepEP saturate NVLink with 16 to 24 SMs; for these kernels the number has not been measured."""
_WARPS = 16
_TILE_WORDS = 4096
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def split_into_blocks(
    send_counts: Sequence[int],
    put_offsets: Sequence[int],
    peers: Sequence[int] | None = None,
    padded_to: int | None = None,
) -> Tensor:
    """Host table int32 [n, 4]: peer, first row among those to send, first row at the peer, number of rows.

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
    part: Tensor, rows: Tensor | None, blocks: Tensor, addresses: Tensor, begin: int, row_bytes: int, failed: Tensor
) -> None:
    """Writes rows of ``part`` into the peers' memory, on at most ``PROGRAMS`` SMs.

    Args:
        part: [N, ...] contiguous, any dtype. rows: int64 [R] which of its rows; None for all in order.
        blocks: as ``split_into_blocks`` makes it, on the device.
        addresses: int64 [num_ranks] of the peers' memory, multiples of 16.
        begin: byte of the part's place in the first row that any rank receives. row_bytes: from one row to the next.
        failed: int64 [1]; unless 0, nothing is written.
    """
    if not len(blocks) or not part.numel():
        return
    num_bytes = part[0].numel() * part.dtype.itemsize
    word_bytes = math.gcd(num_bytes, row_bytes, begin, part.data_ptr(), 8)
    num_words = num_bytes // word_bytes
    block_words = min(256, triton.next_power_of_2(num_words))
    tiles = len(blocks) * triton.cdiv(num_words, block_words)
    _put_rows[(min(PROGRAMS, tiles),)](
        part.view(-1).view(_WORDS[word_bytes]),
        blocks if rows is None else rows,
        blocks,
        addresses,
        begin,
        row_bytes // word_bytes,
        failed,
        tiles,
        NUM_WORDS=num_words,
        BLOCK_WORDS=block_words,
        STEP_ROWS=min(BLOCK_ROWS, max(1, _TILE_WORDS // block_words)),
        BLOCK_ROWS=BLOCK_ROWS,
        HAS_ROWS=rows is not None,
        ALIGNED=begin % 16 == 0,
        num_warps=_WARPS,
    )


@triton.jit(do_not_specialize=["begin", "tiles"])
def _put_rows(
    part,
    rows,
    blocks,
    addresses,
    begin,
    row_words,
    failed,
    tiles,
    NUM_WORDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    STEP_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    COLUMNS: tl.constexpr = (NUM_WORDS + BLOCK_WORDS - 1) // BLOCK_WORDS
    if tl.load(failed) == 0:
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            block = blocks + tile // COLUMNS * 4
            first = tl.load(block + 1)
            row = tl.load(block + 2)
            num_rows = tl.load(block + 3)
            target = (tl.load(addresses + tl.load(block)) + begin).to(tl.pointer_type(part.dtype.element_ty))
            if ALIGNED:
                target = tl.multiple_of(target, 16)  # so that stores are as wide as loads
            words = tile % COLUMNS * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
            for step in range(0, BLOCK_ROWS, STEP_ROWS):
                i = step + tl.arange(0, STEP_ROWS)
                source = (first + i).to(tl.int64)
                if HAS_ROWS:
                    source = tl.load(rows + source, mask=i < num_rows, other=0)
                mask = (i < num_rows)[:, None] & (words < NUM_WORDS)[None, :]
                values = tl.load(part + source[:, None] * NUM_WORDS + words[None, :], mask=mask)
                tl.store(target + (row + i).to(tl.int64)[:, None] * row_words + words[None, :], values, mask=mask)
