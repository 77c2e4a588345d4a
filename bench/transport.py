# SPDX-License-Identifier: BSD-3-Clause
"""Transports against each other: how fast rows get from rank to rank.

    python -m bench.transport                            # CPU ranks
    python -m bench.transport --device cuda --ranks 2 4  # several ranks on one GPU

Every rank gathers rows of one bf16 tensor and sends equal shares to all others. Printed is the rate at which a rank
receives, over the median time of an exchange (start, wait, release) on the slowest rank, beside the rate at which the
same bytes are copied in memory by all ranks at once. On one GPU `collective` is gloo, which stages through the host,
and without MPS processes take turns of about 2 ms on the device: that is then measured, not a bandwidth.
"""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import tyro

from bench.record import Record, conclude
from tests.runtime.processes import run_processes, values
from torchtitan_cad.runtime.profiling import device_name
from torchtitan_cad.runtime.transport import Route, Routes, Transport, build_transport

ROW_ELEMENTS = 32 * 128
WARM_UP = 5
LONGEST_S = 3600.0


@dataclasses.dataclass(frozen=True)
class Options:
    device: str = "cpu"
    """cpu or cuda."""
    ranks: tuple[int, ...] = (2, 4)
    transports: tuple[str, ...] = ("collective", "symm_mem")
    megabytes: tuple[float, ...] = (0.1, 1, 10, 50)
    """Received by every rank in one exchange."""
    repeats: int = 20
    output: Path | None = None
    """JSON file for the figures."""


def make_route(num_ranks: int, rank: int, rows_per_peer: int, device: torch.device) -> Route:
    counts = [rows_per_peer * (peer != rank) for peer in range(num_ranks)]
    offsets = [rows_per_peer * (rank - (peer < rank)) for peer in range(num_ranks)]
    total = rows_per_peer * (num_ranks - 1)
    rows = torch.randperm(total).to(device)
    return Route("queries", rows, counts, counts, offsets, total)


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of what all ranks begin at once, on this rank."""
    times = []
    for _ in range(WARM_UP + repeats):
        dist.barrier()
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[WARM_UP:])


def exchange_seconds(transport: Transport, route: Route, device: torch.device, repeats: int) -> float:
    """Median seconds of an exchange on this rank."""
    part = torch.randn(len(route.rows), ROW_ELEMENTS).to(device, torch.bfloat16)
    routes = Routes([route])
    transport.prepare([routes])

    def exchange() -> None:
        pending = transport.start([[part]], routes, "bench", transport.begin())
        pending.wait()
        pending.release()

    return median_seconds(exchange, device, repeats)


def measure(group: dist.ProcessGroup, options: Options) -> list[Record]:
    """One rank's figures for every size."""
    rank, num_ranks = group.rank(), group.size()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        # Several ranks on one device, which torch otherwise refuses.
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        torch.cuda.set_device(device)
    figures: list[Record] = []
    for megabytes in options.megabytes:
        rows_per_peer = max(1, round(megabytes * 1e6 / (2 * ROW_ELEMENTS) / (num_ranks - 1)))
        num_rows = rows_per_peer * (num_ranks - 1)
        num_bytes = num_rows * 2 * ROW_ELEMENTS
        row: Record = {"device": device_name(device), "ranks": num_ranks, "bytes": num_bytes}
        source = torch.randn(num_rows, ROW_ELEMENTS).to(device, torch.bfloat16)
        target = torch.empty_like(source)
        row["copy"] = median_seconds(lambda target=target, source=source: target.copy_(source), device, options.repeats)
        for name in options.transports:
            transport = build_transport(name, group, device)
            route = make_route(num_ranks, rank, rows_per_peer, device)  # with tables of this transport
            row[name] = exchange_seconds(transport, route, device, options.repeats)
        figures.append(row)
    return figures


def run(num_ranks: int, options: Options) -> list[Record]:
    """Figures of the slowest rank for every size."""
    ranks = values(run_processes(num_ranks, measure, options, timeout_s=LONGEST_S))
    names = ("copy", *options.transports)
    return [
        {**rows[0], **{name: max(row[name] for row in rows) for name in names}} for rows in zip(*ranks, strict=True)
    ]


def main(options: Options) -> None:
    print(f"torch {torch.__version__}, {options.device}; GB/s received by a rank (milliseconds of an exchange)")
    records = [row for num_ranks in options.ranks for row in run(num_ranks, options)]
    rows = []
    for record in records:
        names = ("copy", *options.transports)
        rates = {name: f"{record['bytes'] / record[name] / 1e9:.2f} ({1e3 * record[name]:.2f})" for name in names}
        rows.append({"ranks": record["ranks"], "MB": record["bytes"] / 1e6, **rates})
    conclude(options.output, "bench.transport", records, rows)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
