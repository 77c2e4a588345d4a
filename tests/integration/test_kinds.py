# SPDX-License-Identifier: BSD-3-Clause
"""Layers of several kinds of attention in one job: homes that they share, plans and engines of their own."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.lib.jobs.loaders import CPU, gloo_group
from tests.lib.refusals import refusal
from tests.lib.threaded import run_ranks, thread_transports
from torchtitan_cad.integration.engines import ENGINE, build_engines, engine_name
from torchtitan_cad.integration.loading.batch_planner import BatchPlanner, PlanRules
from torchtitan_cad.integration.loading.placement import Placement
from torchtitan_cad.integration.topology import Topology
from torchtitan_cad.planning import AttentionShape, PlannerConfig
from torchtitan_cad.planning.model.batch import BatchShape
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.runtime.engine import get_engine
from torchtitan_cad.runtime.kernels.select import get_kernel

SHAPE = AttentionShape(2, 1, 8, 8)
KINDS = [
    AttentionKind("full", 1, SHAPE),
    AttentionKind("chunked", 3, SHAPE, 24, scale=0.5),
    AttentionKind("window", 2, replace(SHAPE, window=11)),
]
RANKS, ROWS, SEQ_LEN = 2, 2, 64
"""Ranks, rows of a batch and tokens of a row; a step has two batches."""
SIZE = 2 * ROWS * SEQ_LEN
STARTS = [np.arange(0, SIZE, SEQ_LEN), np.arange(0, SIZE, 16)]
"""Whole rows on the first rank, short documents on the other."""


def attention(
    kind: AttentionKind, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Attention [tokens, heads, size] of all tokens of all ranks, in one dense product."""
    begins = torch.zeros(RANKS * SIZE)
    begins[
        torch.from_numpy(
            np.concatenate([rank * SIZE + each for rank, each in enumerate(STARTS)])
        )
    ] = 1
    doc, at = begins.cumsum(0), torch.arange(RANKS * SIZE)
    mask = (doc[:, None] == doc) & (at[:, None] >= at)
    if kind.block is not None:
        block = at % SEQ_LEN // kind.block
        mask &= block[:, None] == block
    if kind.shape.window is not None:
        mask &= at[:, None] - at < kind.shape.window
    scores = torch.einsum("qhd,kd->hqk", q, k[:, 0]) * kind.score_scale
    return torch.einsum(
        "hqk,kd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v[:, 0]
    )


@pytest.mark.parametrize("placed", [False, True])
def test_every_kind_attends_as_its_mask_says(placed):
    """All tokens have numbers, by which queries, keys and values are found wherever they have been redistributed."""
    store, transports = dist.HashStore(), thread_transports(RANKS)
    rows = [
        torch.randn(RANKS * SIZE, heads, 8, dtype=torch.float64) for heads in (2, 1, 1)
    ]
    rules = PlanRules(PlannerConfig(tolerance=0.0, min_shard=4, tile=4), KINDS)

    def train(rank: int) -> list[Any]:
        group, topology = gloo_group(store, rank, RANKS, 60), Topology(1, RANKS, 1, 1)
        options = {
            "kernel": get_kernel("cpu", CPU),
            "transport": transports[rank],
            "rank": rank,
            "device": CPU,
        }
        engines = build_engines(KINDS, None, **options)
        placement = (
            Placement(group, None, topology, rank, rules.config, KINDS, None)
            if placed
            else None
        )
        planner = BatchPlanner(
            group, [*range(RANKS)], topology, rules, engines, placement=placement
        )
        shape = BatchShape(ROWS, SEQ_LEN, ROWS)
        tokens = torch.arange(rank * SIZE, (rank + 1) * SIZE).view(2, ROWS, SEQ_LEN)
        batches = [({"input": each}, each) for each in tokens]
        planned, parcel = planner.plan(STARTS[rank], shape, 2, to_redistribute=batches)
        assert (parcel is not None) == placed
        if placement is not None and parcel is not None:
            batches = parcel.unpack(placement.exchange(parcel))
        results = []
        for batch, (inputs, _) in zip(planned, batches, strict=True):
            mine = inputs["input"].flatten()
            outs = [
                engine.forward(*(each[mine] for each in rows), int(batch.keys[0]))[0]
                for engine in engines
            ]
            assert engines[0].clock is engines[1].clock
            assert [len(plans) for plans in batch.by_kind] == [len(KINDS)]
            assert batch.layers == (1, 3, 2)
            results.append(
                (
                    mine,
                    outs,
                    any(plan.moves_rows for plans in batch.by_kind for plan in plans),
                )
            )
            planner.drop(batch)
            with refusal(error=RuntimeError):
                engines[1].plan(int(batch.keys[0]))
        return results

    every = [result for results in run_ranks(RANKS, train) for result in results]
    assert placed or all(moved for *_, moved in every)
    assert (
        torch.cat([tokens for tokens, *_ in every])
        .sort()
        .values.equal(torch.arange(RANKS * SIZE))
    )
    for number, kind in enumerate(KINDS):
        wanted = attention(kind, *rows)
        for tokens, outs, _ in every:
            torch.testing.assert_close(outs[number], wanted[tokens])


def test_every_kind_has_an_engine_of_its_name():
    engines = build_engines(
        KINDS, None, kernel=get_kernel("cpu", CPU), transport=None, rank=0, device=CPU
    )
    assert engine_name(KINDS, "full") == ENGINE
    assert [get_engine(engine_name(KINDS, kind.name)) for kind in KINDS] == engines
    assert [engine.scale for engine in engines] == [8**-0.5, 0.5, 8**-0.5]


def test_kinds_cannot_attend_in_ticks():
    ticks: Any = object()
    with refusal("parallelism.pipeline_parallel_schedule"):
        build_engines(KINDS, ticks)
