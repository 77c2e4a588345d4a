# SPDX-License-Identifier: BSD-3-Clause
"""Checks of what planning is asked for: a ValueError that names the argument, the value and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.text import brief, is_integer

MAX_STAGES = 2**16
"""stages: maximum of a pipeline, far above those in use"""


def complete_config(
    shape: AttentionShape, config: PlannerConfig | None
) -> PlannerConfig:
    """Return the config for the shape's window, by default the planner's own."""
    return (config or PlannerConfig()).for_window(shape.window)


def check_step(
    microbatches: Sequence[Sequence[TokenLayout]],
    kinds: Sequence[AttentionKind],
    stages: int,
    *,
    place: bool,
) -> None:
    """Check a step for ``plan_step``; ``place``: whether tokens may get other homes."""
    if not is_integer(stages, 1, MAX_STAGES):
        raise ValueError(
            f"stages = {brief(stages)}: set a whole number from 1 to {MAX_STAGES}"
        )
    if not kinds:
        raise ValueError(
            "kinds = []: give the model's kinds of attention, at least one"
        )
    nano_batches = sorted({len(nanos) for nanos in microbatches})
    if nano_batches not in ([], [1], [2]):
        raise ValueError(
            f"microbatches of a step need 1 or 2 nano-batches, all as many, got numbers {nano_batches}"
        )
    if not place:
        return
    if not microbatches:
        raise ValueError("microbatches = []: give a step's microbatches, at least one")
    ranks = {layout.num_ranks for layout in chain.from_iterable(microbatches)}
    if len(ranks) != 1:
        raise ValueError(
            f"microbatches of a step need the same ranks, got numbers of ranks {sorted(ranks)}"
        )
    docs, counts = np.unique(
        np.concatenate([layout.docs for layout in holders(microbatches)]),
        return_counts=True,
    )
    if (counts > 1).any():
        raise ValueError(
            f"document {docs[counts > 1][0]} is in two microbatches: give the documents of a step ids of their own"
        )


def holders(microbatches: Sequence[Sequence[TokenLayout]]) -> list[TokenLayout]:
    """Return the layouts that hold each of the step's tokens once: without nano-batches that are keys of the later
    ones."""
    held = (
        nanos if nanos[-1].seg_attends.all() else nanos[-1:] for nanos in microbatches
    )
    return list(chain.from_iterable(held))
