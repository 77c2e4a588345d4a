"""The Triton kernels that combine partials, on a CUDA device, against torch operations there."""

import numpy as np
import pytest
import torch

from tests.gpu.device import ON_GPU
from tests.runtime.test_combine import compare_orders
from torchtitan_cad.runtime.combine import Combination

pytestmark = ON_GPU


@pytest.mark.parametrize("seed", range(10))
def test_kernels_combine_as_torch_does(seed: int) -> None:
    compare_orders(seed, torch.device("cuda"))


def test_every_run_gives_the_same_bits() -> None:
    device = torch.device("cuda")
    rng = np.random.default_rng(0)
    combination = Combination.build([rng.integers(0, 1000, 5000)], 1000, device)
    assert combination.is_fused
    out, lse = torch.randn(5000, 32, 128, device=device, dtype=torch.bfloat16), torch.randn(5000, 32, device=device)
    results = []
    for _ in range(3):
        results.append((*combination.merge([[out], [lse]], out), *combination.add([[out], [out]], out)))
    for again in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(again, results[0], strict=True))
