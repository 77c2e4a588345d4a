"""Memory that ranks share: how long it is mapped, how it grows, and what lives until others have read it."""

import contextlib
import time
import weakref
from collections import deque
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from tests.runtime.exchanges import ONE_EACH, make_route, start, symmetric
from tests.runtime.processes import run_processes, values
from tests.runtime.threaded import needs_compiler
from torchtitan_cad.runtime import symm_cpu
from torchtitan_cad.runtime.transport import SLOTS_PER_CALL, Routes, Slots, SymmetricTransport
from torchtitan_cad.runtime.transport.memory import CpuMemory


class Mapped:
    """What this process has mapped of symmetric memory, and of named shared memory."""

    def __init__(self) -> None:
        with open("/proc/self/maps") as maps:
            every = list(maps)
        lines = [line.split() for line in every if "torchtitan_cad" in line and "memfd" in line]
        ranges = [[int(end, 16) for end in line[0].split("-")] for line in lines]
        self.count, self.num_bytes = len(lines), sum(end - begin for begin, end in ranges)
        self.named = sorted(line.split()[-1] for line in every if "/dev/shm/" in line)


def outgrow_buffers(group: dist.ProcessGroup, calls_in_flight: int) -> list[tuple[int, int, int]]:
    """Calls that need ever more, up to ``calls_in_flight`` at a time; releases at each rank's own pace.

    Returns, after every call has begun: bytes mapped, numbers of mappings, and bytes of the slots of a call.
    """
    named, rank, seen = Mapped().named, group.rank(), []
    symm_cpu.load()
    allocate = partial(CpuMemory.allocate, group=group)
    transport = SymmetricTransport(range(group.size()), rank, allocate, lambda: 60.0, slots=Slots(calls_in_flight))
    flying: deque = deque()
    for number, num_bytes in enumerate([10**5, 2 * 10**5, 4 * 10**5, 10**5, 10**5, 10**5, 10**6, 10**5, 10**5]):
        time.sleep(0.02 * (rank == number % 2))
        call = transport.begin(num_bytes, num_bytes // 2)
        mapped = Mapped()
        seen.append((mapped.num_bytes, mapped.count, sum(transport.slot_bytes)))
        for slot in range(SLOTS_PER_CALL):
            route = make_route(ONE_EACH, rank, None, slot=slot)
            part = torch.full((sum(route.send_counts), 4), number + rank)
            flying.append((number, start(transport, [part], route, f"exchange of call {number}", call)))
        while flying and flying[0][0] <= number + 1 - calls_in_flight:
            sent, pending = flying.popleft()
            assert (pending.take()[0].view(torch.int64) == sent + 1 - rank).all()
            del pending
    while flying:
        flying.popleft()[1].take()
    assert Mapped().named == named
    del transport
    assert Mapped().count == 0
    return seen


@needs_compiler
@pytest.mark.parametrize("calls_in_flight", [1, 2])
def test_outgrown_buffers_are_given_back(calls_in_flight: int) -> None:
    """Each rank maps those of both ranks, of the last two sizes at most, and of the last one once calls have passed."""
    for seen in values(run_processes(2, outgrow_buffers, calls_in_flight)):
        slots = [slot_bytes for *_, slot_bytes in seen]
        assert slots[0] < slots[1] < slots[2] == slots[5] < slots[6] == slots[8]
        assert [count for _, count, _ in seen] == ([2] * 9 if calls_in_flight == 1 else [2, 4, 4, 2, 2, 2, 4, 2, 2])
        for last, (num_bytes, count, slot_bytes) in zip([0, *slots], seen, strict=False):
            assert num_bytes <= 2 * calls_in_flight * (slot_bytes + (count > 2) * last) + 2**16


@needs_compiler
def test_growth_keeps_exchanges_in_flight() -> None:
    assert values(run_processes(2, grow_in_flight)) == [True, True]


def grow_in_flight(group: dist.ProcessGroup) -> bool:
    transport, rank = symmetric(group), group.rank()
    pendings = []
    for call, slot, scale in ((0, 0, 1), (0, 1, 100), (1, 0, 10000)):
        route = make_route(ONE_EACH * scale, rank, None, slot=slot)
        parts = [torch.full((sum(route.send_counts), 4), scale + rank)]
        pendings.append(start(transport, parts, route, str(scale), call))
    for scale, pending in zip((1, 100, 10000), pendings, strict=True):
        rows = pending.wait()[0].view(torch.int64)
        assert (rows == scale + 1 - rank).all()
        assert len(rows) == scale * int(ONE_EACH[1 - rank, rank])
        pending.release()
    return True


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

    return SymmetricTransport([0, 1], 0, allocate, lambda: 1.0, **options), memories


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


def test_a_rank_is_ready_once_what_reads_the_rows_of_its_slot_is_done() -> None:
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
        start(transport, [torch.ones(1, 3)], make_route(ONE_EACH, 0, None, slot=1), "second", 0)
