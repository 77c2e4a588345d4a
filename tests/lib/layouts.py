# SPDX-License-Identifier: BSD-3-Clause
"""Layouts to plan in tests: named families, drawn by hypothesis or by seed."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from tests.lib.workloads import Ranks, contiguous
from torchtitan_cad.planning import AttentionShape, PlannerConfig, TokenLayout


@dataclass(frozen=True)
class Case:
    """One layout with the configuration to plan it under; prints what reproduces it."""

    family: Callable[..., Ranks]
    num_ranks: int
    tokens: int
    config: PlannerConfig
    seed: int

    def layout(self) -> TokenLayout:
        rng = np.random.default_rng(self.seed)
        ranks = self.family(rng, self.num_ranks, self.tokens, self.config.min_shard)
        return TokenLayout.from_segments(ranks)

    def small(self, most_ranks: int, most_tokens: int) -> "Case":
        """The case with so few ranks, and tokens on each, that every token can be looked at."""
        shard = min(self.config.min_shard, 16)
        return replace(
            self,
            num_ranks=min(self.num_ranks, most_ranks),
            tokens=1 + self.tokens % most_tokens,
            config=replace(self.config, min_shard=shard, tile=8),
        )


def shape_of(heads: tuple[int, int]) -> AttentionShape:
    """``heads``: of queries and of keys."""
    return AttentionShape(*heads, 128, dtype_bytes=2)


LLAMA = shape_of((32, 8))
shapes = st.sampled_from([(32, 8), (64, 8), (8, 8), (1, 1)]).map(shape_of)


def lengths_summing_to(
    rng: np.random.Generator, total: int, typical: float
) -> list[int]:
    """Lognormal document lengths with the given sum."""
    lengths = []
    while total > 0:
        lengths.append(min(total, max(1, int(rng.lognormal(np.log(typical), 1.3)))))
        total -= lengths[-1]
    return lengths


def scattered(rng: np.random.Generator, lengths: list[int], num_ranks: int) -> Ranks:
    """Pieces of documents on random ranks in random order; ids neither dense nor ordered by rank."""
    ids = rng.choice(10**6, size=len(lengths), replace=False)
    pieces = []
    for doc, length in zip(ids.tolist(), lengths, strict=True):
        cuts = rng.integers(0, length + 1, size=rng.integers(0, 6)).tolist()
        bounds = sorted({0, *cuts, length})
        pieces += [(doc, a, b - a) for a, b in itertools.pairwise(bounds)]
    ranks = [[] for _ in range(num_ranks)]
    for i in rng.permutation(len(pieces)):
        ranks[rng.integers(num_ranks)].append(pieces[i])
    return ranks


def _packed(rng, num_ranks, tokens, min_shard):
    """Every rank its own documents."""
    lengths = []
    for _ in range(num_ranks):
        lengths += lengths_summing_to(rng, tokens, rng.uniform(1, tokens))
    return contiguous(lengths, [tokens] * num_ranks)


def _spanning(rng, num_ranks, tokens, min_shard):
    """One stream of documents, perhaps of short ones, cut into equal, odd, very unequal or mostly empty chunks."""
    draws = rng.random(num_ranks)
    share = (np.ones(num_ranks), 2 * draws, draws**3, draws < 0.3)[rng.integers(4)]
    capacity = (tokens * share).astype(int).tolist()
    typical = rng.choice([min_shard / 4, rng.uniform(1, 2 * tokens)])
    return contiguous(lengths_summing_to(rng, sum(capacity), typical), capacity)


def _shuffled(rng, num_ranks, tokens, min_shard):
    total = tokens * min(num_ranks, 8)
    lengths = lengths_summing_to(rng, total, rng.uniform(1, 2 * tokens))
    return scattered(rng, lengths, num_ranks)


def _giant(rng, num_ranks, tokens, min_shard):
    """One document far longer than all others, on one rank or over many."""
    giant = int(rng.integers(4, 20)) * tokens
    if rng.random() < 0.5:
        ranks = _packed(rng, num_ranks, max(1, tokens // 10), min_shard)
        ranks[rng.integers(num_ranks)].append((10**9, 0, giant))
        return ranks
    capacity = -(-(giant + num_ranks * 7) // num_ranks)
    return contiguous([giant, *([7] * num_ranks)], [capacity] * num_ranks)


def _at_tolerance(rng, num_ranks, tokens, min_shard):
    """All ranks but one equal, and just below, at or above a tolerance of 0, 0.02, 0.1 or 1 over the mean."""
    longest = min(2 * min_shard + 1, 1 + tokens // 20)
    length = int(rng.integers(1, longest + 1))
    count = int(rng.integers(20, 21 + tokens // length))
    excess = rng.choice([0.0, 0.02, 0.1, 1.0])
    exact = int(count * (num_ranks / (1 + excess) - num_ranks + 1))
    fewer = max(0, exact + int(rng.integers(-1, 2)))
    counts = [fewer, *[count] * (num_ranks - 1)]
    return contiguous([length] * sum(counts), [length * count for count in counts])


cases = st.builds(
    Case,
    family=st.sampled_from([_packed, _spanning, _shuffled, _giant, _at_tolerance]),
    num_ranks=st.one_of(st.integers(1, 8), st.integers(1, 64)),
    tokens=st.one_of(st.integers(1, 100), st.integers(100, 2500)),
    config=st.builds(
        PlannerConfig,
        min_shard=st.sampled_from([1, 16, 64, 100, 128, 256]),
        tolerance=st.sampled_from([0.0, 0.02, 0.1, 1.0]),
        tile=st.sampled_from([128, 128, 64, 1]),
    ),
    seed=st.integers(0, 2**32 - 1),
)
