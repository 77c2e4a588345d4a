# SPDX-License-Identifier: BSD-3-Clause
"""An exchange as the transport launches it, alone and beside the work that is to hide it: this process is both ends.

The chain on the sending stream is that of a job: wait until the receiver is ready, put the rows of queries and keys,
post the arrival. The receiver waits on a stream of its own, so that the time to the arrival does not count the
other work. Rows are read from and written to the same device's memory: what is shown is how the chain gets on beside
kernels that fill the device, not the rate of NVLink. On the CPU Triton's interpreter runs the chain before the work.
"""

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.gpu.loopback import TIMEOUT_S
from bench.gpu.parts import Emit
from bench.gpu.putting import Putting, programs
from tests.lib.workloads import SHAPE
from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.planning.exchange.messages import BUFFERS_PER_CALL, aligned
from torchtitan_cad.runtime.kernels.base import VarlenArgs
from torchtitan_cad.runtime.kernels.select import get_kernel
from torchtitan_cad.runtime.packing import Message
from torchtitan_cad.runtime.transport.base import Route, Routes
from torchtitan_cad.runtime.transport.cuda_memory import DeviceMemory, sending_stream
from torchtitan_cad.runtime.transport.symmetric import SymmetricTransport
from torchtitan_cad.runtime.triton import put

GATE_CYCLES = 20_000_000
"""The device sleeps while the host launches, so that both sides begin together."""
LEAST_SHARE = 0.05
"""Share of the work's time from which a put is long enough that it can be said how much of it is hidden."""


class Sizes(NamedTuple):
    """Sizes of a run.

    Attributes:
        rows: rows of queries of each exchange, which has as many bytes of keys.
        gemm, gemms: dim and number of matrix products.
        document, calls: tokens of the document, and number of the attention calls.
        histogram_rows: rows of the put whose programs are located.
    """

    shape: AttentionShape
    dtype: torch.dtype
    rows: tuple[int, ...]
    gemm: int
    gemms: int
    document: int
    calls: int
    repeats: int
    histogram_rows: int


CUDA = Sizes(
    SHAPE, torch.bfloat16, (16_384, 2_441, 61_035), 8192, 8, 16_384, 2, 3, 16_384
)
"""Puts of 134, 20 and 500 MB."""
CPU = Sizes(AttentionShape(2, 1, 8, 4), torch.float32, (40,), 64, 2, 64, 2, 1, 40)


class Variant(NamedTuple):
    """A way to send.

    Attributes:
        programs, warps: of the put kernel. None without it: ``copy_`` then sends contiguous rows, on the engine that
            the driver chooses.
    """

    name: str
    programs: int | None
    warps: int | None


VARIANTS = (
    Variant("put", 24, 16),
    Variant("put", 40, 16),
    Variant("put", 24, 32),
    Variant("put", 40, 32),
    Variant("copy_", None, None),
)


class Times(NamedTuple):
    """Milliseconds from the common beginning to the end of the work and to the arrival of the rows."""

    work: float
    arrival: float


class CopyingMemory(DeviceMemory):
    """Sends contiguous rows to this process by ``copy_`` instead of the put kernel."""

    def send(
        self,
        messages: Sequence[Message],
        routes: Routes,
        begins: Sequence[int],
        word: int,
        number: int,
    ) -> None:
        for (tensors, row_format), begin in zip(messages, begins, strict=True):
            num_rows = len(tensors[0])
            target = self.own[begin : begin + num_rows * row_format.row_bytes].view(
                num_rows, row_format.row_bytes
            )
            for tensor, view in zip(tensors, row_format.unpack(target), strict=True):
                view.copy_(tensor)
        self.post(routes.receivers, word, number)


