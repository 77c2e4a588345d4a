# SPDX-License-Identifier: BSD-3-Clause
"""The room that calls of core attention share for rows that servers keep."""

import pytest

from torchtitan_cad.planning.keeping import KeepCapacity, kept_calls


def test_calls_share_what_a_job_leaves():
    calls = kept_calls(
        layers=4, microbatches_in_flight=3, nano_batches=2, checkpointing="selective"
    )
    assert calls == 24
    assert KeepCapacity(filled=100.0, used=4.0, calls=calls).bytes_per_call == 4.0
    assert (
        kept_calls(
            layers=4, microbatches_in_flight=3, nano_batches=2, checkpointing="full"
        )
        == 2
    )


@pytest.mark.parametrize("used", [100.0, 130.0])
def test_a_full_device_keeps_nothing(used):
    room = KeepCapacity(filled=100.0, used=used, calls=24)
    assert room.bytes_per_call == 0
    assert room.describe().startswith("rows travel again for backward")


def test_a_stage_without_layers_has_room():
    assert (
        KeepCapacity(
            filled=100.0, used=40.0, calls=kept_calls(0, 2, 1, "none")
        ).bytes_per_call
        == 60.0
    )
