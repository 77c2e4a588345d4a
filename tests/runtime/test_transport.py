"""Transports between processes: random exchanges with delays, slots that wrap, growth, and peers that fail."""

import contextlib
import itertools
import os
import random
import signal
import time
import weakref
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from tests.runtime.processes import run_processes, values
from tests.runtime.threaded import needs_compiler
from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.planning.exchange.messages import MIN_TRIP_BYTES
from torchtitan_cad.runtime import symm_cpu
from torchtitan_cad.runtime.errors import PeerError
from torchtitan_cad.runtime.packing import RowFormat
from torchtitan_cad.runtime.transport import (
    EXCHANGES_PER_CALL,
    Capacity,
    Route,
    SymmetricTransport,
    Transport,
    build,
    build_transport,
    expected_transport,
)
from torchtitan_cad.runtime.transport.memory import CpuMemory

CPU = torch.device("cpu")
FORMATS: list[list[tuple[tuple[int, ...], torch.dtype]]] = [
    [((2, 4), torch.float32)],
    [((3, 5), torch.bfloat16), ((3,), torch.float32)],
    [((2, 8), torch.float16), ((2, 8), torch.float16)],
    [((4, 4), torch.float64), ((4, 4), torch.float64), ((4,), torch.float64), ((4,), torch.float64)],
]


def random_counts(rng: np.random.Generator, num_ranks: int, most: int) -> np.ndarray:
    """Rows [sender, receiver] of one exchange: none from a rank to itself, many pairs without rows, empty ranks."""
    counts = rng.integers(0, most + 1, (num_ranks, num_ranks)) * (rng.random((num_ranks, num_ranks)) < 0.6)
    np.fill_diagonal(counts, 0)
    if rng.random() < 0.3:
        counts[int(rng.integers(num_ranks))] = 0
    if rng.random() < 0.3:
        counts[:, int(rng.integers(num_ranks))] = 0
    if rng.random() < 0.05:
        counts[:] = 0
    return counts


def make_route(counts: np.ndarray, rank: int, rows: Tensor | None, slot: int = 0) -> Route:
    before = np.cumsum(counts, axis=0) - counts
    most = int(max(counts.sum(axis=0).max(), counts.sum(axis=1).max()))
    return Route("queries", rows, counts[rank].tolist(), counts[:, rank].tolist(), before[rank].tolist(), most, slot)


def make_parts(exchange: int, sender: int, num_rows: int) -> list[Tensor]:
    """What a rank holds in an exchange: known to all, different in every exchange."""
    generator = torch.Generator().manual_seed(1000 * exchange + sender)
    kinds = FORMATS[exchange % len(FORMATS)]
    return [torch.randn(num_rows, *tail, generator=generator).to(dtype) for tail, dtype in kinds]


def chosen_rows(exchange: int, sender: int, num_rows: int) -> Tensor | None:
    """Which rows it sends; in every third exchange all of them in order."""
    if exchange % 3 == 0:
        return None
    generator = torch.Generator().manual_seed(7 * exchange + sender)
    return torch.randint(0, max(1, num_rows), (num_rows,), generator=generator)


def assert_received(rows: list[Tensor], counts: np.ndarray, exchange: int, rank: int) -> None:
    at = 0
    for sender in range(len(counts)):
        first, count = int(counts[sender, :rank].sum()), int(counts[sender, rank])
        total = int(counts[sender].sum())
        chosen = chosen_rows(exchange, sender, total)
        for got, part in zip(rows, make_parts(exchange, sender, total), strict=True):
            want = part if chosen is None else part[chosen]
            message = f"exchange {exchange}: rows of rank {sender} at rank {rank}"
            assert torch.equal(got[at : at + count].cpu(), want[first : first + count]), message
        at += count
    assert at == len(rows[0])


