# SPDX-License-Identifier: BSD-3-Clause
"""Attention of many ranks on one device: what every rank of a plan computes, run and timed one rank after another.

Once by the home plan (every rank attends for its own tokens, as without CAD) and once by the planned one, forward and
backward. What a rank computes is real: gathering rows, the calls and merging. The network is modelled: the bytes of the
busiest rank, of forward and of backward, over a bandwidth, which overlaps with nothing. Inputs are random; received
rows are there already. Times of a rank are medians, those of the slowest rank a maximum of medians.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from bench.record import Record
from tests.lib.shapes import backward_shape
from tests.lib.workloads import document_lengths, spanning_layout
from torchtitan_cad.planning import (
    AttentionShape,
    Plan,
    PlannerConfig,
    TokenLayout,
    make_plan,
)
from torchtitan_cad.planning.timed import link_seconds
from torchtitan_cad.runtime.call import AttentionCall
from torchtitan_cad.runtime.directions import BACKWARD, FORWARD, Direction
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.kernels.base import AttentionKernel, compute_dtype
from torchtitan_cad.runtime.kernels.select import get_kernel
from torchtitan_cad.runtime.row_tables import RowTables
from torchtitan_cad.runtime.tables import PlanTables
from torchtitan_cad.runtime.timing import median_milliseconds


@dataclasses.dataclass(frozen=True)
class Options:
    device: str = "cpu"
    """cpu or cuda."""
    kernel: str = "auto"
    """As the key cad.kernel."""
    ranks: tuple[int, ...] = (4,)
    tokens_per_rank: int = 1024
    workload: str = "lognormal"
    """One of tests/lib/workloads.py."""
    longest: int = 262_144
    """tokens: longer documents are cut"""
    pretrain: Path | None = None
    """JSON list of document lengths, for the workloads named after it."""
    seed: int = 11
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    tolerance: float = 0.02
    repeats: int = 5
    gigabytes_per_second: float = 50.0
    """bandwidth of a rank's network, each way: of a NIC of 400 Gbit/s; NVLink inside a node has nine times as much"""


def make_layout(options: Options, num_ranks: int) -> TokenLayout:
    """Documents laid end to end over the ranks, in the workload's order."""
    total, lengths = num_ranks * options.tokens_per_rank, []
    for length in document_lengths(
        options.workload, num_ranks, options.seed, options.pretrain
    ):
        lengths.append(min(length, options.longest, total - sum(lengths)))
        if sum(lengths) == total:
            break
    return spanning_layout(lengths, num_ranks)


def replay_rank(
    tables: PlanTables,
    kernel: AttentionKernel,
    shape: AttentionShape,
    dtype: torch.dtype,
    options: Options,
) -> tuple[float, float]:
    """Milliseconds of one rank's forward and backward."""
    device = torch.device(options.device)

    def rows(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, shape.head_dim, device=device, dtype=dtype)

    if not tables.calls:
        return 0.0, 0.0
    n_q, n_kv = tables.queries.num_local, tables.keys.num_local
    ((q_out,), (kv_out,)) = tables.queries.out, tables.keys.out
    q, dout = (rows(n_q + tables.queries.num_remote, shape.num_heads) for _ in range(2))
    k, v = (rows(n_kv + tables.keys.num_remote, shape.num_kv_heads) for _ in range(2))
    statistic = torch.zeros(q.shape[:2], device=device, dtype=compute_dtype(dtype))
    returned = rows(sum(q_out.send_counts), shape.num_heads)
    returned_keys = [
        rows(sum(kv_out.send_counts), shape.num_kv_heads) for _ in range(2)
    ]
    returned_lse = torch.zeros(returned.shape[:2], device=device, dtype=statistic.dtype)

    engine = CoreAttentionEngine(kernel, None, rank=0, device=device, scale=1.0)

    def run(
        direction: Direction, queries: list[Tensor], back: dict[str, list[Tensor]]
    ) -> object:
        local = {
            "queries": [x[:n_q] for x in queries],
            "keys": [x[:n_kv] for x in (k, v)],
        }
        received = {
            "queries": [x[n_q:] for x in queries],
            "keys": [x[n_kv:] for x in (k, v)],
        }
        call = AttentionCall(engine, direction, 0, tables, local)
        call.combine_results(call.begin_tasks(received))
        for _, chunks in tables.home[direction.name] if tables.moves else ():
            for chunk in chunks:
                call.combine(
                    chunk.kind,
                    chunk.combination,
                    back[chunk.kind],
                    is_last=chunk.is_last,
                )
        return call.finish()

    def forward() -> object:
        return run(FORWARD, [q], {"queries": [returned, returned_lse]})

    def backward() -> object:
        # A plain plan takes the output where others take row sums.
        queries = [dout, statistic, q if tables.is_plain else statistic, q]
        return run(BACKWARD, queries, {"queries": [returned], "keys": returned_keys})

    times = [milliseconds(run, device, options.repeats) for run in (forward, backward)]
    return times[0], times[1]


