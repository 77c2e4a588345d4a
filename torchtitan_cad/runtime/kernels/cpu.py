# SPDX-License-Identifier: BSD-3-Clause
"""Exact, memory-efficient attention on the CPU.

The kernel computes tiles of 128 query rows that begin at multiples of 128 in document positions (``iter_tiles``). The
computation of a tile, including the shapes passed to the matrix library, depends only on the tile and its keys. So a
document cut into tasks at tile boundaries, each with its full key prefix, gives the same bits as the document in one
task (out, lse and dq), whatever else is in the call. Matrix libraries do not guarantee that for whole shards, as they
may choose another blocking for another number of rows.

The forward of a tile is PyTorch's fused CPU attention. The backward consists of batched matrix products, because
PyTorch's backward takes ``out`` where only ``delta`` is available.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_cad.runtime.kernels.base import (
    AttentionKernel,
    Merged,
    VarlenArgs,
    compute_dtype,
    row_delta,
)
from torchtitan_cad.runtime.kernels.merge import combine

QUERY_TILE = 128
"""rows of a tile; tiles begin at multiples in document positions, for any cut of a document into tasks"""

KEY_BLOCK = 256
"""keys per step of the backward, whose workspace is a few buffers of Hq x 128 x KEY_BLOCK elements"""

_HEAD_DIM_MULTIPLE = 16
"""elements: head dims are padded with zeros to a multiple, so that fp32 rows begin at cache lines."""

_FUSED_ROWS = 32
"""query rows of an inner tile of PyTorch's fused CPU attention, if called with fewer than 192 rows"""


class Tile(NamedTuple):
    """Query rows [q_lo, q_hi) and the keys they see, as rows of the packed tensors.

    Every row sees the keys [k_lo, k_mid). A square lower-triangular mask applies to the keys [k_mid, k_hi): in a causal
    call, as many keys as the tile has rows, otherwise none. Where a ``window`` hides keys, a row sees
    only that many of them, the last ones.
    """

    q_lo: int
    q_hi: int
    k_lo: int
    k_mid: int
    k_hi: int
    window: int | None = None


def iter_tiles(call: VarlenArgs) -> Iterator[Tile]:
    """Yield the tiles of all tasks, in order, without rows that see no key."""
    cu_q = call.cu_q_host.tolist()
    cu_k = call.cu_k_host.tolist()
    for task, position in enumerate(call.q_start.tolist()):
        q_lo, q_end = cu_q[task : task + 2]
        k_lo, k_end = cu_k[task : task + 2]
        while q_lo < q_end:
            q_hi = min(q_lo + QUERY_TILE - position % QUERY_TILE, q_end)
            if call.causal:
                k_hi = k_end - (q_end - q_hi)
                first = max(q_lo, q_hi - (k_hi - k_lo))
                if first < q_hi:
                    yield _causal_tile(first, q_hi, k_lo, k_hi, call.window)
            elif k_end > k_lo:
                yield Tile(q_lo, q_hi, k_lo, k_end, k_end)
            position += q_hi - q_lo
            q_lo = q_hi


def _causal_tile(
    q_lo: int, q_hi: int, k_lo: int, k_hi: int, window: int | None
) -> Tile:
    k_mid = k_hi - (q_hi - q_lo)
    if window is not None:
        k_lo = max(k_lo, k_mid + 1 - window)
        window = window if k_hi - k_lo > window else None
    return Tile(q_lo, q_hi, k_lo, k_mid, k_hi, window)


@lru_cache(maxsize=16)
def _window_mask(rows: int, before: int, window: int, dtype: torch.dtype) -> Tensor:
    """[rows, before + rows] to add to scores, -inf for keys that rows do not see: row i is at key ``before + i``.

    Rows are padded to ``_FUSED_ROWS``; the padding sees all keys.
    """
    keys = before + rows
    seen = torch.ones(rows, keys, dtype=torch.bool)
    seen.tril_(before)
    seen.triu_(before + 1 - window)
    padding = -rows % _FUSED_ROWS
    mask = torch.zeros(rows + padding, keys, dtype=dtype)
    mask[:rows].masked_fill_(~seen, -torch.inf)
    return mask


