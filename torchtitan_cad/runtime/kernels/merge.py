# SPDX-License-Identifier: BSD-3-Clause
"""Merging partial attention results of the same rows by log-sum-exp."""

import torch
from torch import Tensor


def merge_partials(out_acc: Tensor, lse_acc: Tensor, part_out: Tensor, part_lse: Tensor, rows: Tensor) -> None:
    """Merge one partial result per row into accumulators, in place.

    With o_i the softmax-weighted values over key set i and l_i its log-sum-exp, the result over the union of two
    disjoint sets is l = log(exp l_1 + exp l_2), o = exp(l_1 - l) o_1 + exp(l_2 - l) o_2. A row's first partial is
    copied, so a row with one partial keeps its bits.

    Args:
        out_acc, lse_acc: [N, H, D] and [N, H] accumulators, fp32 (fp64); a row without partials holds 0 and -inf.
        part_out, part_lse: [P, H, D] and [P, H]; part_out may have a narrower dtype. A partial without keys has an
            infinite lse, of either sign.
        rows: int64 [P], distinct rows of the accumulators.
    """
    out, lse = out_acc.index_select(0, rows), lse_acc.index_select(0, rows)
    part_out, part_lse = part_out.to(out_acc.dtype), part_lse.to(lse_acc.dtype)
    part_lse = part_lse.masked_fill(part_lse == torch.inf, -torch.inf)
    is_first, is_empty = lse == -torch.inf, part_lse == -torch.inf
    both_out, both_lse = combine(out, lse, part_out, part_lse)
    out = torch.where(is_empty.unsqueeze(-1), out, torch.where(is_first.unsqueeze(-1), part_out, both_out))
    lse = torch.where(is_empty, lse, torch.where(is_first, part_lse, both_lse))
    out_acc.index_copy_(0, rows, out)
    lse_acc.index_copy_(0, rows, lse)


def combine(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the merge of two partials of the same rows, [..., H, D] and [..., H]; undefined for rows empty in both.

    The weights are normalised by their sum instead of the merged lse, whose rounding error would scale the output if
    scores are large.
    """
    top = torch.maximum(lse_a, lse_b)
    weight_a, weight_b = (lse_a - top).exp_(), (lse_b - top).exp_()
    total = weight_a + weight_b
    out = (out_a * (weight_a / total).unsqueeze(-1)).addcmul_(out_b, (weight_b / total).unsqueeze(-1))
    return out, top + total.log()