def copied_bytes(tables: PlanTables, shape: AttentionShape) -> int:
    """Return the bytes of rows that a forward copies because they are not in order for its kernel calls."""
    queries = sum(_num_copied(call.q_rows, tables.queries) for call in tables.calls)
    keys = sum(_num_copied(call.kv_rows, tables.keys) for call in tables.calls)
    of_keys = shape.num_kv_heads * (shape.key_dim + shape.out_dim) + shape.shared_dim
    return (
        queries * shape.num_heads * shape.head_dim + keys * of_keys
    ) * shape.dtype_bytes


def _num_copied(rows: Tensor | slice | None, tables: RowTables) -> int:
    if isinstance(rows, Tensor):
        return len(rows)
    if rows is None and tables.num_remote:
        return tables.num_local + tables.num_remote
    return 0


def milliseconds(
    run: Callable[[], object], device: torch.device, repeats: int
) -> float:
    """Median over ``repeats`` runs: device time on a GPU; elsewhere CPU time, which other processes do not prolong."""
    if device.type == "cuda":
        return median_milliseconds(run, device, repeats)
    run()
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        run()
        times.append(1e3 * (time.process_time() - begin))
    return statistics.median(times)


def replay(
    plan: Plan, kernel: AttentionKernel, dtype: torch.dtype, options: Options
) -> Record:
    """Times of every rank of the plan, and what follows from them."""
    device = torch.device(options.device)
    times, copied = [], []
    for rank in range(plan.layout.num_ranks):
        exchange = plan.exchange(rank)
        tables = PlanTables.from_exchange(
            exchange,
            plan.moves_rows,
            device,
            scale=plan.shape.head_dim**-0.5,
            chunks=exchange.most.in_one_chunk(),
        )
        times.append(replay_rank(tables, kernel, plan.shape, dtype, options))
        copied.append(copied_bytes(tables, plan.shape))
    figures: Record = {"max_over_mean_planned": plan.stats.max_over_mean}
    for name, column in (("forward", 0), ("backward", 1)):
        of_ranks = [rank_times[column] for rank_times in times]
        mean = sum(of_ranks) / len(of_ranks)
        figures[name] = {
            "milliseconds": of_ranks,
            "mean": mean,
            "makespan": max(of_ranks),
        }
    rate = 1e9 * options.gigabytes_per_second
    for name, shape in (
        ("forward", plan.shape),
        ("backward", backward_shape(plan.shape)),
    ):
        seconds = link_seconds(
            plan, (shape.query_bytes, shape.kv_bytes), (), rate, rate
        )
        figures[f"{name}_network_milliseconds"] = 1e3 * float(seconds.max())
    figures["copied_bytes_max"] = max(copied)
    return figures


def measure(num_ranks: int, options: Options) -> Record:
    """The home plan and the planned one of one layout."""
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    shape = AttentionShape(*options.heads, options.head_dim, dtype.itemsize)
    kernel = get_kernel(options.kernel, options.device, shape)
    layout = make_layout(options, num_ranks)
    config = PlannerConfig(tolerance=options.tolerance)
    plans = {
        "home": make_plan(layout, shape, PlannerConfig(planner="home")),
        "planned": make_plan(layout, shape, config),
    }
    row: Record = {
        "ranks": num_ranks,
        "documents": len(layout.docs),
        "kernel": str(kernel),
    }
    for name, plan in plans.items():
        row[name] = replay(plan, kernel, dtype, options)
    for name in ("forward", "backward"):
        row[f"{name}_speedup"] = (
            row["home"][name]["makespan"] / row["planned"][name]["makespan"]
        )
    return row


def passes(row: Record) -> list[Record]:
    """The figures of ``measure`` in a line for forward and one for backward."""
    home, planned = row["home"], row["planned"]
    return [
        {
            "ranks": row["ranks"],
            "pass": name,
            "home_ms": home[name]["makespan"],
            "home_over_mean": home[name]["makespan"] / home[name]["mean"],
            "planned_ms": planned[name]["makespan"],
            "planned_max_over_mean": planned[name]["makespan"] / planned[name]["mean"],
            "planned_over_mean": planned[name]["makespan"] / home[name]["mean"],
            "speedup": row[f"{name}_speedup"],
            "network_ms": planned[f"{name}_network_milliseconds"],
            "copied_megabytes": planned["copied_bytes_max"] / 1e6,
        }
        for name in ("forward", "backward")
    ]
