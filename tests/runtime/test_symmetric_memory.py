"""Memory that ranks share: how long it is mapped, and what lives until others have read it."""

import contextlib
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from tests.runtime.exchanges import ONE_EACH, make_route, start, symmetric
from tests.runtime.processes import run_processes, values
from tests.runtime.threaded import needs_compiler
from torchtitan_cad.runtime import symm_cpu
from torchtitan_cad.runtime.transport import Routes, SymmetricTransport


def exchange_and_leave(group: dist.ProcessGroup) -> list[int]:
    """Numbers of mappings of this process: with a transport, and once it is gone."""
    transport, rank = symmetric(group), group.rank()
    route = make_route(ONE_EACH, rank, None)
    pending = start(transport, [torch.full((sum(route.send_counts), 4), rank)], route, "only", transport.begin())
    assert (pending.take()[0].view(torch.int64) == 1 - rank).all()
    mapped = number_of_mappings()
    del pending, transport
    return [mapped, number_of_mappings()]


@needs_compiler
def test_memory_is_allocated_once_and_given_back() -> None:
    """Each rank maps its own and its peer's."""
    assert values(run_processes(2, exchange_and_leave)) == [[2, 0]] * 2


def use_torchs_interface(group: dist.ProcessGroup) -> list[list[int]]:
    """The allocator for CPU tensors behind torch.distributed._symmetric_memory, as others than us would use it."""
    symm_cpu.load()
    rank, peer = group.rank(), 1 - group.rank()
    mine = symm_mem.empty((4, 3), dtype=torch.int32, device="cpu").fill_(rank)
    handle = symm_mem.rendezvous(mine, group)
    assert (handle.rank, handle.world_size, handle.buffer_size) == (rank, 2, 48)
    handle.barrier(timeout_ms=10000)
    theirs = handle.get_buffer(peer, (4, 3), torch.int32)
    assert (theirs == peer).all()
    if rank == 0:
        theirs[1] = 7
        handle.put_signal(1, channel=1, timeout_ms=10000)
    else:
        handle.wait_signal(0, channel=1, timeout_ms=10000)
        assert mine[1].tolist() == [7, 7, 7]
    with pytest.raises(RuntimeError, match="wait_signal timed out after 50 ms"):
        handle.wait_signal(peer, channel=2, timeout_ms=50)
    handle.barrier(timeout_ms=10000)
    mapped = [[number_of_mappings()]]
    del theirs
    handle = mine = None
    mapped.append([number_of_mappings()])
    return mapped


def number_of_mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("torchtitan_cad" in line and "memfd" in line for line in maps)


@needs_compiler
def test_shared_memory_of_cpu_ranks_is_unmapped_with_its_last_user() -> None:
    for mapped in values(run_processes(2, use_torchs_interface)):
        assert mapped == [[2], [0]]


class RecordingMemory:
    """Symmetric memory of one rank that records the order of what is done with it."""

    def __init__(self, num_bytes: int) -> None:
        self.own, self.order = torch.zeros(num_bytes, dtype=torch.uint8), []

    def prepare(self, routes: Routes) -> None:
        for route in routes:
            route.make_tables(lambda: torch.zeros(1))

    def sending(self) -> contextlib.nullcontext:
        return contextlib.nullcontext()

    def send(self, *_: object) -> None:
        self.order.append("send")

    def post(self, *_: object) -> None:
        self.order.append("post")

    def wait(self, *_: object) -> list[int]:
        self.order.append("wait")
        return []

    def mark(self) -> str:
        return f"mark {len(self.order)}"

    def join(self, mark: str) -> None:
        self.order.append(f"join {mark}")

    def overdue(self) -> None:
        return None

    def view(self, begin: int, num_bytes: int) -> torch.Tensor:
        return self.own[begin : begin + num_bytes]


def recorded_transport(**options: bool) -> tuple[SymmetricTransport, list[RecordingMemory]]:
    memories = []

    def allocate(num_bytes: int) -> RecordingMemory:
        memories.append(RecordingMemory(num_bytes))
        return memories[-1]

    return SymmetricTransport([0, 1], 0, allocate, lambda: 1.0, 512, **options), memories


@pytest.mark.parametrize("replayable", [False, True])
def test_what_is_being_sent_lives_until_the_stream_of_its_memory_waits_for_it(replayable: bool) -> None:
    """The sending stream reads parts and tables, whose memory belongs to the stream that releases the exchange."""
    transport, memories = recorded_transport(replayable=replayable)
    route = make_route(ONE_EACH, 0, torch.zeros(2, dtype=torch.int64))
    part = torch.ones(1, 3)
    read = [weakref.ref(tensor) for tensor in (part, route.rows)]
    pending = start(transport, [part], route, "trial", 0)
    read.append(weakref.ref(route.tables))
    del part, route
    assert memories[0].order == ["post", "wait", "send"]
    pending.wait()
    assert all(ref() is not None for ref in read)
    pending.release()
    assert memories[0].order == ["post", "wait", "send", "wait", "join mark 3"]
    assert read[0]() is None
    del pending
    assert all(ref() is None for ref in read)


def test_a_rank_is_ready_once_what_reads_the_rows_of_its_buffer_is_done() -> None:
    """Also on another stream than theirs. In a CUDA graph, which cannot wait for what is outside, there is but one."""
    for replayable in (False, True):
        transport, memories = recorded_transport(replayable=replayable)
        for number in range(2):
            pending = start(transport, [torch.ones(1, 3)], make_route(ONE_EACH, 0, None), "trial", number * 2)
            if number == 0:
                pending.wait()
                memories[0].order.append("read")
                pending.release()
        before_ready = memories[0].order[: len(memories[0].order) - 3]
        assert before_ready[4:6] == ["read", "join mark 3"]
        assert before_ready[6:] == ([] if replayable else ["join mark 5"])
        assert memories[0].order[-3:] == ["post", "wait", "send"]


def test_a_captured_call_has_one_exchange_in_flight() -> None:
    transport, _ = recorded_transport(replayable=True)
    start(transport, [torch.ones(1, 3)], make_route(ONE_EACH, 0, None), "first", 0)
    with pytest.raises(RuntimeError, match="exchange 'second' would use the buffer of exchange 'first'"):
        start(transport, [torch.ones(1, 3)], make_route(ONE_EACH, 0, None, buffer=1), "second", 0)
