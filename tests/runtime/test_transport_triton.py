# SPDX-License-Identifier: BSD-3-Clause
"""The Triton kernels of the one-sided transport: under Triton's interpreter on CPU, and the order of those of nodes.

The interpreter must be chosen before triton is imported, so it runs in processes of its own. There the transport for
CUDA devices runs between real processes, with CPU tensors in shared memory, and without streams.
"""

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.lib.interpreter import interpret, interpreted_transport
from tests.lib.processes import run_processes, values
from tests.lib.refusals import refusal
from tests.lib.rows import CPU
from tests.lib.sets import matrix, needs_triton
from tests.lib.threaded import needs_linux
from torchtitan_cad.runtime.packing import RowFormat
from torchtitan_cad.runtime.transport import Route, Routes

pytestmark = needs_triton
REPOSITORY = Path(__file__).parents[2]


class Launches:
    """A Triton kernel that records the grids it is launched with."""

    def __init__(self, kernel) -> None:
        self._launch, self.grids = kernel.launch, []
        kernel.launch = self

    def __call__(self, grid, *args, **kwargs) -> None:
        self.grids.append(grid)
        self._launch(grid, *args, **kwargs)


FIRST_BYTE = 512
"""at which rows of the first route begin in the peers' memory"""


def put_and_compare(group, programs: int) -> None:
    """Rows of one or two routes, gathered or not, land in one launch at their places in two ranks' memory only."""
    interpret()
    from torchtitan_cad.planning.exchange.messages import aligned
    from torchtitan_cad.runtime.triton import put as module
    from torchtitan_cad.runtime.triton.put import Blocks, put_rows, split_into_blocks

    torch.manual_seed(group.rank())
    launches = Launches(module._put_rows)
    module.PROGRAMS, size = programs, module.BLOCK_ROWS.value
    failed = torch.zeros(1, dtype=torch.int64)
    formats = [
        [(torch.bfloat16, (2, 16))],
        [(torch.bfloat16, (3, 5)), (torch.float16, (300,))],
        [(torch.float16, (300,)), (torch.bfloat16, (3, 5))],
        [
            (torch.float32, (2, 130)),
            (torch.bfloat16, (3,)),
            (torch.float32, (7,)),
            (torch.uint8, (3,)),
        ],
    ]
    placements = [([0, 3], [0, 2]), ([size + 1, 2 * size], [4, 0]), ([0, 0], [0, 0])]
    routes = list(itertools.product(formats, placements, (False, True)))
    alone, pairs = (
        [[route] for route in routes],
        zip(routes[::2], routes[7::3], strict=False),
    )
    for exchange in [*alone, *pairs]:
        expected, begin = torch.full((2, 700_000), 9, dtype=torch.uint8), FIRST_BYTE
        messages, tables, order, begins = [], [], [], []
        for kinds, (counts, offsets), is_gathered in exchange:
            total = sum(counts)
            rows = torch.randint(0, 50, (total,)) if is_gathered else None
            parts = [
                torch.randn(50 if is_gathered else total, *tail).to(dtype)
                for dtype, tail in kinds
            ]
            row_format = RowFormat(parts)
            for peer, (first, count, offset) in enumerate(
                zip([0, counts[0]], counts, offsets, strict=True)
            ):
                arrival = expected[
                    peer, begin : begin + 199 * row_format.row_bytes
                ].view(199, -1)
                for part, view in zip(
                    parts,
                    row_format.unpack(arrival[offset : offset + count]),
                    strict=True,
                ):
                    view.copy_(
                        (part[rows] if is_gathered else part)[first : first + count]
                    )
            messages.append((parts, row_format))
            tables.append(split_into_blocks(counts, offsets))
            order.append(rows)
            begins.append(begin)
            begin = aligned(begin + 199 * row_format.row_bytes)
        memory = torch.full_like(expected, 9)
        addresses = torch.tensor([memory[0].data_ptr(), memory[1].data_ptr()])
        blocks = Blocks.of(tables, order, CPU)
        launched = len(launches.grids)
        put_rows(messages, blocks, begins, addresses, torch.ones(1, dtype=torch.int64))
        assert (memory == 9).all()  # a rank that has failed writes nothing
        put_rows(messages, blocks, begins, addresses, failed)
        assert torch.equal(memory, expected), exchange
        assert len(launches.grids) == launched + 2 * any(
            map(sum, (counts for _, (counts, _), _ in exchange))
        )
    assert max(launches.grids) == (programs, 1, 1)


