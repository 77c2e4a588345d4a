# SPDX-License-Identifier: BSD-3-Clause
"""Profiles measured on a CUDA device, and what they predict."""

import numpy as np
import pytest
import torch

from tests.lib.device import ON_GPU
from tests.lib.kernels_reference import offsets, random_qkv
from torchtitan_cad.planning import AttentionShape, Profile
from torchtitan_cad.planning.model.tasks import make_tasks
from torchtitan_cad.runtime.kernels.base import Merged, VarlenArgs, row_delta
from torchtitan_cad.runtime.kernels.select import get_kernel
from torchtitan_cad.runtime.timing import median_milliseconds
from torchtitan_cad.tools.profiling import ProfileGrid, measure_profile

pytestmark = ON_GPU

SHAPE = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, dtype_bytes=2)
GRID = ProfileGrid((32, 128, 512, 2048), (128, 512, 2048, 8192, 32768), repeats=5)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return measure_profile(
        get_kernel("auto", "cuda"), SHAPE, torch.bfloat16, torch.device("cuda"), GRID
    )


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_throughput_saturates(profile, direction):
    """A quarter of a tile takes the time of a tile; long tasks reach a good part of the device's throughput."""
    throughput = profile.throughput(direction)
    assert (throughput[0, :-1] < 0.6 * throughput.max(axis=0)[:-1]).all()
    assert throughput.max() > 50e12
    rows = profile.cost_model(direction, SHAPE).row_cost(np.array([1, 4, 16, 64, 256]))
    assert (np.diff(rows) > 0).all()


@pytest.mark.parametrize("lengths", [[512] * 64, [32768], [16384, *[1024] * 16]])
def test_time_of_causal_documents_is_predicted(profile, lengths):
    """Diagonal tasks, which were not measured, to within half their time; a tile count has no time at all."""
    kernel = get_kernel("auto", "cuda")
    cu = offsets(lengths)
    call = VarlenArgs.from_numpy(cu, cu, causal=True, scale=128**-0.5, device="cuda")
    q, k, v, dout = random_qkv(
        cu[-1], cu[-1], (32, 8), 128, torch.bfloat16, device="cuda"
    )
    out, lse = kernel.forward(q, k, v, call)
    delta = row_delta(dout, out)
    measured = {
        "forward": median_milliseconds(
            lambda: kernel.forward(q, k, v, call), q.device, 10
        ),
        "backward": median_milliseconds(
            lambda: kernel.backward(dout, q, k, v, Merged(lse, delta), call),
            q.device,
            10,
        ),
    }
    tasks = make_tasks(np.arange(len(lengths)), 0, lengths, 0, lengths, 0)
    for direction, milliseconds in measured.items():
        predicted = profile.cost_model(direction, SHAPE).cost(tasks).sum() * 1e-9
        assert 0.5 < predicted / milliseconds < 1.5, direction
