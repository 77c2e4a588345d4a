# SPDX-License-Identifier: BSD-3-Clause
"""The room that calls of core attention share for rows that servers keep."""

import numpy as np

from tests.lib.workloads import SHAPE, TOKENS_PER_RANK, spanning_layout
from torchtitan_cad.planning import PlannerConfig
from torchtitan_cad.planning.keeping import (
    KeepCapacity,
    kept_calls,
    most_working_bytes,
)
from torchtitan_cad.planning.memory import attention_memory
from torchtitan_cad.planning.placement.place import place_and_plan


def test_calls_share_what_a_job_leaves():
    calls = kept_calls(
        layers=4, microbatches_in_flight=3, nano_batches=2, checkpointing="selective"
    )
    assert calls == 24
    assert KeepCapacity(filled=100.0, used=4.0, calls=calls).bytes_per_call == 4.0
    full = kept_calls(4, 3, nano_batches=2, checkpointing="full")
    assert full == 2
    no_layers = KeepCapacity(filled=100.0, used=40.0, calls=0)
    assert no_layers.bytes_per_call == 60.0


def test_a_full_device_keeps_nothing():
    for used in (100.0, 130.0):
        room = KeepCapacity(filled=100.0, used=used, calls=24)
        assert room.bytes_per_call == 0
        assert room.describe().startswith("rows travel again for backward")


def test_room_is_left_for_attention_over_rows_that_ranks_share():
    """Eight rows of 256K tokens on eight ranks each. Three times stock of a rank's own tokens would not do."""
    num_rows = 8
    cp = 8
    row_tokens = cp * TOKENS_PER_RANK
    rng = np.random.default_rng(8)
    lengths: list[int] = []
    for _ in range(num_rows):
        left = row_tokens
        while left:
            drawn = int(rng.lognormal(np.log(16384), 2.0))
            length = min(left, max(512, drawn // 512 * 512))
            lengths.append(length)
            left -= length
    layout = spanning_layout(lengths, num_rows * cp)
    plan, _ = place_and_plan(layout, SHAPE, PlannerConfig(tolerance=0.02))
    memory = attention_memory([plan])
    most = most_working_bytes(
        SHAPE, TOKENS_PER_RANK, row_tokens, len(lengths) // (num_rows * cp)
    )
    assert max(memory.forward, memory.backward) <= most
