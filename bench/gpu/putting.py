# SPDX-License-Identifier: BSD-3-Clause
"""The put kernel (runtime/triton/put.py), alone and beside a GEMM: this process sends rows to itself.

Rows are read from and written to the same device's memory, so rates say what the kernel's programs can move, not what
NVLink can. On the CPU Triton's interpreter runs the kernel. The put is on its priority stream, the GEMM on the main
one, repeated. One put takes about as long as all GEMMs: a put waits for a multiplication to end, which has every SM,
and then keeps its own SMs, so that the next ones have fewer. "hidden" is the share of the shorter one's time that both
together save: 1 if they run side by side, 0 if one after the other, as they do on the CPU.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
from torch import Tensor

from bench.gpu.parts import Emit
from torchtitan_cad.runtime.transport.cuda_memory import sending_stream
from torchtitan_cad.runtime.triton import put
from torchtitan_cad.runtime.triton.rows import WIDTH

GATE_CYCLES = 20_000_000
"""The device sleeps while the host launches, so that both sides begin together."""
ROW = (32, 128)
"""Heads and head dim of a row."""


class Putting:
    """Rows in random order, bf16, and memory for them.

    Attributes:
        memory: "symmetric" or "plain"; if it should be symmetric and is not, why.
        num_bytes: read and written by a put.
    """

    def __init__(self, num_rows: int, device: torch.device, *, symmetric: bool = False) -> None:
        self.part = torch.randn(num_rows, *ROW, device=device).bfloat16()
        self.rows = torch.randperm(num_rows).to(device)
        self.row_bytes = self.part[0].nbytes
        self.num_bytes = 2 * self.part.nbytes
        self.target, self.memory = torch.zeros(self.part.nbytes, dtype=torch.uint8, device=device), "plain"
        if symmetric:
            self.target, self.memory = _symmetric(self.target)
        self.blocks = put.split_into_blocks([num_rows], [0]).to(device)
        self.addresses = torch.tensor([self.target.data_ptr()]).to(device)
        self.failed = torch.zeros(1, dtype=torch.int64, device=device)

    def run(self, multiprocessors: Tensor | None = None) -> None:
        """Put the rows; ``multiprocessors`` is an argument of ``put_rows``."""
        message = [self.part], [0], self.rows
        put.put_rows(*message, self.blocks, self.addresses, 0, self.row_bytes, self.failed, multiprocessors)

    def multiprocessors(self) -> Counter[int]:
        """The multiprocessors on which a put's programs run on the current stream, and how many run on each."""
        tiles = len(self.blocks) * triton.cdiv(self.row_bytes, 8 * WIDTH.value)
        numbers = torch.zeros(min(put.PROGRAMS, tiles), dtype=torch.int32, device=self.part.device)
        self.run(numbers)
        return Counter(numbers.tolist())

    def received(self) -> Tensor:
        """The rows that were written."""
        return self.target.view(torch.bfloat16).view_as(self.part)


@contextlib.contextmanager
def programs(most: int) -> Iterator[None]:
    """Limits the programs of a put to ``most`` in this context."""
    before, put.PROGRAMS = put.PROGRAMS, most
    try:
        yield
    finally:
        put.PROGRAMS = before


def _symmetric(plain: Tensor) -> tuple[Tensor, str]:
    """Symmetric memory of this rank alone, as large as ``plain``; or that, with the reason."""
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        memory = symm_mem._SymmetricMemory.empty_strided_p2p(plain.shape, (1,), torch.uint8, plain.device)
        symm_mem.rendezvous(memory, dist.group.WORLD)
    except Exception as error:  # whatever this system lacks
        return plain, f"plain: {type(error).__name__}: {error}"[:500]
    return memory, "symmetric"


class Sizes(NamedTuple):
    gemm: int
    gemms: int
    rows: int
    programs: tuple[int, ...]
    dtype: torch.dtype


CUDA = Sizes(8192, 8, 524_288, (4, 8, 16, 24, 32, 64, 132, 100_000), torch.bfloat16)
CPU = Sizes(64, 2, 40, (1, 2), torch.float32)


class Times(NamedTuple):
    """Milliseconds from the common beginning to the end of either side."""

    gemms: float
    puts: float


class Bench:
    """Operands of both sides."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.device, self.putting = device, Putting(sizes.rows, device, symmetric=True)
        self.a, self.b, self.c = (torch.randn(sizes.gemm, sizes.gemm, device=device, dtype=sizes.dtype) for _ in "abc")

    def run(self, num_gemms: int, num_puts: int) -> Times:
        if self.device.type == "cuda":
            return self._run_on_streams(num_gemms, num_puts)
        begin = time.perf_counter()
        self._put(num_puts)
        put = time.perf_counter()
        self._multiply(num_gemms)
        return Times(1e3 * (time.perf_counter() - begin), 1e3 * (put - begin))

    def _run_on_streams(self, num_gemms: int, num_puts: int) -> Times:
        begin, put, gemm = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        sending = sending_stream(self.device)
        torch.cuda._sleep(GATE_CYCLES)
        begin.record()
        sending.wait_event(begin)
        with torch.cuda.stream(sending):
            self._put(num_puts)
            put.record()
        self._multiply(num_gemms)
        gemm.record()
        torch.cuda.synchronize()
        return Times(begin.elapsed_time(gemm), begin.elapsed_time(put))

    def _put(self, count: int) -> None:
        for _ in range(count):
            self.putting.run()

    def _multiply(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self.a, self.b, out=self.c)


def measure(device: str, emit: Emit) -> None:
    """A row for every number of programs: the rate of the put alone, and what either side loses by the other."""
    sizes = CUDA if device == "cuda" else CPU
    bench = Bench(sizes, torch.device(device, 0) if device == "cuda" else torch.device(device))
    putting = bench.putting
    emit("memory", putting.memory)
    bench.run(1, 1)  # compiles
    if not torch.equal(putting.received(), putting.part[putting.rows]):
        raise RuntimeError("rows did not arrive as they were sent")
    bench.run(sizes.gemms, 0)  # warms up
    gemms = bench.run(sizes.gemms, 0).gemms
    emit("gemm_tflops", 2 * sizes.gemm**3 * sizes.gemms / gemms / 1e9)
    rows = []
    for most in sizes.programs:
        with programs(most):
            put = bench.run(0, 4).puts / 4
            num_puts = max(1, round(gemms / put))
            puts = bench.run(0, num_puts).puts
            both = bench.run(sizes.gemms, num_puts)
        rows.append(
            {
                "programs": most,
                "put_gigabytes_per_second": putting.num_bytes / 2 * num_puts / puts / 1e6,
                "gemm_slowdown": both.gemms / gemms,
                "put_slowdown": both.puts / puts,
                "hidden": (gemms + puts - max(both)) / min(gemms, puts),
            }
        )
        emit("beside", rows)
