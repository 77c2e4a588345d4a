# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan trains on two ranks of one CUDA device, which exchange rows over symmetric memory, as without CAD.

The reference has patches/ddp_gradient_scale.patch. Where NVIDIA's Multi-Process Service is there, ranks and jobs run at
once; otherwise they take turns on the device.
"""

import contextlib
import dataclasses
import importlib.util

import numpy as np
import pytest

from bench.gpu import sharing
from bench.gpu.parts import Skip
from tests.lib.device import ON_GPU

pytestmark = [
    *ON_GPU,
    pytest.mark.skipif(
        importlib.util.find_spec("torchtitan") is None, reason="no torchtitan"
    ),
]

SIZES = dataclasses.replace(sharing.CUDA, row=16_384, short=256, steps=2, warmup=1)
MODES = {
    "stock": ("--parallelism.no-cad",),
    "all defaults": ("--parallelism.cad",),
    "two nano-batches": (
        "--parallelism.cad",
        "--cad.nano_batches=2",
        "--cad.tolerance=0.02",
    ),
    "loader's homes": (
        "--parallelism.cad",
        "--cad.placement=loader",
        "--cad.tolerance=0.02",
    ),
    "resend": ("--parallelism.cad", "--cad.backward=resend", "--cad.tolerance=0.02"),
}


@pytest.mark.parametrize("sharding", list(sharing.SHARDING))
def test_two_ranks_train_as_without_cad(sharding):
    said: dict[str, object] = {}
    with contextlib.ExitStack() as stack:
        try:
            environments = stack.enter_context(sharing.shares("cuda", 2))
        except Skip:
            environments = [{}, {}]
        runs = sharing.train_modes(
            SIZES, sharding, MODES, environments, said.__setitem__, in_turns=False
        )
    stock = runs.pop("stock")
    transports = said["transports"]
    assert isinstance(transports, dict)
    assert transports["all defaults"].startswith("symm_mem"), transports
    for mode, run in runs.items():
        np.testing.assert_allclose(
            run.loss, stock.loss, rtol=SIZES.most_loss_error, err_msg=mode
        )
        first_norm = run.gradient_norm[0, 0]
        wanted = stock.gradient_norm[0, 0]
        np.testing.assert_allclose(
            first_norm, wanted, rtol=SIZES.most_norm_error, err_msg=mode
        )
        assert run.bytes_per_rank_mean.mean() > 0, f"{mode}: rows must move"
        assert run.imbalance_after.mean() < 1.05, mode
