# SPDX-License-Identifier: BSD-3-Clause
"""NVSHMEM on one CUDA device: two ranks that take each other for another node exchange rows at random.

NVSHMEM may end the process whose set-up fails, so the ranks are started by a process of its own.
"""

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
import torch.distributed._symmetric_memory as symm_mem

from bench.gpu import mps
from bench.gpu.parts import Emit, Part, Skip
from bench.gpu.process import run_part
from tests.gpu.test_transport_gpu import share_one_device
from tests.lib.device import ON_GPU
from tests.lib.exchanges import exchange_at_random
from tests.lib.processes import run_processes, values
from tests.lib.sets import needs_triton
from torchtitan_cad.runtime.triton.nvshmem_library import find_device_library

pytestmark = [*ON_GPU, needs_triton]

LIMIT_S = 75
"""Linking three kernels with NVSHMEM's library of 31 MB takes a third of it."""
EXCHANGES = 60
VARIABLES = {
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo",
    "NVSHMEM_SYMMETRIC_SIZE": "4G",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NVSHMEM_DEBUG": "WARN",
}


class OwnMemory(NamedTuple):
    """A rendezvous after which no peer's memory can be addressed, as between nodes; keeps the real one."""

    buffer_ptrs: Sequence[int]
    handle: object


def exchange_with_a_far_peer(group) -> tuple[int, str]:
    """Rows that this rank has received, and the memory over which they came."""
    device = share_one_device()
    rank = group.rank()
    rendezvous = symm_mem.rendezvous

    def rendezvous_of_far_peers(tensor, memory_group):
        handle = rendezvous(tensor, memory_group)
        addresses = [
            address if peer == rank else 0
            for peer, address in enumerate(handle.buffer_ptrs)
        ]
        return OwnMemory(addresses, handle)

    symm_mem.rendezvous = rendezvous_of_far_peers
    received = exchange_at_random(
        group, "nvshmem", 2, EXCHANGES, 0.002, "cuda:0", hosts=[0, 1]
    )
    torch.cuda.synchronize(device)
    return received, symm_mem.get_backend(device)


def main(device: str, emit: Emit):
    """Raises unless both ranks have received rows; prints what they have."""
    results = values(run_processes(2, exchange_with_a_far_peer, timeout_s=LIMIT_S - 10))
    print(results)
    for received, backend in results:
        assert received > EXCHANGES
        assert backend == "NVSHMEM"


def test_two_ranks_on_one_device_exchange_rows_as_two_nodes_do(monkeypatch):
    if not symm_mem.is_nvshmem_available():
        pytest.skip("this torch has no NVSHMEM")
    try:
        find_device_library(torch.cuda.get_device_capability())
    except RuntimeError as error:
        pytest.skip(str(error))
    ranks = Part("ranks", "", "tests.gpu.test_nvshmem_gpu:main", LIMIT_S)
    with contextlib.ExitStack() as stack:
        try:
            running = stack.enter_context(mps.service())
        except Skip as reason:
            pytest.skip(
                f"NVSHMEM makes teams of processes of one GPU under the Multi-Process Service only: {reason}"
            )
        for name, value in {**VARIABLES, **running.share(50)}.items():
            monkeypatch.setenv(name, value)
        # of packages that are not installed, too
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        outcome = run_part(ranks, "cuda", LIMIT_S, None)
    assert outcome.status == "done", outcome
