# SPDX-License-Identifier: BSD-3-Clause
"""The room that calls of core attention share for rows that servers keep."""

from tests.lib.workloads import SHAPE, TOKENS_PER_RANK
from torchtitan_cad.planning.keeping import (
    KeepCapacity,
    kept_calls,
    most_working_bytes,
    stock_bytes,
)


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
    """Eight ranks that share rows of 256K tokens need more than three times stock of a rank's own tokens."""
    own = most_working_bytes(SHAPE, TOKENS_PER_RANK, TOKENS_PER_RANK, documents=1)
    assert own == 3 * stock_bytes(SHAPE, TOKENS_PER_RANK, TOKENS_PER_RANK, documents=1)
    shared = most_working_bytes(
        SHAPE, TOKENS_PER_RANK, 8 * TOKENS_PER_RANK, documents=1
    )
    assert 2.5 * own < shared < 3 * own
