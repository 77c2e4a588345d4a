# SPDX-License-Identifier: BSD-3-Clause
"""The Triton kernels of the one-sided transport: under Triton's interpreter on CPU, and the order of those of nodes.

The interpreter must be chosen before triton is imported, so it runs in processes of its own. There the transport for
CUDA devices runs between real processes, with CPU tensors in shared memory, and without streams.
"""

import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.lib.interpreter import interpret, interpreted_transport
from tests.lib.processes import run_processes, values
from tests.lib.refusals import refusal
from tests.lib.rows import CPU
from tests.lib.sets import needs_triton
from tests.lib.threaded import needs_linux
from torchtitan_cad.runtime.packing import RowFormat
from torchtitan_cad.runtime.transport.base import Route, Routes

pytestmark = needs_triton


def exchange_on_interpreted_devices(group, programs) -> int:
    """The random exchanges over the memory for devices, each in one launch of few programs for blocks of few rows."""
    interpret()
    import triton.language as tl

    from tests.lib import exchanges
    from torchtitan_cad.runtime.triton import put

    put.PROGRAMS, put.BLOCK_ROWS = programs, tl.constexpr(16)
    exchanges.build_transport = lambda name, group, device, buffer_bytes, hosts: (
        interpreted_transport(group, buffer_bytes, hosts=hosts)
    )
    torch.manual_seed(0)
    return exchanges.exchange_at_random(group, "symm_mem", group.size(), 24, 0.002)


@pytest.mark.matrix
@needs_linux
@pytest.mark.parametrize(("num_ranks", "programs"), [(2, 1), (3, 3)])
def test_random_exchanges_between_interpreted_devices(num_ranks, programs):
    results = run_processes(
        num_ranks, exchange_on_interpreted_devices, programs, timeout_s=240
    )
    assert sum(values(results)) > 200


def signal_and_wait(group):
    interpret()
    from torchtitan_cad.runtime.triton import put, signals

    memory = torch.zeros(2, 512, dtype=torch.int64)
    addresses = torch.tensor([x.data_ptr() for x in memory])
    failed, record = (torch.zeros(1, dtype=torch.int64) for _ in range(2))
    both = torch.tensor([0, -1, 1], dtype=torch.int32)  # -1: nobody
    signals.post(both, addresses, 3, 17, failed)
    assert memory.nonzero().tolist() == [[0, 3], [1, 3]]
    assert memory[:, 3].tolist() == [17, 17]
    signals.wait(both, memory[1], 3, 0, 0.002, failed, record)
    assert (int(failed), int(record)) == (0, 0)
    # word 2 + 1 is there, word 2 + 0 is not
    signals.wait(both, memory[1], 2, 17, 0.002, failed, record)
    late = (17 << signals.PEER_BITS | 2) + 1
    assert (int(failed), int(record)) == (late, late)
    # a rank that has failed writes nothing, and only its first failure counts
    before = memory.clone()
    signals.wait(both, memory[1], 6, 106, 0.002, failed, record)
    signals.post(both, addresses, 3, 25, failed)
    parts = [torch.ones(2, 4)]
    blocks = put.Blocks.of([put.split_into_blocks([1, 1], [0, 0])], [None], CPU)
    put.put_rows([(parts, RowFormat(parts))], blocks, [512], addresses, failed)
    assert torch.equal(memory, before)
    assert int(record) == late


def test_signals_are_posted_awaited_and_given_up():
    values(run_processes(1, signal_and_wait))


def be_late(group) -> str:
    """Rank 1 starts nothing: rank 0 learns at its next exchange who is late, and with what."""
    interpret()
    from tests.lib.exchanges import late_peer

    return late_peer(group, interpreted_transport(group, 2**20, timeout_s=0.1))


@needs_linux
def test_a_wait_that_is_given_up_names_peer_and_phase():
    message = values(run_processes(2, be_late))[0]
    assert (
        "exchange 'forward rows' of rank 40 failed: rank 41 has not begun to receive for 0.1 s"
        in message
    )


# Memory of devices, on one node and on several ------------------------------------------------------------------------


@pytest.fixture
def steps(monkeypatch) -> list[tuple[str, list[int]]]:
    """Steps in their order, with the ranks that they concern."""
    from torchtitan_cad.runtime.transport import cuda_memory as device

    done: list[tuple[str, list[int]]] = []

    def recorded(step):
        return lambda peers, *_: done.append((step, peers.tolist()))

    def put_rows(messages, blocks, begins, addresses, *_):
        step = "stage" if len(set(addresses.tolist())) == 1 else "put"
        done.append((step, blocks.table[:, 0].tolist()))

    monkeypatch.setattr(device.put, "put_rows", put_rows)
    monkeypatch.setattr(device.signals, "post", recorded("post"))
    monkeypatch.setattr(device.signals, "wait", recorded("wait"))
    nvshmem = SimpleNamespace(
        put_messages=lambda messages, *_: recorded("message")(messages[:, 0]),
        post=recorded("post"),
        confirm=recorded("confirm"),
    )
    monkeypatch.setitem(sys.modules, "torchtitan_cad.runtime.triton.nvshmem", nvshmem)
    return done


