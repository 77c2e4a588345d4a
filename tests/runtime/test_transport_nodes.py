"""The order in which memory of several nodes sends and waits, with kernels that only record their arguments."""

import sys
from types import SimpleNamespace

import pytest
import torch

from tests.sets import needs_triton
from torchtitan_cad.runtime.packing import RowFormat
from torchtitan_cad.runtime.transport import Route, Routes

pytestmark = needs_triton

FAR = 2
"""The one of three ranks that is on another node."""


@pytest.fixture
def steps(monkeypatch) -> list[tuple[str, list[int]]]:
    """Steps in their order, with the ranks that they concern."""
    from torchtitan_cad.runtime.transport import cuda_memory as device

    done: list[tuple[str, list[int]]] = []

    def put_rows(parts, places, rows, blocks, addresses, *_) -> None:
        done.append(("stage" if len(set(addresses.tolist())) == 1 else "put", sorted(set(blocks[:, 0].tolist()))))

    monkeypatch.setattr(device.put, "put_rows", put_rows)
    monkeypatch.setattr(device.signals, "post", lambda peers, *_: done.append(("post", peers.tolist())))
    monkeypatch.setattr(device.signals, "wait", lambda peers, *_: done.append(("wait", peers.tolist())))
    nvshmem = SimpleNamespace(
        put_messages=lambda messages, *_: done.append(("message", messages[:, 0].tolist())),
        post=lambda peers, *_: done.append(("post", peers.tolist())),
        confirm=lambda peers, *_: done.append(("confirm", peers.tolist())),
    )
    monkeypatch.setitem(sys.modules, "torchtitan_cad.runtime.triton.nvshmem", nvshmem)
    return done


def test_more_rows_than_the_staging_area_holds_go_in_batches(monkeypatch) -> None:
    """Every row is packed once, into the area, and leaves from there for its place at its peer."""
    from torchtitan_cad.runtime.transport import nvshmem as nodes

    monkeypatch.setitem(sys.modules, "torchtitan_cad.runtime.triton.nvshmem", SimpleNamespace())
    own = torch.zeros(4096, dtype=torch.uint8)
    memory = nodes.NodesMemory(own, [own.data_ptr(), 0, 0, 0], 512, [*range(4)], stream=None, polls_per_second=1.0)
    counts, offsets = [7, 60, 0, 50], [1, 10, 0, 20]
    for most_rows, batches in ((45, 3), (100, 2), (110, 1)):
        route = Route("queries", None, counts, 4 * [0], offsets, most_rows)
        memory.prepare(Routes([route]))
        _, *tables = route.tables
        assert len(tables) == 2 * batches
        arrived = {}
        for staged, messages in zip(tables[::2], tables[1::2], strict=True):
            area = {}
            for _, source, place, rows in staged.tolist():
                for i in range(rows):
                    assert place + i not in area
                    area[place + i] = source + i
            assert sorted(area) == [*range(len(area))]
            assert len(area) <= most_rows
            for peer, first, place, rows in messages.tolist():
                for i in range(rows):
                    assert (peer, place + i) not in arrived
                    arrived[peer, place + i] = area[first + i]
        assert arrived == {**{(1, 10 + i): 7 + i for i in range(60)}, **{(3, 20 + i): 67 + i for i in range(50)}}


def test_peers_on_the_node_have_their_rows_before_messages_leave(steps) -> None:
    from torchtitan_cad.runtime.transport.nvshmem import NodesMemory

    own = torch.zeros(4096, dtype=torch.uint8)
    addresses = [own.data_ptr(), own.data_ptr() + 1024, 0]
    memory = NodesMemory(own, addresses, 512, [0, 1, 2], stream=None, polls_per_second=1.0)
    route = Route("queries", None, [0, 3, 2], [0, 1, 1], [0, 0, 0], 3)
    routes = Routes([route])
    memory.prepare(routes)
    prepared = [routes.receivers.tables, routes.senders.tables]
    parts = [torch.zeros(5, 4)]
    epoch = 1, torch.zeros(1, dtype=torch.int64)
    memory.send([(parts, RowFormat(parts))], routes, [0], 7, epoch)
    assert steps == [("put", [1]), ("post", [1]), ("stage", [FAR]), ("message", [FAR]), ("post", [FAR])]
    steps.clear()
    assert memory.wait(routes.senders, 0, epoch, 1.0) == []
    assert steps == [("wait", [1, FAR]), ("confirm", [FAR])]
    assert all(tables is not None for tables in prepared), "tables are made before they are needed"
