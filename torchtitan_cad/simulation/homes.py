"""Homes of a microbatch's tokens as placement finds them, and what it takes to bring the tokens there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchtitan_cad.planning import AttentionShape, CostModel, PlannerConfig, TokenLayout, place
from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.placement.halves import place_halves

DEALT_BYTES = 16
"""Of a token's id and label."""


def choose_homes(
    given: Sequence[TokenLayout], shape: AttentionShape, config: PlannerConfig, cost: CostModel
) -> list[TokenLayout]:
    """Layouts of a microbatch, or of its halves, with the homes that training with placement gives them."""
    if not given[-1].seg_attends.all():
        return list(place_halves((given[0], given[1]), shape, config, cost))
    return [place(layout, shape, config, cost) for layout in given]


def dealt_tokens(given: Sequence[TokenLayout], homes: Sequence[TokenLayout], cp: int) -> IntArray:
    """int64 [ranks / cp] tokens that come to every data-parallel rank from others."""
    if not given[-1].seg_attends.all():  # the later half's layout has all tokens
        given, homes = given[-1:], homes[-1:]
    came = np.zeros(given[0].num_ranks // cp, dtype=np.int64)
    for old, new in zip(given, homes, strict=True):
        before, after = (np.repeat(each.run_rank // cp, each.seg_length[each.run_order]) for each in (old, new))
        came += np.bincount(after[before != after], minlength=len(came))
    return came