@matrix
@pytest.mark.parametrize("programs", [1, 3])
def test_rows_are_packed_into_peers_memory_by_few_programs(programs):
    values(run_processes(1, put_and_compare, programs))


def signal_and_wait(group) -> None:
    interpret()
    from torchtitan_cad.runtime.triton import signals

    waits = Launches(signals._wait)
    memory = torch.zeros(2, 8, dtype=torch.int64)
    addresses = torch.tensor([memory[0].data_ptr(), memory[1].data_ptr()])
    failed, record = (
        torch.zeros(1, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
    )
    both = torch.tensor([0, -1, 1], dtype=torch.int32)  # -1: nobody
    signals.post(both, addresses, 3, 17, failed)
    assert memory.tolist() == 2 * [[0, 0, 0, 17, 0, 0, 0, 0]]
    signals.wait(both, memory[1], 3, 0, 0.002, failed, record)
    assert (int(failed), int(record)) == (0, 0)
    # word 2 + 1 is there, word 2 + 0 is not
    signals.wait(both, memory[1], 2, 17, 0.002, failed, record)
    assert int(record) == int(failed) == (17 << signals.PEER_BITS | 2) + 1
    before = record.clone()
    # only the first failure counts
    signals.wait(both, memory[1], 6, 106, 0.002, failed, record)
    signals.post(both, addresses, 3, 25, failed)
    assert torch.equal(record, before)
    assert int(memory[0, 3]) == 17
    assert waits.grids == 3 * [(1, 1, 1)]  # one program awaits all peers


def test_signals_are_posted_awaited_and_given_up():
    values(run_processes(1, signal_and_wait))


def exchange_on_interpreted_devices(group, num_exchanges: int) -> tuple[int, int]:
    """The random exchanges over the memory for devices."""
    interpret()
    from tests.lib import exchanges

    exchanges.build_transport = lambda name, group, device, buffer_bytes, hosts: (
        interpreted_transport(group, buffer_bytes, hosts=hosts)
    )
    torch.manual_seed(0)
    return exchanges.exchange_at_random(
        group, "symm_mem", group.size(), num_exchanges, 0.002
    )


@pytest.mark.matrix
@needs_linux
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_random_exchanges_between_interpreted_devices(num_ranks):
    results = values(
        run_processes(num_ranks, exchange_on_interpreted_devices, 24, timeout_s=240)
    )
    assert sum(results) > 200


def be_late(group) -> str:
    """Rank 1 starts nothing: rank 0 learns at its next exchange who is late, and with what."""
    interpret()
    from tests.lib.exchanges import ONE_EACH, make_route, start
    from torchtitan_cad.runtime.errors import PeerError

    transport = interpreted_transport(group, 2**20, timeout_s=0.1)
    route = make_route(ONE_EACH, group.rank(), None)
    call = transport.begin()
    if group.rank() == 1:
        return ""
    part = torch.zeros(sum(route.send_counts), 4)
    start(transport, [part], route, "forward rows", call).wait()
    try:
        transport.prepare([])
    except PeerError as error:
        return str(error)
    return "not noticed"


@needs_linux
def test_a_wait_that_is_given_up_names_peer_and_phase():
    message = values(run_processes(2, be_late))[0]
    assert (
        "exchange 'forward rows' of rank 40 failed: rank 41 has not begun to receive for 0.1 s"
        in message
    )


FAR = 2
"""The one of three ranks that is on another node."""


@pytest.fixture
def steps(monkeypatch) -> list[tuple[str, list[int]]]:
    """Steps in their order, with the ranks that they concern."""
    from torchtitan_cad.runtime.transport import cuda_memory as device

    done: list[tuple[str, list[int]]] = []

    def put_rows(messages, blocks, begins, addresses, *_) -> None:
        step = "stage" if len(set(addresses.tolist())) == 1 else "put"
        done.append((step, sorted(set(blocks.table[:, 0].tolist()))))

    monkeypatch.setattr(device.put, "put_rows", put_rows)
    monkeypatch.setattr(
        device.signals, "post", lambda peers, *_: done.append(("post", peers.tolist()))
    )
    monkeypatch.setattr(
        device.signals, "wait", lambda peers, *_: done.append(("wait", peers.tolist()))
    )
    nvshmem = SimpleNamespace(
        put_messages=lambda messages, *_: done.append(
            ("message", messages[:, 0].tolist())
        ),
        post=lambda peers, *_: done.append(("post", peers.tolist())),
        confirm=lambda peers, *_: done.append(("confirm", peers.tolist())),
    )
    monkeypatch.setitem(sys.modules, "torchtitan_cad.runtime.triton.nvshmem", nvshmem)
    return done


def test_more_rows_than_the_staging_area_holds_go_in_batches(monkeypatch):
    """Every row is packed once, into the area, and leaves from there for its place at its peer."""
    from torchtitan_cad.runtime.transport import nvshmem as nodes

    monkeypatch.setitem(
        sys.modules, "torchtitan_cad.runtime.triton.nvshmem", SimpleNamespace()
    )
    own = torch.zeros(4096, dtype=torch.uint8)
    memory = nodes.NodesMemory(
        own, [own.data_ptr(), 0, 0, 0], 512, [*range(4)], stream=None
    )
    counts, offsets = [7, 60, 0, 50], [1, 10, 0, 20]
    for most_rows, batches in ((45, 3), (100, 2), (110, 1)):
        route = Route("queries", None, counts, 4 * [0], offsets, most_rows)
        memory.prepare(routes := Routes([route]))
        assert len(routes.tables.batches) == batches
        arrived = {}
        for _, staged, messages in routes.tables.batches:
            area = {}
            for _, source, place, rows in staged.table.tolist():
                for i in range(rows):
                    assert place + i not in area
                    area[place + i] = source + i
            assert sorted(area) == [*range(len(area))]
            assert len(area) <= most_rows
            for peer, first, place, rows in messages.tolist():
                for i in range(rows):
                    assert (peer, place + i) not in arrived
                    arrived[peer, place + i] = area[first + i]
        assert arrived == {
            **{(1, 10 + i): 7 + i for i in range(60)},
            **{(3, 20 + i): 67 + i for i in range(50)},
        }


def test_peers_on_the_node_have_their_rows_before_messages_leave(steps):
    from torchtitan_cad.runtime.transport.nvshmem import NodesMemory

    own = torch.zeros(4096, dtype=torch.uint8)
    addresses = [own.data_ptr(), own.data_ptr() + 1024, 0]
    memory = NodesMemory(own, addresses, 512, [0, 1, 2], stream=None)
    route = Route("queries", None, [0, 3, 2], [0, 1, 1], [0, 0, 0], 3)
    routes = Routes([route])
    memory.prepare(routes)
    prepared = [routes.receivers.tables, routes.senders.tables]
    parts = [torch.zeros(5, 4)]
    memory.send([(parts, RowFormat(parts))], routes, [0], 7, 1)
    assert steps == [
        ("put", [1]),
        ("post", [1]),
        ("stage", [FAR]),
        ("message", [FAR]),
        ("post", [FAR]),
    ]
    steps.clear()
    assert memory.wait(routes.senders, 0, 1, 1.0) == []
    assert steps == [("wait", [1, FAR]), ("confirm", [FAR])]
    assert all(tables is not None for tables in prepared), (
        "tables are made before they are needed"
    )


@pytest.mark.parametrize("begins_elsewhere", [False, True])
def test_memory_of_a_hosts_devices_is_mapped_in_bounded_time(
    monkeypatch, begins_elsewhere
):
    """Ranks 1 and 3 of a group of four share a host, this one being rank 3."""
    from torchtitan_cad.runtime.transport import cuda_memory
    from torchtitan_cad.runtime.transport.memory import NearRanks

    store, own, waits = dist.HashStore(), torch.zeros(64, dtype=torch.uint8), []
    before = store.timeout

    def rendezvous(tensor: torch.Tensor, group: object) -> SimpleNamespace:
        waits.append(store.timeout.total_seconds())
        return SimpleNamespace(
            buffer_ptrs=[4096, tensor.data_ptr() + 8 * begins_elsewhere]
        )

    monkeypatch.setattr(
        dist.distributed_c10d, "_get_process_group_store", lambda group: store
    )
    monkeypatch.setattr(cuda_memory.symm_mem, "rendezvous", rendezvous)
    monkeypatch.setattr(cuda_memory, "sending_stream", lambda device: None)
    group = SimpleNamespace(rank=lambda: 1)
    near = NearRanks(group, group, [1, 3], 4)
    if begins_elsewhere:
        with refusal(error=RuntimeError):
            cuda_memory.DeviceMemory.share(own, near)
    else:
        memory = cuda_memory.DeviceMemory.share(own, near)
        assert memory._addresses.tolist() == [0, 4096, 0, own.data_ptr()]
    assert waits == [cuda_memory._RENDEZVOUS_TIMEOUT_S] != [before.total_seconds()]
    assert store.timeout == before