class Chain:
    """An exchange of rows that this process sends to itself.

    Args:
        num_rows: rows of queries; there are as many bytes of keys.
    """

    def __init__(
        self, variant: Variant, num_rows: int, sizes: Sizes, device: torch.device
    ) -> None:
        shape = sizes.shape
        self._device = device
        self._variant = variant
        heads = (shape.num_heads, shape.head_dim)
        counts = [num_rows, num_rows]
        self._messages = [
            [torch.randn(count, *heads, device=device).to(sizes.dtype)]
            for count in counts
        ]
        self.num_bytes = sum(rows.nbytes for (rows,) in self._messages)
        buffer_bytes = aligned(self.num_bytes // BUFFERS_PER_CALL + 4096)
        self._transport = SymmetricTransport(
            [0], 0, self._allocate, lambda: TIMEOUT_S, buffer_bytes
        )
        order = [
            None if variant.programs is None else torch.randperm(count).to(device)
            for count in counts
        ]
        self._routes = Routes(
            Route(kind, rows, [count], [count], [0], count)
            for kind, rows, count in zip(
                ("queries", "keys"), order, counts, strict=False
            )
        )
        self._transport.prepare([self._routes])

    def _allocate(self, num_bytes: int) -> DeviceMemory:
        own = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        stream = sending_stream(self._device) if own.is_cuda else None
        memory = DeviceMemory if self._variant.programs else CopyingMemory
        return memory(own, [own.data_ptr()], stream)

    def start(self) -> Callable[[], list[Tensor]]:
        """Launch the sender's side; the returned function launches the receiver's wait, and ends the exchange."""
        pending = self._transport.start(
            self._messages, self._routes, "rows", self._transport.begin()
        )

        def receive() -> list[Tensor]:
            received = pending.wait()
            pending.release()
            return received

        return receive

    def check(self) -> None:
        """Raises RuntimeError unless the rows arrive as they were sent."""
        received = self.start()()
        for route, (rows,), arrived in zip(
            self._routes, self._messages, received, strict=True
        ):
            sent = rows if route.rows is None else rows[route.rows]
            if not torch.equal(arrived, sent.view(len(sent), -1).view(torch.uint8)):
                raise RuntimeError(
                    f"{self._variant}: rows of {route.kind} did not arrive as they were sent"
                )
        self._transport.prepare([])  # raises PeerError if a wait took too long


@contextlib.contextmanager
def configured(variant: Variant) -> Iterator[None]:
    """The put kernel launched with the programs and the warps of ``variant`` in this context."""
    warps = put.WARPS
    put.WARPS = variant.warps or warps
    try:
        with programs(variant.programs or put.PROGRAMS):
            yield
    finally:
        put.WARPS = warps


# Work beside it -------------------------------------------------------------------------------------------------------

Works = dict[str, Callable[[], object]]
"""What runs on the computing stream, by name."""


def make_works(sizes: Sizes, device: torch.device) -> Works:
    """Nothing, matrix products, and attention by FlashAttention-2."""
    a, b, c = (
        torch.randn(sizes.gemm, sizes.gemm, device=device, dtype=sizes.dtype)
        for _ in "abc"
    )
    kernel = get_kernel(
        "varlen" if device.type == "cuda" else "cpu", device, sizes.shape
    )
    shape = sizes.shape
    tokens = sizes.document
    call = VarlenArgs.from_numpy(
        [0, tokens], [0, tokens], causal=True, scale=shape.head_dim**-0.5, device=device
    )
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    q, k, v = (
        torch.randn(tokens, count, shape.head_dim, device=device, dtype=sizes.dtype)
        for count in heads
    )

    def multiply() -> None:
        for _ in range(sizes.gemms):
            torch.mm(a, b, out=c)

    def attend() -> None:
        for _ in range(sizes.calls):
            kernel.forward(q, k, v, call)

    return {"nothing": lambda: None, "gemm": multiply, "attention": attend}


class Bench:
    """Runs the sender's chain, the receiver's wait and other work at the same time."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self._device = device
        self._repeats = sizes.repeats
        self._receiving = torch.cuda.Stream(device) if device.type == "cuda" else None

    def median(self, work: Callable[[], object], chain: Chain | None) -> Times:
        times = [self._run(work, chain) for _ in range(self._repeats)]
        return Times(*map(statistics.median, zip(*times, strict=True)))

    def _run(self, work: Callable[[], object], chain: Chain | None) -> Times:
        if self._receiving is None:
            begin = time.perf_counter()
            if chain is not None:
                chain.start()()
            arrival = time.perf_counter()
            work()
            return Times(1e3 * (time.perf_counter() - begin), 1e3 * (arrival - begin))
        begin, end, arrived = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        computing = torch.cuda.current_stream(self._device)
        torch.cuda._sleep(GATE_CYCLES)
        begin.record()
        receive = None if chain is None else chain.start()
        self._receiving.wait_event(begin)
        with torch.cuda.stream(self._receiving):
            if receive is not None:
                receive()
            arrived.record()
        work()
        end.record()
        computing.wait_event(arrived)
        torch.cuda.synchronize()
        return Times(begin.elapsed_time(end), begin.elapsed_time(arrived))


def measure(device: str, emit: Emit) -> None:
    """A row for every variant, size and work beside it; and on how many multiprocessors a put's programs run."""
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    sizes = CUDA if device == "cuda" else CPU
    works = make_works(sizes, where)
    bench = Bench(sizes, where)
    alone = {name: _warmed(bench, work).work for name, work in works.items()}
    emit("work_ms_alone", alone)
    rows: list[dict[str, Any]] = []
    for num_rows in sizes.rows:
        for variant in VARIANTS:
            chain = Chain(variant, num_rows, sizes, where)
            with configured(variant):
                chain.check()
                rows += _beside(bench, chain, works, alone, variant)
            emit("chains", rows)
    if device == "cuda":
        emit("programs_per_multiprocessor", _histograms(sizes, where, works["gemm"]))


def _warmed(bench: Bench, work: Callable[[], object]) -> Times:
    work()
    return bench.median(work, None)


def _beside(
    bench: Bench, chain: Chain, works: Works, alone: dict[str, float], variant: Variant
) -> Iterator[dict[str, Any]]:
    """A row of figures for every work."""
    quiet = bench.median(works["nothing"], chain).arrival
    for name, work in works.items():
        times = Times(0.0, quiet) if name == "nothing" else bench.median(work, chain)
        row = {
            "megabytes": chain.num_bytes / 1e6,
            **variant._asdict(),
            "beside": name,
            "arrival_ms": times.arrival,
            "gigabytes_per_second": chain.num_bytes / times.arrival / 1e6,
        }
        if name != "nothing":
            shorter = min(alone[name], quiet)
            row["work_slowdown"] = times.work / alone[name]
            row["arrival_slowdown"] = times.arrival / quiet
            if shorter >= LEAST_SHARE * alone[name]:
                row["hidden"] = (alone[name] + quiet - max(times)) / shorter
        yield row


def _histograms(
    sizes: Sizes, device: torch.device, multiply: Callable[[], object]
) -> list[dict[str, Any]]:
    """Multiprocessors with 1, 2, ... programs of a put, alone and beside matrix products, by setting."""
    putting = Putting(sizes.histogram_rows, device)
    sending = sending_stream(device)
    rows = []
    torch.cuda.synchronize()
    for variant in VARIANTS[:4]:
        for name, work in (("nothing", lambda: None), ("gemm", multiply)):
            with configured(variant):
                putting.multiprocessors()  # compiles
                torch.cuda.synchronize()
                work()
                with torch.cuda.stream(sending):
                    counts = Counter(putting.multiprocessors().values())
            torch.cuda.synchronize()
            setting = {
                "programs": variant.programs,
                "warps": variant.warps,
                "beside": name,
            }
            rows.append(
                setting
                | {
                    f"multiprocessors_with_{number}": counts[number]
                    for number in (1, 2, 3, 4)
                }
            )
    return rows
