"""Memory that ranks share: how long it is mapped, and what lives until others have read it."""

import time
import weakref

import pytest
import torch
import torch.distributed as dist

from tests.runtime.exchanges import ONE_EACH, RecordingMemory, make_route, start, symmetric
from tests.runtime.processes import run_processes, values
from tests.runtime.threaded import needs_linux
from torchtitan_cad.runtime import streams
from torchtitan_cad.runtime.transport import Peers, SymmetricTransport
from torchtitan_cad.runtime.transport.memory import CpuMemory


def exchange_and_leave(group: dist.ProcessGroup) -> list[int]:
    """Numbers of mappings of this process: with a transport, and once it is gone."""
    transport, rank = symmetric(group), group.rank()
    route = make_route(ONE_EACH, rank, None)
    pending = start(transport, [torch.full((sum(route.send_counts), 4), rank)], route, "only", transport.begin())
    assert (pending.wait()[0].view(torch.int64) == 1 - rank).all()
    pending.release()
    mapped = number_of_mappings()
    del pending, transport
    return [mapped, number_of_mappings()]


@needs_linux
def test_memory_is_allocated_once_and_given_back() -> None:
    """Each rank maps its own and its peer's."""
    assert values(run_processes(2, exchange_and_leave)) == [[2, 0]] * 2


def share(group: dist.ProcessGroup) -> None:
    """Every rank sees what the other writes, and waits no longer than it is told to."""
    memory, peers = CpuMemory.allocate(4096, group), Peers([1 - group.rank()])
    memory.buffers[1 - group.rank()][64:72] = group.rank()
    memory.post(peers, 0, (3, torch.zeros(1)))
    assert memory.wait(Peers([0]), 0, (3, torch.zeros(1)), 60.0) == []
    assert memory.own[64:72].tolist() == [1 - group.rank()] * 8
    begin = time.monotonic()
    assert memory.wait(Peers([0, 1]), 0, (4, torch.zeros(1)), 0.1) == [0, 1]
    assert 0.1 <= time.monotonic() - begin < 30


@needs_linux
def test_words_of_cpu_ranks_order_what_they_write() -> None:
    values(run_processes(2, share))


def number_of_mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("torchtitan_cad" in line and "memfd" in line for line in maps)


def recorded_transport(monkeypatch: pytest.MonkeyPatch, **options: bool) -> tuple[SymmetricTransport, RecordingMemory]:
    memory = RecordingMemory()

    def join(_: torch.device, mark: str | None) -> None:
        memory.steps.extend([(f"join {mark}", [])] if mark else [])

    monkeypatch.setattr(streams, "record_event", lambda _: f"mark {len(memory.steps)}")
    monkeypatch.setattr(streams, "wait_event", join)

    return SymmetricTransport([0, 1], 0, memory.allocate, lambda: 1.0, 512, **options), memory


@pytest.mark.parametrize("replayable", [False, True])
def test_what_is_being_sent_lives_until_the_stream_of_its_memory_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, replayable: bool
) -> None:
    """The sending stream reads parts and tables, whose memory belongs to the stream that releases the exchange."""
    transport, memory = recorded_transport(monkeypatch, replayable=replayable)
    route = make_route(ONE_EACH, 0, torch.zeros(2, dtype=torch.int64))
    part = torch.ones(1, 3)
    read = [weakref.ref(tensor) for tensor in (part, route.rows)]
    pending = start(transport, [part], route, "trial", 0)
    read.append(weakref.ref(route.tables[0]))
    del part, route
    assert [step for step, _ in memory.steps] == ["post", "wait", "send"]
    pending.wait()
    assert all(ref() is not None for ref in read)
    pending.release()
    assert [step for step, _ in memory.steps] == ["post", "wait", "send", "wait", "join mark 3"]
    assert read[0]() is None
    del pending
    assert all(ref() is None for ref in read)


def test_a_captured_call_has_one_exchange_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, _ = recorded_transport(monkeypatch, replayable=True)
    start(transport, [torch.ones(1, 3)], make_route(ONE_EACH, 0, None), "first", 0)
    with pytest.raises(RuntimeError, match="exchange 'second' would use the buffer of exchange 'first'"):
        start(transport, [torch.ones(1, 3)], make_route(ONE_EACH, 0, None, buffer=1), "second", 0)
