# SPDX-License-Identifier: BSD-3-Clause
"""Documents of several workloads, reproducible from their seed, and their layouts."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from torchtitan_cad.planning import AttentionShape, TokenLayout
from torchtitan_cad.tools.simulation.batches import CORPORA, named_lengths

SHAPE = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, dtype_bytes=2)
"""A layer of Llama 3 8B in bf16."""
TOKENS_PER_RANK = 32_768
LONGEST = 262_144
GRID = 128
SEEDS = (11, 12, 13, 14, 15)
WORKLOADS = ("lognormal", "pretrain", "pretrain x4", "one big", "uniform")


def known_workloads(workloads: tuple[str, ...], pretrain: Path | None) -> list[str]:
    """Those that can be drawn: the ones named after ``pretrain`` need that file."""
    return [name for name in workloads if pretrain or not name.startswith("pretrain")]


def document_lengths(
    workload: str, num_ranks: int, seed: int, pretrain: Path | None = None
) -> list[int]:
    """Lengths in tokens that add up to ``num_ranks * TOKENS_PER_RANK``.

    Lengths are drawn one at a time until the tokens are used up, each rounded up to a multiple of GRID and capped at
    LONGEST, the last one trimmed.

    Args:
        pretrain: JSON list of document lengths; the workloads named after it need it.

    Raises:
        ValueError: unknown workload, or one that needs ``pretrain`` without it.
    """
    rng = np.random.default_rng(seed)
    total = num_ranks * TOKENS_PER_RANK
    lengths = []
    if workload == "one big":
        lengths.append(min(LONGEST, total // 2))
    draw = _draw(workload, rng, pretrain)
    left = total - sum(lengths)
    while left > 0:
        length = min(LONGEST, -(-max(1, int(draw())) // GRID) * GRID, left)
        lengths.append(length)
        left -= length
    return lengths


def _draw(
    workload: str, rng: np.random.Generator, pretrain: Path | None
) -> Callable[[], float]:
    match workload:
        case "lognormal":
            return lambda: rng.lognormal(np.log(4096), 1.5)
        case "one big":
            return lambda: rng.integers(128, 4096)
        case "uniform":
            return lambda: rng.integers(128, 65_536)
        case "pretrain" | "pretrain x4":
            if pretrain is None:
                raise ValueError(
                    f"workload {workload!r} needs a file of document lengths: set --pretrain"
                )
            known = np.array(json.loads(pretrain.read_text()), dtype=np.int64)
            factor = 4 if workload == "pretrain x4" else 1
            return lambda: factor * rng.choice(known)
        case _ if workload in CORPORA:
            samples = named_lengths(workload)
            return lambda: rng.choice(samples)
        case _:
            raise ValueError(
                f"workload {workload!r}: choose one of {', '.join((*WORKLOADS, *CORPORA))}"
            )


def workload_layout(
    workload: str, num_ranks: int, seed: int, pretrain: Path | None = None
) -> TokenLayout:
    """A workload's documents laid end to end over the ranks; errors as in ``document_lengths``."""
    return spanning_layout(
        document_lengths(workload, num_ranks, seed, pretrain), num_ranks
    )


def spanning_layout(lengths: list[int], num_ranks: int) -> TokenLayout:
    """Documents laid end to end over ranks of equal size: they span ranks where they must."""
    room = -(-sum(lengths) // num_ranks)
    return TokenLayout.from_segments(contiguous(lengths, [room] * num_ranks))


Ranks = list[list[tuple[int, int, int]]]
"""Per rank, its segments: document, position and length."""


def contiguous(lengths: list[int], capacity: list[int]) -> Ranks:
    """Documents laid end to end over ranks of the given capacity, spanning them where they must."""
    ranks = [[] for _ in capacity]
    rank = 0
    free = capacity[0]
    for doc, length in enumerate(lengths):
        start = 0
        while start < length:
            while free == 0:
                rank += 1
                free = capacity[rank]
            part = min(length - start, free)
            ranks[rank].append((doc, start, part))
            start += part
            free -= part
    return ranks
