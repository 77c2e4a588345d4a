# SPDX-License-Identifier: BSD-3-Clause
"""Redistributing tokens to other homes. That jobs train with their labels and positions is in test_cad.py."""

from contextlib import nullcontext
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.jobs.loaders import groups, on_all
from tests.lib.reference import local_tokens
from tests.lib.refusals import refusal
from torchtitan_cad.integration.loading.placement import (
    Placement,
)
from torchtitan_cad.integration.loading.redistribution import (
    Redistribution,
    check_redistributable,
    make_redistribution,
)
from torchtitan_cad.integration.topology import Topology
from torchtitan_cad.planning import AttentionShape, PlannerConfig, TokenLayout
from torchtitan_cad.planning.model.batch import (
    BatchShape,
    slots_of_nano_batches,
    step_layouts,
)
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.runtime.errors import PlanMismatchError

KINDS = [AttentionKind("full", 1, AttentionShape(4, 2, 16, dtype_bytes=2))]
TWO_RANKS = Topology(1, 2, 1, 1)
TOKENS = torch.zeros(2, 8, dtype=torch.int64)


def tokens_in_order(layouts: list[TokenLayout]) -> list[tuple[int, int]]:
    """(document, position) of every token of a step, by part and rank."""
    ranks = chain.from_iterable(local_tokens(layout) for layout in layouts)
    return list(chain.from_iterable(ranks))


def homes_of(tokens: np.ndarray, layout: TokenLayout, parts: int) -> list[TokenLayout]:
    """Homes in this order, over the parts of a step; as many on every rank of the layout."""
    homes = []
    for part in np.split(tokens, parts):
        ranks = np.repeat(np.arange(layout.num_ranks), len(part) // layout.num_ranks)
        ones = np.ones(len(part), np.int64)
        homes.append(TokenLayout(layout.num_ranks, ranks, *part.T, ones, ones > 0))
    return homes


def exchanged(ways: list[Redistribution], batches: torch.Tensor) -> torch.Tensor:
    """Batches [dp, B, S] of the data-parallel ranks, once each has carried out its redistribution."""
    dp = len(ways)
    group_of = groups(size=dp)

    def exchange(rank):
        group = group_of(rank)
        config = PlannerConfig()
        placement = Placement(group, None, Topology(1, dp, 1, 1), rank, config, KINDS)
        batch = {"input": batches[rank]}, batches[rank]
        ((_, labels),) = placement.exchange(ways[rank], [batch])
        return labels

    return torch.stack(on_all(range(dp), exchange))


few = st.integers(1, 3)


@given(few, few, few, few, st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_every_token_comes_to_its_home(dp, cp, microbatches, rows, columns, seed):
    """Homes are anywhere in the step."""
    rng = np.random.default_rng(seed)
    shape = BatchShape(rows * microbatches, cp * columns, rows)
    size = shape.rows * shape.seq_len
    begins_of_rows = np.arange(0, size, shape.seq_len)
    starts = [
        np.union1d(begins_of_rows, rng.integers(0, size, size=size // 3))
        for _ in range(dp)
    ]
    loaded = [*chain(*step_layouts(starts, [shape] * dp, cp, nano_batches=1))]
    order = rng.permutation(dp * size)
    tokens = np.array(tokens_in_order(loaded))
    homes = homes_of(tokens[order], loaded[0], microbatches)
    slots = [
        slots_of_nano_batches(shape, i, cp, nano_batches=1)[0]
        for i in range(microbatches)
    ]
    ways = [make_redistribution(loaded, homes, slots, rank) for rank in range(dp)]
    batches = torch.arange(dp * size).view(dp, shape.rows, -1)
    redistributed = exchanged(ways, batches)

    def by_part_and_rank(batches):
        cut = batches.view(dp, microbatches, rows, cp, columns)
        return cut.permute(1, 0, 3, 2, 4).flatten().numpy()

    expected = by_part_and_rank(batches)[order]
    assert np.array_equal(by_part_and_rank(redistributed), expected)


@pytest.mark.parametrize("length", [4, 8, None])
def test_replicas_with_other_homes_are_an_error_on_all(length):
    """Documents of this length on the second replica, of 4 tokens on the first; None: it redistributes nothing."""
    shape = BatchShape(1, 64, 1)
    group_of = groups(size=2)
    config = PlannerConfig(min_shard=1, tile=1)

    def redistribute(rank):
        replicas = group_of(rank)
        placement = Placement(replicas, replicas, TWO_RANKS, rank, config, KINDS)
        starts = np.arange(0, 64, (4, length or 4)[rank])
        loaded = step_layouts([np.array([0]), starts], [shape] * 2, 1, nano_batches=1)
        placed = None
        if rank == 0 or length is not None:
            placed = placement.choose(loaded, np.zeros(32, np.int64))
        expected = nullcontext() if length == 4 else refusal(error=PlanMismatchError)
        with expected:
            placement.redistribution(loaded, placed, shape)

    on_all(range(2), redistribute)


def test_speeds_and_nodes_of_a_whole_pipeline_say_nothing_of_a_stage():
    config = PlannerConfig(ranks_per_node=4)
    for dp, expected in ((6, PlannerConfig()), (4, config)):
        topology = Topology(pp=2, dp=dp, cp=1, tp=1, across_stages=True)
        placement = Placement(None, None, topology, 0, config, KINDS)
        assert placement.config == expected


@pytest.mark.parametrize(
    ("more", "labels"),
    [
        ({"positions": TOKENS.float()}, TOKENS),
        ({"pixels": TOKENS}, TOKENS),
        ({}, TOKENS[:, :4]),
        ({}, TOKENS.float()),
    ],
    ids=["positions", "pixels", "shape of labels", "type of labels"],
)
def test_batches_that_cannot_be_redistributed_are_refused(more, labels):
    with refusal("cad.placement", remedy="cad.placement"):
        check_redistributable({"input": TOKENS, **more}, labels)
