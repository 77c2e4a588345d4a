# SPDX-License-Identifier: BSD-3-Clause
"""The ping-pong loop on a CUDA device, eager and compiled: as the undivided operator, without synchronisation."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.lib.device import no_synchronisation
from tests.lib.plain_blocks import NanoBatchesAndWhole
from torchtitan_cad.planning import AttentionShape

pytestmark = pytest.mark.gpu

SHAPE = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=64, dtype_bytes=2)


def new_job(seed) -> NanoBatchesAndWhole:
    return NanoBatchesAndWhole(
        torch.device("cuda", 0),
        torch.bfloat16,
        dim=512,
        seq_len=1024,
        shape=SHAPE,
        seed=seed,
    )


@pytest.mark.parametrize("backend", [None, "inductor"], ids=["eager", "compiled"])
def test_halves_give_what_the_whole_gives(backend):
    new_job(seed=0).check(backend)


def test_the_loop_does_not_wait_for_the_device():
    job = new_job(seed=1)
    run = job.run_nano_batches(job.blocks)
    gradient = torch.ones_like(job.blocks.xs[0, 0])
    run().backward(gradient)
    with no_synchronisation():
        run().backward(gradient)
