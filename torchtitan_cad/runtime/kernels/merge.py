# SPDX-License-Identifier: BSD-3-Clause
"""Merging partial attention results of the same rows by log-sum-exp."""

import torch
from torch import Tensor


def merge_partials(
    out_NHD: Tensor,
    lse_NH: Tensor,
    part_out_PHD: Tensor,
    part_lse_PH: Tensor,
    rows_P: Tensor,
) -> None:
    """Merge one partial result per row into accumulators, in place.

    With o_i the softmax-weighted values over key set i and l_i its log-sum-exp, the result over the union of two
    disjoint sets is l = log(exp l_1 + exp l_2), o = exp(l_1 - l) o_1 + exp(l_2 - l) o_2. A row's first partial is
    copied, so a row with one partial keeps its bits.

    Args:
        out_NHD, lse_NH: accumulators, fp32 (fp64); a row without partials holds 0 and -inf.
        part_out_PHD, part_lse_PH: partials; outputs may have a narrower dtype. A partial without keys has an infinite
            lse, of either sign.
        rows_P: int64, distinct rows of the accumulators.
    """
    out_PHD = out_NHD.index_select(0, rows_P)
    lse_PH = lse_NH.index_select(0, rows_P)
    part_out_PHD = part_out_PHD.to(out_NHD.dtype)
    part_lse_PH = part_lse_PH.to(lse_NH.dtype)
    part_lse_PH = part_lse_PH.masked_fill(part_lse_PH == torch.inf, -torch.inf)
    is_first_PH = lse_PH == -torch.inf
    is_empty_PH = part_lse_PH == -torch.inf
    both_out_PHD, both_lse_PH = combine(out_PHD, lse_PH, part_out_PHD, part_lse_PH)
    is_first_PH1 = is_first_PH.unsqueeze(-1)
    is_empty_PH1 = is_empty_PH.unsqueeze(-1)
    out_PHD = torch.where(
        is_empty_PH1, out_PHD, torch.where(is_first_PH1, part_out_PHD, both_out_PHD)
    )
    lse_PH = torch.where(
        is_empty_PH, lse_PH, torch.where(is_first_PH, part_lse_PH, both_lse_PH)
    )
    out_NHD.index_copy_(0, rows_P, out_PHD)
    lse_NH.index_copy_(0, rows_P, lse_PH)


def combine(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the merge of two partials of the same rows, [..., H, D] and [..., H]; undefined for rows empty in both.

    The weights are normalised by their sum instead of the merged lse, whose rounding error would scale the output if
    scores are large.
    """
    top = torch.maximum(lse_a, lse_b)
    weight_a = (lse_a - top).exp_()
    weight_b = (lse_b - top).exp_()
    total = weight_a + weight_b
    out = out_a * (weight_a / total).unsqueeze(-1)
    out.addcmul_(out_b, (weight_b / total).unsqueeze(-1))
    return out, top + total.log()