def nodes_memory(*near: int, num_ranks):
    """Of rank 0 and of ``near`` ranks on its node."""
    from torchtitan_cad.runtime.transport.nvshmem import NodesMemory

    own = torch.zeros(4096, dtype=torch.uint8)
    addresses = [0] * num_ranks
    for rank in (0, *near):
        addresses[rank] = own.data_ptr() + 512 * rank
    return NodesMemory(own, addresses, 512, [*range(num_ranks)], stream=None)


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize(("most_rows", "batches"), [(45, 3), (100, 2), (110, 1)])
def test_more_rows_than_the_staging_area_holds_go_in_batches(most_rows, batches):
    """Every row leaves once, from the area for its place at its peer."""
    counts = [7, 60, 0, 50]
    offsets = [1, 10, 0, 20]
    routes = Routes([Route("queries", None, counts, 4 * [0], offsets, most_rows)])
    nodes_memory(num_ranks=4).prepare(routes)
    assert len(routes.tables.batches) == batches
    arrived = []
    for _, blocks, messages in routes.tables.batches:
        area = np.full(most_rows, -1)
        for _, source, place, rows in blocks.table.tolist():
            area[place : place + rows] = range(source, source + rows)
        for peer, first, place, rows in messages.tolist():
            arrived += [(peer, place + i, area[first + i]) for i in range(rows)]
    to_1 = [(1, 10 + i, 7 + i) for i in range(60)]
    to_3 = [(3, 20 + i, 67 + i) for i in range(50)]
    assert sorted(arrived) == to_1 + to_3


def test_peers_on_the_node_have_their_rows_before_messages_leave(steps):
    """Rank 2 is on another one. Tables are made before they are needed."""
    memory = nodes_memory(1, num_ranks=3)
    routes = Routes([Route("queries", None, [0, 3, 2], [0, 1, 1], [0, 0, 0], 3)])
    memory.prepare(routes)
    prepared = routes.receivers.tables, routes.senders.tables
    assert None not in prepared
    parts = [torch.zeros(5, 4)]
    memory.send([(parts, RowFormat(parts))], routes, [0], 7, 1)
    assert memory.wait(routes.senders, 0, 1, 1.0) == []
    assert steps == [
        ("put", [1]),
        ("post", [1]),
        ("stage", [2]),
        ("message", [2]),
        ("post", [2]),
        ("wait", [1, 2]),
        ("confirm", [2]),
    ]


@pytest.mark.parametrize("begins_elsewhere", [False, True])
def test_memory_of_a_hosts_devices_is_mapped_in_bounded_time(
    monkeypatch, begins_elsewhere
):
    """Ranks 1 and 3 of a group of four share a host, this one being rank 3."""
    from torchtitan_cad.runtime.transport import cuda_memory
    from torchtitan_cad.runtime.transport.base import NearRanks

    store = dist.HashStore()
    waits = []
    before = store.timeout
    own = torch.zeros(64, dtype=torch.uint8)
    addresses = [4096, own.data_ptr() + 8 * begins_elsewhere]

    def rendezvous(*_):
        waits.append(store.timeout.total_seconds())
        assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
        return SimpleNamespace(buffer_ptrs=addresses)

    c10d = dist.distributed_c10d
    monkeypatch.setattr(c10d, "_get_process_group_store", lambda group: store)
    monkeypatch.setattr(cuda_memory.symm_mem, "rendezvous", rendezvous)
    monkeypatch.setattr(cuda_memory, "sending_stream", lambda device: None)
    monkeypatch.setattr(cuda_memory, "gather", lambda folder, group: {1: folder})
    group = SimpleNamespace(rank=lambda: 1)
    near = NearRanks(group, [1, 3], 4)
    if begins_elsewhere:
        with refusal(error=RuntimeError):
            cuda_memory.DeviceMemory.share(own, near)
    else:
        memory = cuda_memory.DeviceMemory.share(own, near)
        assert memory._addresses.tolist() == [0, 4096, 0, own.data_ptr()]
    assert waits == [cuda_memory._RENDEZVOUS_TIMEOUT_S] != [before.total_seconds()]
    assert store.timeout == before
    assert "TORCH_SYMM_MEM_DISABLE_MULTICAST" not in os.environ
