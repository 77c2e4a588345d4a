# SPDX-License-Identifier: BSD-3-Clause
"""Layouts to plan in tests: named families, drawn by hypothesis or by seed."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from tests.lib.workloads import Ranks, contiguous
from torchtitan_cad.planning import AttentionShape, PlannerConfig, TokenLayout


@dataclass(frozen=True)
class Case:
    """One layout with the configuration to plan it under; prints what reproduces it."""

    family: str
    num_ranks: int
    tokens: int
    min_shard: int
    tolerance: float
    tile: int
    seed: int

    @property
    def config(self) -> PlannerConfig:
        return PlannerConfig(
            tolerance=self.tolerance, min_shard=self.min_shard, tile=self.tile
        )

    def layout(self) -> TokenLayout:
        rng = np.random.default_rng(self.seed)
        return TokenLayout.from_segments(
            FAMILIES[self.family](rng, self.num_ranks, self.tokens, self.min_shard)
        )

    def small(self, most_ranks: int, most_tokens: int) -> "Case":
        """The case with so few ranks, and tokens on each, that every token can be looked at."""
        return replace(
            self,
            num_ranks=min(self.num_ranks, most_ranks),
            tokens=1 + self.tokens % most_tokens,
            min_shard=min(self.min_shard, 16),
            tile=8,
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
    lengths: list[int] = []
    while total > 0:
        lengths.append(min(total, max(1, int(rng.lognormal(np.log(typical), 1.3)))))
        total -= lengths[-1]
    return lengths


def _packed(rng, num_ranks, tokens, min_shard):
    """Every rank its own documents."""
    ranks: Ranks = []
    doc = 0
    for _ in range(num_ranks):
        lengths = lengths_summing_to(rng, tokens, rng.uniform(1, tokens))
        ranks.append([(doc + i, 0, length) for i, length in enumerate(lengths)])
        doc += len(lengths)
    return ranks


def _spanning(rng, num_ranks, tokens, min_shard):
    """One stream of documents cut into equal chunks."""
    lengths = lengths_summing_to(rng, tokens * num_ranks, rng.uniform(1, 2 * tokens))
    return contiguous(lengths, [tokens] * num_ranks)


def _shuffled(rng, num_ranks, tokens, min_shard):
    """Pieces of documents on random ranks in random order; ids neither dense nor ordered by rank."""
    lengths = lengths_summing_to(
        rng, tokens * min(num_ranks, 8), rng.uniform(1, 2 * tokens)
    )
    ids = rng.choice(10**6, size=len(lengths), replace=False)
    pieces = []
    for doc, length in zip(ids.tolist(), lengths, strict=True):
        cuts = np.unique(rng.integers(0, length + 1, size=rng.integers(0, 6)))
        bounds = [0, *[c for c in cuts.tolist() if 0 < c < length], length]
        pieces += [(doc, a, b - a) for a, b in itertools.pairwise(bounds)]
    ranks: Ranks = [[] for _ in range(num_ranks)]
    for i in rng.permutation(len(pieces)):
        ranks[rng.integers(num_ranks)].append(pieces[i])
    return ranks


def _ragged(rng, num_ranks, tokens, min_shard):
    """Chunks of odd and unequal size."""
    capacity = rng.integers(0, 2 * tokens, size=num_ranks) | 1
    return contiguous(
        lengths_summing_to(rng, int(capacity.sum()), rng.uniform(1, tokens)),
        capacity.tolist(),
    )


def _short(rng, num_ranks, tokens, min_shard):
    """All documents shorter than min_shard, very unequal numbers of them."""
    capacity = (rng.random(num_ranks) ** 3 * min(tokens, 500)).astype(int) + 1
    lengths: list[int] = []
    while sum(lengths) < capacity.sum():
        lengths.append(
            int(min(rng.integers(1, max(2, min_shard)), capacity.sum() - sum(lengths)))
        )
    return contiguous(lengths, capacity.tolist())


def _giant(rng, num_ranks, tokens, min_shard):
    """One document far longer than all others, on one rank or over many."""
    giant = int(rng.integers(4, 20)) * tokens
    if rng.random() < 0.5:
        ranks = _packed(rng, num_ranks, max(1, tokens // 10), min_shard)
        ranks[rng.integers(num_ranks)].append((10**9, 0, giant))
        return ranks
    capacity = -(-(giant + num_ranks * 7) // num_ranks)
    return contiguous([giant, *([7] * num_ranks)], [capacity] * num_ranks)


def _near_balance(rng, num_ranks, tokens, min_shard):
    """The same documents everywhere but for a few tokens."""
    lengths = lengths_summing_to(rng, tokens, tokens / 3)
    return [
        [
            (rank * 1000 + i, 0, length + int(rng.integers(0, 2)))
            for i, length in enumerate(lengths)
        ][:1000]
        for rank in range(num_ranks)
    ]


def _at_tolerance(rng, num_ranks, tokens, min_shard):
    """All ranks but one equal, and just below, at or above a tolerance of 0.02, 0.1 or 1 over the mean."""
    longest = min(2 * min_shard + 1, 1 + tokens // 20)
    length = int(rng.integers(1, longest + 1))
    count = int(rng.integers(20, 21 + tokens // length))
    excess = rng.choice([0.02, 0.1, 1.0])
    fewer = max(
        0,
        int(count * (num_ranks / (1 + excess) - num_ranks + 1))
        + int(rng.integers(-1, 2)),
    )
    docs = itertools.count()
    return [
        [(next(docs), 0, length) for _ in range(fewer if r == 0 else count)]
        for r in range(num_ranks)
    ]


def _empty_ranks(rng, num_ranks, tokens, min_shard):
    """Most ranks without tokens, perhaps all."""
    capacity = np.where(rng.random(num_ranks) < 0.7, 0, tokens)
    lengths = lengths_summing_to(rng, int(capacity.sum()), rng.uniform(1, 2 * tokens))
    return contiguous(lengths, capacity.tolist())


FAMILIES = {
    "packed": _packed,
    "spanning": _spanning,
    "shuffled": _shuffled,
    "ragged": _ragged,
    "short": _short,
    "giant": _giant,
    "near_balance": _near_balance,
    "at_tolerance": _at_tolerance,
    "empty_ranks": _empty_ranks,
}

cases = st.builds(
    Case,
    family=st.sampled_from(list(FAMILIES)),
    num_ranks=st.one_of(st.integers(1, 8), st.integers(1, 64)),
    tokens=st.one_of(st.integers(1, 100), st.integers(100, 2500)),
    min_shard=st.sampled_from([1, 16, 64, 100, 128, 256]),
    tolerance=st.sampled_from([0.0, 0.02, 0.1, 1.0]),
    tile=st.sampled_from([128, 128, 64, 1]),
    seed=st.integers(0, 2**32 - 1),
)
