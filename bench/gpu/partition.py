# SPDX-License-Identifier: BSD-3-Clause
"""Ranks on partitions of one GPU: a layer whose documents stay at home, and the same layer as CAD plans it.

Green contexts divide the GPU's multiprocessors (SMs) into partitions. One process plays all ranks, and each rank has
its own partition, with a stream for computing and one for sending, so that the ranks compute at the same time. Rank 0
has one long document and every other rank has eight short ones: without CAD all wait for rank 0. Times are those of the
slowest rank, from a common beginning. The memory, its bandwidth and the power of the GPU are shared; rows travel
through its memory, not over NVLink. On the CPU the ranks take turns on the one device.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from bench.gpu.layer import checked_errors
from bench.gpu.loopback import KEY, Layer, RankStreams
from bench.gpu.parts import Emit, Skip
from bench.gpu.putting import Putting, programs
from tests.lib.workloads import SHAPE
from torchtitan_cad.planning import (
    AttentionShape,
    PlannerConfig,
    TokenLayout,
    make_plan,
)

PLANNED = KEY
HOME = KEY + 1
"""Keys of the two plans of a layer."""
SHORT_DOCUMENTS = 8
"""Documents of every rank but rank 0."""
GATE_CYCLES = 100_000_000
"""The device sleeps some 50 ms while the host launches, so that all ranks begin together."""
CONNECTIONS = "32"
"""Hardware queues. Of the 8 by default, two streams would share one, and a rank that waits would hold up another."""
MLP_MATRICES = 3


class Sizes(NamedTuple):
    """Sizes of a run.

    Attributes:
        tokens: tokens per rank.
        mlp: model dim and hidden dim of the MLP.
        rounds: by number of partitions, how often the home plan and the planned one take turns. The first of several
            rounds is a warm-up.
        rows: rows of the put that finds out where programs run.
    """

    shape: AttentionShape
    config: PlannerConfig
    tokens: int
    mlp: tuple[int, int]
    rounds: dict[int, int]
    rows: int


CUDA = Sizes(SHAPE, PlannerConfig(), 32_768, (4096, 14_336), {2: 6, 4: 3}, 16_384)
CPU = Sizes(
    AttentionShape(2, 1, 8, 4),
    PlannerConfig(min_shard=8, tile=8),
    64,
    (16, 32),
    {2: 1, 4: 1},
    40,
)


class Partition(NamedTuple):
    """A part of the device; None SMs on the CPU."""

    sms: int | None
    streams: RankStreams


def measure(device: str, emit: Emit) -> None:
    """For 2 and for 4 partitions: times, speed-up, differences to undivided attention, and who shares what."""
    if device == "cuda":
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = (
            CONNECTIONS  # which the driver reads when it begins
        )
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    # makes the primary context, to which green ones belong
    torch.zeros(1, device=where)
    sizes = CUDA if device == "cuda" else CPU
    rows: list[dict[str, Any]] = []
    errors = {}
    shared = {}
    for count in sizes.rounds:
        partitions = (
            split_gpu(count)
            if device == "cuda"
            else [Partition(None, RankStreams())] * count
        )
        emit(f"sms_of_{count}_partitions", [partition.sms for partition in partitions])
        bench = Bench(partitions, where, sizes)
        errors[f"{count} partitions"] = checked_errors(bench.layer, PLANNED)
        emit("errors", errors)
        for work, with_mlp in (("attention", False), ("attention and MLP", True)):
            row = bench.compare(sizes.rounds[count], with_mlp)
            rows.append(
                {"partitions": count, "sms": partitions[0].sms, "work": work, **row}
            )
            emit("layers", rows)
        shared[f"{count} partitions"] = bench.shared()
        emit("shared", shared)
        bench.layer.raise_if_late()


# Partitions -----------------------------------------------------------------------------------------------------------


def split_gpu(count: int) -> list[Partition]:
    """``count`` equal partitions of GPU 0, as large as the driver makes them, each with two streams.

    Raises Skip where the driver or its Python binding has no green contexts.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise Skip(f"green contexts need the package cuda-bindings: {error}") from error
    gpu = _call(driver.cuDeviceGet, 0)
    whole = _call(
        driver.cuDeviceGetDevResource,
        gpu,
        driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM,
    )
    step = whole.sm.smCoscheduledAlignment or 8
    for sms in range(whole.sm.smCount // count // step * step, 0, -step):
        error, groups, num_groups, _ = driver.cuDevSmResourceSplitByCount(
            count, whole, 0, sms
        )
        if not int(error) and num_groups == count:
            return [_partition(driver, gpu, group) for group in groups]
    raise Skip(
        f"the driver does not split {whole.sm.smCount} SMs into {count} partitions"
    )


def _partition(driver: Any, gpu: Any, group: Any) -> Partition:
    description = _call(driver.cuDevResourceGenerateDesc, [group], 1)
    context = _call(
        driver.cuGreenCtxCreate,
        description,
        gpu,
        int(driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM),
    )
    flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    computing, sending = (
        torch.cuda.ExternalStream(
            int(_call(driver.cuGreenCtxStreamCreate, context, flags, priority)),
            device=0,
        )
        for priority in (0, -1)
    )
    return Partition(int(group.sm.smCount), RankStreams(computing, sending))


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """The results of a function of the driver. Raises Skip with the error's name if it has none."""
    error, *results = function(*arguments)
    if int(error):
        raise Skip(f"{function.__name__} says {getattr(error, 'name', error)}")
    return results[0] if len(results) == 1 else results


# Layers ---------------------------------------------------------------------------------------------------------------


class Mlp:
    """The matrix products of one rank's MLP (three matrices), without what is between them."""

    def __init__(
        self, tokens: int, dims: tuple[int, int], device: torch.device
    ) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model_dim, hidden_dim = dims
        self._x, self._grad_x = (
            torch.randn(tokens, model_dim, device=device, dtype=dtype) for _ in range(2)
        )
        self._weight, self._grad_weight = (
            torch.randn(dims, device=device, dtype=dtype) for _ in range(2)
        )
        self._hidden = torch.randn(tokens, hidden_dim, device=device, dtype=dtype)

    def forward(self) -> None:
        for _ in range(MLP_MATRICES):
            torch.mm(self._x, self._weight, out=self._hidden)

    def backward(self) -> None:
        for _ in range(MLP_MATRICES):
            torch.mm(self._hidden, self._weight.t(), out=self._grad_x)
            torch.mm(self._x.t(), self._hidden, out=self._grad_weight)


class Bench:
    """The ranks of a layer, one on each partition.

    Attributes:
        layer: knows the plans ``HOME`` and ``PLANNED``.
    """

    def __init__(
        self, partitions: Sequence[Partition], device: torch.device, sizes: Sizes
    ) -> None:
        self._device = device
        self._streams = [partition.streams for partition in partitions]
        layout = uneven_layout(len(partitions), sizes.tokens)
        home = make_plan(layout, sizes.shape, PlannerConfig(planner="home"))
        planned = make_plan(layout, sizes.shape, sizes.config)
        self._predicted = home.stats.max_over_mean / planned.stats.max_over_mean
        self._sent_bytes = planned.stats.max_rank_bytes
        self.layer = Layer(planned, device, self._streams)
        self.layer.add_plan(HOME, home)
        self._mlps = [Mlp(sizes.tokens, sizes.mlp, device) for _ in partitions]
        self._putting = Putting(sizes.rows, device)

    def compare(self, rounds: int, with_mlp: bool) -> dict[str, float]:
        """Medians of the layer's time at home and as planned, which take turns, and their ratio."""
        times: dict[int, list[float]] = {HOME: [], PLANNED: []}
        for _ in range(rounds):
            for key, of_plan in times.items():
                of_plan.append(
                    max(
                        self._milliseconds(
                            lambda key=key: self._run_layer(key, with_mlp)
                        )
                    )
                )
        if rounds > 1:
            times = {key: of_plan[1:] for key, of_plan in times.items()}
        home, planned = (statistics.median(times[key]) for key in (HOME, PLANNED))
        return {
            "home_ms": home,
            "planned_ms": planned,
            "speed_up": home / planned,
            "predicted_speed_up_of_attention": self._predicted,
            "megabytes_of_busiest_rank": self._sent_bytes / 1e6,
            "spread": max(
                (max(x) - min(x)) / statistics.median(x) for x in times.values()
            ),
            "host_ms": self._host_milliseconds,
        }

    def shared(self) -> dict[str, Any]:
        """What partitions share: SMs, and speed, as matrix products of all of them over those of one alone."""
        self._milliseconds(lambda: self._multiply(self._streams))
        alone = max(self._milliseconds(lambda: self._multiply(self._streams[:1])))
        together = max(self._milliseconds(lambda: self._multiply(self._streams)))
        figures: dict[str, Any] = {"gemm_speed_beside_the_others": alone / together}
        if self._device.type == "cuda":
            figures |= self._shared_sms()
        return figures

    def _shared_sms(self) -> dict[str, int]:
        """SMs on which programs of every partition run, and how many SMs are of more than one partition."""
        found = []
        for streams in self._streams:
            with (
                streams.on_computing(),
                programs(8 * torch.cuda.get_device_properties(0).multi_processor_count),
            ):
                found.append(set(self._putting.multiprocessors()))
        used = set().union(*found)
        return {"used_sms": len(used), "shared_sms": sum(map(len, found)) - len(used)}

    def _run_layer(self, key: int, with_mlp: bool) -> None:
        if with_mlp:
            self._multiply(self._streams)
        self.layer(key)
        if with_mlp:
            for streams, mlp in zip(self._streams, self._mlps, strict=True):
                with streams.on_computing():
                    mlp.backward()

    def _multiply(self, of_ranks: Sequence[RankStreams]) -> None:
        for streams, mlp in zip(of_ranks, self._mlps, strict=False):
            with streams.on_computing():
                mlp.forward()

    def _milliseconds(self, run: Callable[[], object]) -> list[float]:
        """Time from a common beginning until each rank has done what ``run`` launches for it."""
        if self._device.type == "cpu":
            begin = time.perf_counter()
            run()
            self._host_milliseconds = 1e3 * (time.perf_counter() - begin)
            return [self._host_milliseconds]
        begin, *ends = (
            torch.cuda.Event(enable_timing=True) for _ in range(len(self._streams) + 1)
        )
        torch.cuda._sleep(GATE_CYCLES)
        begin.record()
        for streams in self._streams:
            streams.computing.wait_event(begin)
        launched = time.perf_counter()
        run()
        self._host_milliseconds = 1e3 * (time.perf_counter() - launched)
        for streams, end in zip(self._streams, ends, strict=True):
            end.record(streams.computing)
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for end in ends]


def uneven_layout(num_ranks: int, tokens: int) -> TokenLayout:
    """One document of ``tokens`` on rank 0, and ``SHORT_DOCUMENTS`` of equal length on every other rank."""
    short = tokens // SHORT_DOCUMENTS
    segments = [[(0, 0, tokens)]]
    for rank in range(1, num_ranks):
        first = 1 + SHORT_DOCUMENTS * (rank - 1)
        segments.append(
            [(first + number, 0, short) for number in range(SHORT_DOCUMENTS)]
        )
    return TokenLayout.from_segments(segments)