def exchange_at_random(
    group: dist.ProcessGroup, name: str, seed: int, num_exchanges: int, max_delay_s: float, device_type: str = "cpu"
) -> tuple[int, tuple[int, ...]]:
    """Exchanges of two calls in flight; every rank waits, holds and releases at its own random pace.

    Returns the number of rows received, and the bytes of the slots in the end.
    """
    num_ranks, rank = group.size(), group.rank()
    shared, own = np.random.default_rng(seed), random.Random(1000 * seed + rank)
    device = torch.device(device_type)
    transport = build_transport(name, group, device)
    calls: list[tuple[int, deque, Iterator[int]]] = []
    received = 0

    def pause() -> None:
        if own.random() < 0.3:
            time.sleep(own.random() * max_delay_s)

    def finish(flying: deque) -> None:
        exchange, counts, row_format, pending = flying.popleft()
        pause()
        if own.random() < 0.3:
            assert_received(row_format.unpack(pending.take()), counts, exchange, rank)
            return
        rows = row_format.unpack(pending.wait())
        assert_received(rows, counts, exchange, rank)
        pause()
        assert_received(rows, counts, exchange, rank)  # nobody may have overwritten them since
        pending.release()

    for exchange in range(num_exchanges):
        if not calls or shared.random() < 0.3:
            if len(calls) == 2:
                _, flying, _ = calls.pop(0)
                while flying:
                    finish(flying)
            calls.append((transport.begin(0), deque(), itertools.cycle(range(EXCHANGES_PER_CALL))))
        call, flying, slots = calls[int(shared.integers(len(calls)))]
        counts = random_counts(shared, num_ranks, most=3 + 60 * exchange // num_exchanges)
        total = int(counts[rank].sum())
        parts = [part.to(device) for part in make_parts(exchange, rank, total)]
        rows = chosen_rows(exchange, rank, total)
        route = make_route(counts, rank, None if rows is None else rows.to(device), slot=next(slots))
        transport.prepare([route])
        pause()
        pending = transport.start(parts, route, f"exchange {exchange}", call)
        flying.append((exchange, counts, RowFormat(parts), pending))
        received += route.num_received
        in_flight = int(shared.integers(1, EXCHANGES_PER_CALL + 1))
        while len(flying) >= in_flight:
            finish(flying)
    for _, flying, _ in calls:
        while flying:
            finish(flying)
    return received, transport.slot_bytes if isinstance(transport, SymmetricTransport) else (0, 0)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("name", ["collective", pytest.param("symm_mem", marks=needs_compiler)])
def test_random_exchanges_with_random_delays(name: str, num_ranks: int) -> None:
    """Every row arrives unharmed, however ranks differ in pace; buffers grow on all ranks alike."""
    results = values(run_processes(num_ranks, exchange_at_random, name, num_ranks, 100, 0.004))
    assert sum(rows for rows, _ in results) > 1000
    assert len({slot_bytes for _, slot_bytes in results}) == 1


ONE_EACH = np.array([[0, 2], [1, 0]])


def symmetric(group: dist.ProcessGroup, timeout_s: float = 60.0, capacity: Capacity | None = None) -> Transport:
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
    return build_transport("symm_mem", group, CPU, capacity)


def symmetric_of_fixed_size(group: dist.ProcessGroup, capacity: Capacity) -> SymmetricTransport:
    symm_cpu.load()
    allocate = partial(CpuMemory.allocate, group=group)
    return SymmetricTransport(range(group.size()), group.rank(), allocate, lambda: 60.0, capacity, fixed=True)


def ring_of_ranks(num_ranks: int) -> np.ndarray:
    """Every rank sends one row to the next."""
    return np.roll(np.eye(num_ranks, dtype=int), 1, axis=1)


def exchange_until(group: dist.ProcessGroup, last: int, end: str, timeout_s: float) -> None:
    """Exchanges among all, all of one call if it ``hoards``; in exchange 6 rank ``last`` does as ``end`` says."""
    transport, rank = symmetric(group, timeout_s), group.rank()
    routes = [make_route(ring_of_ranks(group.size()), rank, None, slot=slot) for slot in range(EXCHANGES_PER_CALL)]
    call = transport.begin(0)
    for exchange in range(12):
        route = routes[exchange // (1 if end == "hoards" else 2) % EXCHANGES_PER_CALL]
        if exchange == 6 and rank == last:
            match end:
                case "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "silent":
                    time.sleep(5 * timeout_s)
        if end != "hoards":
            call = transport.begin(0)
        pending = transport.start([torch.full((1, 8), float(exchange))], route, f"exchange {exchange}", call)
        assert pending.wait().view(torch.float32)[0, 0] == exchange
        if not (end == "hoards" and rank == last and exchange >= 6):
            pending.release()


@needs_compiler
@pytest.mark.parametrize("end", ["killed", "silent"])
def test_a_peer_that_is_gone_is_named_in_time(end: str) -> None:
    """Rank 0 waits for rows of rank 3; ranks 1 and 2 depend on rank 0 and stop after it."""
    results = run_processes(4, exchange_until, 3, end, 1.0, timeout_s=120)
    if end == "killed":
        assert results[3] == -signal.SIGKILL
    assert isinstance(results[0], PeerError)
    assert "exchange 'exchange 6' of rank 0 failed: rank 3 has not sent its rows for 1.0 s" in str(results[0])
    for rank in (1, 2):
        assert isinstance(results[rank], PeerError)
        assert f"of rank {rank} failed: rank {rank - 1} has not sent its rows" in str(results[rank])


@needs_compiler
def test_a_peer_that_hoards_its_buffer_is_named() -> None:
    """Rank 1 goes on without releasing: it is told at once; rank 0 waits for room in rank 1's buffer."""
    results = run_processes(2, exchange_until, 1, "hoards", 1.0, timeout_s=120)
    assert isinstance(results[1], RuntimeError)
    message = "exchange 'exchange 8' would use the buffer of exchange 'exchange 6', which is in flight"
    assert message in str(results[1])
    assert isinstance(results[0], PeerError)
    message = "exchange 'exchange 8' of rank 0 failed: rank 1 has not freed its receive buffer for 1.0 s"
    assert message in str(results[0])


def misuse(group: dist.ProcessGroup) -> None:
    transport = symmetric(group)
    route = make_route(ONE_EACH, group.rank(), None)
    parts = [torch.zeros(sum(route.send_counts), 8)]
    pending = transport.start(parts, route, "first", 0)
    with pytest.raises(RuntimeError, match="exchange 'first' is started: it cannot be released now"):
        pending.release()
    pending.wait()
    with pytest.raises(RuntimeError, match="exchange 'first' is waited for: it cannot be waited for now"):
        pending.wait()
    pending.release()
    with pytest.raises(RuntimeError, match="exchange 'first' is released"):
        pending.release()


@needs_compiler
def test_an_exchange_is_waited_for_and_released_once() -> None:
    values(run_processes(2, misuse))


def exceed_capacity(group: dist.ProcessGroup) -> tuple[int, ...]:
    transport = symmetric_of_fixed_size(group, Capacity(queries=5, keys=2, slot_bytes=(160, 1000)))
    route = make_route(ONE_EACH, group.rank(), None)
    transport.prepare([route])
    pending = transport.start([torch.zeros(sum(route.send_counts), 8)], route, "fits", 0)
    pending.wait()
    pending.release()
    for kind, counts, message in (
        ("queries", 4 * ONE_EACH, "cad.max_recv_queries = 5: a plan has a rank that receives 8 rows"),
        ("keys", 3 * ONE_EACH, "cad.max_recv_keys = 2: a plan has a rank that receives 6 rows"),
    ):
        large = make_route(counts, group.rank(), None)
        large.kind = kind
        with pytest.raises(ValueError, match=message):
            transport.prepare([large])
    with pytest.raises(ValueError, match="brings some rank 1024 bytes"):
        transport.start([torch.zeros(sum(route.send_counts), 128)], route, "wide", 0)
    with pytest.raises(ValueError, match=r"brings some rank 1025 bytes.* to mean 1024"):
        transport.begin(0, 1025)
    return transport.slot_bytes


@needs_compiler
def test_a_fixed_capacity_is_never_exceeded() -> None:
    assert values(run_processes(2, exceed_capacity)) == 2 * [(512, 1024)]


def start_with_capacity(group: dist.ProcessGroup) -> list[tuple[int, ...]]:
    """Where memory can grow, a capacity says what to begin with."""
    transport = symmetric(group, capacity=Capacity(queries=5, keys=2, slot_bytes=(50000, 300)))
    sizes = [transport.slot_bytes]
    for num_bytes in ((50000, 300), (50200,), (100000, 600)):
        transport.begin(*num_bytes)
        sizes.append(transport.slot_bytes)
    return sizes


@needs_compiler
def test_capacity_is_the_first_size_and_growth_is_geometric() -> None:
    assert values(run_processes(2, start_with_capacity)) == 2 * [
        [(50176, 512), (50176, 512), (62976, 512), (120320, 1024)]
    ]


class Mapped:
    """What this process has mapped of symmetric memory, and what lies in the folder of named shared memory."""

    def __init__(self) -> None:
        with open("/proc/self/maps") as maps:
            lines = [line.split() for line in maps if "torchtitan_cad" in line and "memfd" in line]
        ranges = [[int(end, 16) for end in line[0].split("-")] for line in lines]
        self.count, self.num_bytes = len(lines), sum(end - begin for begin, end in ranges)
        self.named = sorted(os.listdir("/dev/shm"))


def outgrow_buffers(group: dist.ProcessGroup, calls_in_flight: int) -> list[tuple[int, int, int]]:
    """Calls that need ever more, up to ``calls_in_flight`` at a time; releases at each rank's own pace.

    Returns, after every call has begun: bytes mapped, numbers of mappings, and bytes of the slots of a call.
    """
    named, rank, seen = Mapped().named, group.rank(), []
    symm_cpu.load()
    allocate = partial(CpuMemory.allocate, group=group)
    transport = SymmetricTransport(range(group.size()), rank, allocate, lambda: 60.0, calls_in_flight=calls_in_flight)
    flying: deque = deque()
    for number, num_bytes in enumerate([10**5, 2 * 10**5, 4 * 10**5, 10**5, 10**5, 10**5, 10**6, 10**5, 10**5]):
        time.sleep(0.02 * (rank == number % 2))
        call = transport.begin(num_bytes, num_bytes // 2)
        mapped = Mapped()
        seen.append((mapped.num_bytes, mapped.count, sum(transport.slot_bytes)))
        for slot in range(EXCHANGES_PER_CALL):
            route = make_route(ONE_EACH, rank, None, slot=slot)
            part = torch.full((sum(route.send_counts), 4), number + rank)
            flying.append((number, transport.start([part], route, f"exchange of call {number}", call)))
        while flying and flying[0][0] <= number + 1 - calls_in_flight:
            sent, pending = flying.popleft()
            assert (pending.take().view(torch.int64) == sent + 1 - rank).all()
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
        pendings.append(transport.start(parts, route, str(scale), call))
    for scale, pending in zip((1, 100, 10000), pendings, strict=True):
        rows = pending.wait().view(torch.int64)
        assert (rows == scale + 1 - rank).all()
        assert len(rows) == scale * int(ONE_EACH[1 - rank, rank])
        pending.release()
    return True


@pytest.mark.parametrize("name", ["nccl", "symm"])
def test_unknown_transports_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=rf"cad.transport = '{name}': set cad.transport to one of auto, symm_mem"):
        build_transport(name, None, CPU)


@pytest.mark.parametrize("name", ["auto", "collective"])
def test_only_symmetric_memory_can_be_captured(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"cad.transport = '{name}' cannot be captured in CUDA graphs: build 'symm_mem'"
    ):
        build_transport(name, None, CPU, replayable=True)


def choose_where_one_rank_cannot(group: dist.ProcessGroup, error: type[Exception]) -> list[str]:
    """Rank 1 has no compiler, say."""

    def fail() -> None:
        raise error("no compiler")

    if group.rank() == 1:
        build.symm_cpu.load = fail
    lines: list[str] = []
    build._logger.info = lines.append
    assert build_transport("auto", group, CPU).name == "collective"
    with pytest.raises(ValueError, match=r"'symm_mem' does not work here: (\w+: )?no compiler \(rank 1\); set"):
        build_transport("symm_mem", group, CPU)
    # As on a GPU, where auto would take it: all ranks fall back together, and say why.
    device = torch.device("meta")
    assert build_transport("auto", group, device).name == "collective"
    return lines


class CompilerError(Exception):
    """As triton's and cutlass's own, which derive from Exception alone."""


@needs_compiler
@pytest.mark.parametrize("error", [RuntimeError, CompilerError])
def test_all_ranks_choose_the_same_transport_and_say_why(error: type[Exception]) -> None:
    for lines in values(run_processes(2, choose_where_one_rank_cannot, error)):
        assert lines == [
            "cad.transport = 'auto': collective; not symm_mem: for ranks on CPU it serves tests",
            "cad.transport = 'auto': collective; not symm_mem: it needs CUDA devices, these are meta (rank 0)",
        ]


def test_one_process_knows_what_the_group_will_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except for the trial, which takes all ranks."""
    cuda, trial = torch.device("cuda"), "decided at start by a trial on all ranks of the group"
    monkeypatch.setattr(build, "_check", lambda *_, **__: None)
    assert expected_transport("auto", cuda, 1) == expected_transport("symm_mem", CPU, 1) == ("symm_mem", trial)
    assert expected_transport("auto", CPU, 1) == ("collective", "not symm_mem: for ranks on CPU it serves tests")
    assert expected_transport("collective", cuda, 2) == ("collective", "as set")
    monkeypatch.undo()
    monkeypatch.setattr(symm_mem, "is_nvshmem_available", lambda: True)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: name)
    name, reason = expected_transport("auto", cuda, 2)
    assert name == "collective"
    assert "set cad.max_recv_queries and cad.max_recv_keys" in reason
    assert expected_transport("auto", cuda, 2, Capacity(1, 1, (512, 512))) == ("symm_mem", trial)
    name, reason = expected_transport("auto", cuda, 2, Capacity(1, 1, (512, 512)), sole_user=False)
    assert name == "collective"
    assert "parallelism.enable_async_tensor_parallel uses too: set that to false" in reason
    monkeypatch.setattr(symm_mem, "get_backend", lambda _: "NVSHMEM")
    name, reason = expected_transport("auto", cuda, 1)
    assert name == "collective"
    assert "set to the backend NVSHMEM" in reason
    with pytest.raises(
        ValueError, match=r"cad.transport = 'symm_mem' does not work here: ranks on CPU share memory on"
    ):
        expected_transport("symm_mem", CPU, 2)
    with pytest.raises(ValueError, match=r"cad.transport = 'nccl': set cad.transport to one of auto, symm_mem"):
        expected_transport("nccl", CPU, 1)


def test_containers_of_one_name_on_two_hosts_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.socket, "gethostname", lambda: "container")
    here = build._host()
    assert here == build._host()
    monkeypatch.setattr(build.Path, "read_text", lambda _: "the boot of another host")
    assert build._host() != here


def spoil_the_trial(group: dist.ProcessGroup) -> bool:
    """Rank 0's rows do not arrive: a device whose memory others cannot write to."""
    if group.rank() == 0:
        CpuMemory.send = lambda self, *args: self.post(args[2].receivers, *args[4:])
    with pytest.raises(
        ValueError, match=r"does not work here: a trial brought \[0\] instead of \[1000\] \(rank 1\); set"
    ):
        build_transport("symm_mem", group, CPU)
    return True


@needs_compiler
def test_a_trial_finds_out_that_memory_is_not_shared() -> None:
    assert values(run_processes(2, spoil_the_trial)) == [True, True]


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

    def prepare(self, route: Route) -> None:
        route.tables = torch.zeros(1)

    def sending(self) -> contextlib.nullcontext:
        return contextlib.nullcontext()

    def send(self, *_: object) -> None:
        self.order.append("send")

    def post(self, *_: object) -> None:
        self.order.append("post")

    def wait(self, *_: object) -> list[int]:
        self.order.append("wait")
        return []

    def sent(self) -> str:
        return f"mark {len(self.order)}"

    def join(self, sent: str) -> None:
        self.order.append(f"join {sent}")

    def overdue(self) -> None:
        return None

    def view(self, begin: int, num_bytes: int) -> torch.Tensor:
        return self.own[begin : begin + num_bytes]


@pytest.mark.parametrize("replayable", [False, True])
def test_what_is_being_sent_lives_until_the_stream_of_its_memory_waits_for_it(replayable: bool) -> None:
    """The sending stream reads parts and tables, whose memory belongs to the stream that releases the exchange."""
    memories = []

    def allocate(num_bytes: int) -> RecordingMemory:
        memories.append(RecordingMemory(num_bytes))
        return memories[-1]

    transport = SymmetricTransport([0, 1], 0, allocate, lambda: 1.0, replayable=replayable)
    route = make_route(ONE_EACH, 0, torch.zeros(2, dtype=torch.int64))
    part = torch.ones(1, 3)
    read = [weakref.ref(tensor) for tensor in (part, route.rows)]
    pending = transport.start([part], route, "trial", 0)
    read.append(weakref.ref(route.tables))
    del part, route
    assert memories[0].order == (["wait", "send"] if replayable else ["send"])
    pending.wait()
    assert all(ref() is not None for ref in read)
    assert not any(step.startswith("join") for step in memories[0].order)
    marked = 1 + replayable
    pending.release()
    assert memories[0].order[marked:] == ["wait", "post", f"join mark {marked}"]
    assert read[0]() is None
    del pending
    assert all(ref() is None for ref in read)


def test_capacity_in_rows_holds_the_engines_widest_rows() -> None:
    """dO, Q, log-sum-exp and delta; K and V; and what returns in one trip."""
    shape, many = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, dtype_bytes=2), 10**7
    slots = partial(Capacity.of_rows, shape=shape)
    assert slots(many, 0, keep=False).slot_bytes == (many * (2 * 64 + 2 * 16), MIN_TRIP_BYTES)
    assert slots(many, many, keep=True).slot_bytes == (many * (64 + 2 * 16), many * 2 * 32)
    assert slots(1, 1, keep=False).slot_bytes == (MIN_TRIP_BYTES, MIN_TRIP_BYTES)