class CpuKernel(AttentionKernel):
    """Attention on CPU tensors: GQA, any dtypes, head dims and lengths, computed in fp32 (fp64 for fp64 inputs).

    Besides inputs and results, it takes copies of the inputs in the compute dtype, and a workspace that does not grow
    with the sequence length.
    """

    name = "cpu"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: VarlenArgs
    ) -> tuple[Tensor, Tensor]:
        """Return out [Tq, Hq, Dv] in q's dtype, lse [Tq, Hq] in fp32 (fp64)."""
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            value_dim = v.shape[2]
            key_dim = q.shape[2]
            # PyTorch's fused attention takes heads of one size.
            common = max(key_dim, value_dim)
            qh = _heads_first(q, common)
            kh = _heads_first(k, common)
            vh = _heads_first(v, common)
            heads_of_rows = q.shape[:2]
            out = torch.zeros(*heads_of_rows, value_dim, dtype=q.dtype)
            lse = torch.full(heads_of_rows, -torch.inf, dtype=qh.dtype)
            for tile in iter_tiles(call):
                rows = slice(tile.q_lo, tile.q_hi)
                tile_out, tile_lse = _tile_forward(qh, kh, vh, tile, call.scale)
                out[rows] = tile_out[..., :value_dim]
                lse[rows] = tile_lse
            return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        merged: Merged,
        call: VarlenArgs,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq [Tq, Hq, D], dk [Tk, Hkv, D] and dv [Tk, Hkv, Dv], all in fp32 (fp64)."""
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            lse, delta, out = merged
            if delta is None:
                assert out is not None, "backward needs delta or out"
                delta = row_delta(dout, out)
            dout = _heads_first(dout, dout.shape[2])
            qh = _heads_first(q, q.shape[2])
            kh = _heads_first(k, k.shape[2])
            vh = _heads_first(v, v.shape[2])
            # a row without keys has probability exp(-inf) = 0
            shift = torch.where(lse == -torch.inf, lse, -lse)
            of_scores = shift.to(qh.dtype).t()
            of_dprobs = -delta.to(qh.dtype).t()
            grads = [torch.zeros_like(x) for x in (qh, kh, vh)]
            terms = (of_scores.unsqueeze(-1), of_dprobs.unsqueeze(-1))
            rows = (dout, qh, *terms)
            for tile in iter_tiles(call):
                _add_tile(grads, rows, kh, vh, tile, call.scale)
            dq, dk, dv = grads
            return _rows_first(dq, q), _rows_first(dk, k), _rows_first(dv, v)


def _heads_first(x: Tensor, least: int) -> Tensor:
    """[T, H, D] -> a contiguous copy [H, T, D padded] in the compute dtype, with ``least`` elements or more a head."""
    rows, heads, dim = x.shape
    padded = least + -least % _HEAD_DIM_MULTIPLE
    dtype = compute_dtype(x.dtype)
    copy = torch.empty(heads, rows, padded, dtype=dtype)
    copy[..., :dim] = x.transpose(0, 1)
    copy[..., dim:] = 0
    return copy


def _rows_first(grad: Tensor, like: Tensor) -> Tensor:
    """[H, T, D padded] -> [T, H, D] in the shape of ``like``."""
    dim = like.shape[2]
    unpadded = grad[..., :dim]
    return unpadded.transpose(0, 1).contiguous()


def _tile_forward(
    q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float
) -> tuple[Tensor, Tensor]:
    """out [rows, Hq, D] and lse [rows, Hq] of one tile; q, k, v heads first."""
    queries = q[:, tile.q_lo : tile.q_hi]

    def attend(
        lo: int, hi: int, causal: bool = False, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        keys = k[:, lo:hi]
        values = v[:, lo:hi]
        return _fused_attention(queries, keys, values, causal, scale=scale, mask=mask)

    if tile.window is not None:
        num_before = tile.k_mid - tile.k_lo
        mask = _window_mask(queries.shape[1], num_before, tile.window, q.dtype)
        return attend(tile.k_lo, tile.k_hi, mask=mask)
    if tile.k_lo == tile.k_mid:
        return attend(tile.k_mid, tile.k_hi, causal=True)
    unmasked = attend(tile.k_lo, tile.k_mid)
    if tile.k_mid == tile.k_hi:
        return unmasked
    triangle = attend(tile.k_mid, tile.k_hi, causal=True)
    return combine(*unmasked, *triangle)


def _fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """PyTorch's fused CPU attention of q [Hq, n, D], k, v [Hkv, m, D]: out [n, Hq, D], lse [n, Hq].

    Its causal mask is top-left, which for n == m is the same as bottom-right. It supports fewer key heads than query
    heads. Rows are padded to its inner tile, because a shorter tile leaves the scratch buffers of its threads
    unaligned, and the bits of a row then depend on the thread that computes it. A causal mask hides the padding keys.
    """
    rows = q.shape[1]
    below = 0, 0, 0, -rows % _FUSED_ROWS
    if any(below):
        q = F.pad(q, below)
        if causal:
            k = F.pad(k, below)
            v = F.pad(v, below)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q[None], k[None], v[None], 0.0, causal, attn_mask=mask, scale=scale
    )
    unpadded_out = out[0, :, :rows]
    unpadded_lse = lse[0, :, :rows]
    return unpadded_out.transpose(0, 1), unpadded_lse.transpose(0, 1)


def _add_tile(
    grads: Sequence[Tensor],
    rows: Sequence[Tensor],
    all_k: Tensor,
    all_v: Tensor,
    tile: Tile,
    scale: float,
) -> None:
    """Add one tile's gradients to dq, dk and dv; all tensors are heads first and in the compute dtype.

    The query heads of a key head are folded into rows: [Hkv, Hq/Hkv * rows, D].

    Args:
        rows: for all queries dout, q, and two terms [Hq, Tq, 1]: one for the scaled scores, one for dout v^T.
    """
    all_dq, dk, dv = grads
    kv_heads = all_k.shape[0]
    num_rows = tile.q_hi - tile.q_lo
    queries = [x[:, tile.q_lo : tile.q_hi] for x in rows]
    dout, q, shift, neg_delta = (_fold(x, kv_heads) for x in queries)
    dq = torch.zeros_like(q)
    for lo, hi in _key_blocks(tile):
        k = all_k[:, lo:hi]
        v = all_v[:, lo:hi]
        k_t = k.transpose(1, 2)
        scores = torch.baddbmm(shift, q, k_t, alpha=scale)
        probs = _probabilities(scores, tile, lo)
        v_t = v.transpose(1, 2)
        dprobs = torch.baddbmm(neg_delta, dout, v_t)
        dscores = dprobs.mul_(probs)
        dq.baddbmm_(dscores, k, alpha=scale)
        dk_of_block = torch.bmm(dscores.transpose(1, 2), q)
        dk[:, lo:hi].add_(dk_of_block, alpha=scale)
        dv_of_block = torch.bmm(probs.transpose(1, 2), dout)
        dv[:, lo:hi].add_(dv_of_block)
    of_heads = dq.view(-1, num_rows, dq.shape[2])
    all_dq[:, tile.q_lo : tile.q_hi] = of_heads


def _probabilities(scores: Tensor, tile: Tile, lo: int) -> Tensor:
    """Overwrite the scores of a block of keys from ``lo`` by probabilities: 0 of keys that the masks hide."""
    probs = scores.exp_()
    num_rows = tile.q_hi - tile.q_lo
    of_heads = probs.unflatten(1, (-1, num_rows))
    if lo == tile.k_mid:
        of_heads.tril_()
    if tile.window is not None:
        before = tile.k_mid - lo
        of_heads.triu_(before + 1 - tile.window)
    return probs


def _fold(x: Tensor, kv_heads: int) -> Tensor:
    """[Hq, rows, D] -> [Hkv, Hq/Hkv * rows, D]."""
    return x.reshape(kv_heads, -1, x.shape[2])


def _key_blocks(tile: Tile) -> Iterator[tuple[int, int]]:
    """Yield ranges of keys: blocks that every row of the tile sees, and the square with the triangular mask."""
    for lo in range(tile.k_lo, tile.k_mid, KEY_BLOCK):
        hi = min(lo + KEY_BLOCK, tile.k_mid)
        yield lo, hi
    if tile.k_mid < tile.k_hi:
        yield tile.k_mid, tile.k_hi
