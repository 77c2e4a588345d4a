# SPDX-License-Identifier: BSD-3-Clause
"""The one-sided transport on CUDA, several ranks on one device: exchanges, late peers, and no word with the host."""

import os
import re

import pytest
import torch

from tests.lib.device import ON_GPU, no_synchronisation
from tests.lib.exchanges import ONE_EACH, exchange_at_random, late_peer, make_route
from tests.lib.processes import run_processes, values
from tests.lib.sets import needs_triton
from torchtitan_cad.runtime.transport.base import Routes
from torchtitan_cad.runtime.transport.build import build_transport

pytestmark = [*ON_GPU, needs_triton]


def share_one_device() -> torch.device:
    """Lets the ranks of a group use the same device, which torch otherwise refuses."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def exchange_on_one_device(group, num_exchanges) -> int:
    share_one_device()
    return exchange_at_random(
        group, "symm_mem", group.size(), num_exchanges, 0.002, "cuda:0"
    )


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_random_exchanges_with_random_delays(num_ranks):
    results = values(
        run_processes(num_ranks, exchange_on_one_device, 100, timeout_s=300)
    )
    assert sum(results) > 1000


def exchange_without_the_host(group) -> int:
    """Nothing synchronises in the steady state, and nothing is allocated but for the parts themselves."""
    device = share_one_device()
    transport = build_transport("symm_mem", group, device, 2**26)
    route = make_route(
        50 * ONE_EACH,
        group.rank(),
        torch.arange(50 * (2 - group.rank()), device=device),
    )
    routes = Routes([route])
    transport.prepare([routes])
    part = torch.randn(100, 8, 64, device=device, dtype=torch.bfloat16)

    def exchange():
        pending = transport.start([[part]], routes, "steady state", transport.begin())
        pending.wait()
        pending.release()

    for _ in range(10):
        exchange()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_synchronisation():
        for _ in range(50):
            exchange()
    return torch.cuda.memory_stats()["allocation.all.allocated"] - before


def test_the_steady_state_needs_neither_host_nor_allocator():
    assert values(run_processes(2, exchange_without_the_host, timeout_s=300)) == [0, 0]


def be_late(group) -> str:
    device = share_one_device()
    transport = build_transport("symm_mem", group, device, 2**26)
    transport.timeout_s = lambda: 1.0
    return late_peer(group, transport)


def test_a_late_peer_is_named_at_the_next_plan():
    message = values(run_processes(2, be_late, timeout_s=120))[0]
    what = "(begun to receive|sent its rows)"  # two kernels wait, on a stream each
    assert re.search(
        rf"'forward rows' of rank 0 failed: rank 1 has not {what} for 1\.0 s", message
    )
