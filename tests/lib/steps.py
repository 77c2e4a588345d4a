# SPDX-License-Identifier: BSD-3-Clause
"""Optimizer steps to plan: microbatches of rows, and what a layer of them takes."""

import numpy as np

from torchtitan_cad.planning import LayerTimes, Plan, PlannedMicrobatch, TokenLayout
from torchtitan_cad.planning.model.batch import BatchShape, nano_layouts
from torchtitan_cad.planning.pipeline.one_f_one_b import in_stages

TIMES = LayerTimes(
    unit=1e-9,
    linear=1e-10,
    bytes_per_second=1e9,
    between_hosts=1e9,
    exchange=1e-6,
    overlaps=True,
)


def batch_of_rows(
    lengths: list[int], ranks: int, shape: BatchShape, nano_batches: int
) -> tuple[list[list[TokenLayout]], np.ndarray]:
    """Microbatches of documents of these lengths over and over again, cut at rows; and in which column each begins."""
    size = shape.rows * shape.seq_len
    begins = np.cumsum(np.resize(lengths, 10_000))
    row_starts = np.arange(0, size, shape.seq_len)
    starts = []
    for rank in range(ranks):
        of_rank = np.union1d(begins - rank * size, row_starts)
        starts.append(of_rank[(of_rank >= 0) & (of_rank < size)])
    step = [
        nano_layouts(starts, [shape] * ranks, number, cp=1, nano_batches=nano_batches)
        for number in range(shape.microbatches)
    ]
    return step, np.concatenate(starts) % shape.seq_len


def plans_of(step: list[PlannedMicrobatch], kind: int = 0) -> list[Plan]:
    """Plans of all nano-batches, for one kind of attention."""
    return [plan for microbatch in step for plan in microbatch.plans[kind]]


def fingerprints(step: list[PlannedMicrobatch], kind: int = 0) -> list[str]:
    return [plan.fingerprint() for plan in plans_of(step, kind)]


def seconds(
    step: list[PlannedMicrobatch], times: LayerTimes, stages: int, kind: int = 0
) -> float:
    linear = sum(times.linear_seconds(plan.layout) for plan in plans_of(step, kind))
    linear_of_one = linear / len(step)
    attention = [
        times.microbatch_seconds(microbatch.plans[kind]) - linear_of_one
        for microbatch in step
    ]
    return in_stages(np.array(attention), stages, linear_of_one)
