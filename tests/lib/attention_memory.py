# SPDX-License-Identifier: BSD-3-Clause
"""Device memory of core attention of Llama 3 8B, by layout and number of ranks, from the formula."""

import dataclasses

import numpy as np

from tests.lib.workloads import (
    GRID,
    SHAPE,
    TOKENS_PER_RANK,
    document_lengths,
    spanning_layout,
)
from torchtitan_cad.planning import Plan, PlannerConfig, TokenLayout
from torchtitan_cad.planning.memory import AttentionMemory, attention_memory
from torchtitan_cad.planning.placement.place import place_and_plan

LAYOUTS = ("whole documents", "lognormal", "one big", "uniform")
"""Documents of at most a rank's tokens; and those of ``tests/lib/workloads.py``, laid end to end over the ranks."""


def make_layout(name: str, num_ranks: int, seed: int, share: int = 1) -> TokenLayout:
    """A layout of a ``share``-th of the tokens of every rank."""
    if name != "whole documents":
        return spanning_layout(
            document_lengths(name, num_ranks // share, seed), num_ranks
        )
    rng = np.random.default_rng(seed)
    segments = []
    doc = 0
    for _ in range(num_ranks):
        left = TOKENS_PER_RANK // share
        of_rank = []
        while left:
            length = min(
                left, -(-max(1, int(rng.lognormal(np.log(4096), 1.5))) // GRID) * GRID
            )
            of_rank.append((doc, 0, length))
            doc = doc + 1
            left = left - length
        segments.append(of_rank)
    return TokenLayout.from_segments(segments)


def plans_of(name: str, num_ranks: int, seed: int, nano_batches: int) -> list[Plan]:
    """A plan of every nano-batch, for homes as training chooses them."""
    layouts = [
        make_layout(name, num_ranks, seed + 100 * nano, nano_batches)
        for nano in range(nano_batches)
    ]
    config = PlannerConfig(tolerance=0.02)
    return [place_and_plan(layout, SHAPE, config)[0] for layout in layouts]


def measure(
    name: str, num_ranks: int, seeds: tuple[int, ...], nano_batches: int
) -> AttentionMemory:
    """The largest figures of all seeds."""
    passes = [
        attention_memory(plans_of(name, num_ranks, seed, nano_batches))
        for seed in seeds
    ]
    return AttentionMemory(
        *(max(sizes) for sizes in zip(*map(dataclasses.astuple, passes), strict=True))
    )
