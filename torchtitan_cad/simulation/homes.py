"""What it takes to bring a microbatch's tokens to the homes that placement finds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchtitan_cad.planning import TokenLayout
from torchtitan_cad.planning.intervals import IntArray

DEALT_BYTES = 16
"""Of a token's id and label."""


def dealt_tokens(given: Sequence[TokenLayout], homes: Sequence[TokenLayout], cp: int) -> IntArray:
    """int64 [ranks / cp] tokens that come to every data-parallel rank from others."""
    if not given[-1].seg_attends.all():  # the later half's layout has all tokens
        given, homes = given[-1:], homes[-1:]
    came = np.zeros(given[0].num_ranks // cp, dtype=np.int64)
    for old, new in zip(given, homes, strict=True):
        before, after = (np.repeat(each.run_rank // cp, each.seg_length[each.run_order]) for each in (old, new))
        came += np.bincount(after[before != after], minlength=len(came))
    return came
