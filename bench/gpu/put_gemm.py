"""The put kernel on its priority stream beside a GEMM on the main stream.

Both are repeated so that they take about as long alone. "hidden" is the share of the shorter one's time that both
together save: 1 if they run side by side, 0 if one after the other. On the CPU they run one after the other.
"""

import time
from typing import NamedTuple

import torch

from bench.gpu.parts import Emit
from bench.gpu.putting import Putting, programs
from torchtitan_cad.runtime.transport.cuda_memory import sending_stream

GATE_CYCLES = 20_000_000
"""The device sleeps while the host launches, so that both sides begin together."""


class Sizes(NamedTuple):
    gemm: int
    gemms: int
    rows: int
    programs: tuple[int, ...]
    dtype: torch.dtype


CUDA = Sizes(8192, 8, 16_384, (4, 8, 16, 24, 32, 64, 132, 100_000), torch.bfloat16)
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
