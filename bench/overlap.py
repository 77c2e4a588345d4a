# SPDX-License-Identifier: BSD-3-Clause
"""How much of the exchange ping-pong hides, over links of several speeds.

    python -m bench.overlap --output bench/results/overlap.json

Gloo ranks on this machine run the ping-pong loop (integration/pingpong) with the real engine, plans and messages.
Two things are made up, so that a machine of few cores can tell: linear work and attention sleep for as long as they are
said to take, and a transport holds every message back for its bytes' time on a link of the given speed. Modes:

    ping-pong       two nano-batches, as trained
    traced          the same with segments compiled, exchanges included (torch 2.14.1 and newer)
    single stream   the same, but every exchange is waited for where it is started: no overlap
    signal only     ping-pong with one row per transfer: the time without a network (numbers are wrong, timing only)

"traced signal only" is the latter with segments compiled. Exposed communication is a mode's step time less that of
"signal only" of the same round, compiled or not like the mode itself: medians over the rounds, and their quartiles.
Steps of two ranks on two cores scatter by some 20 ms, so ``--work-ms 80`` tells more of two modes that hide nearly
everything, and ``--counted``, where time is counted and not spent, tells exactly what the order of their steps leaves
exposed. The link's speed is chosen so that the largest exchange takes a given share of the work that it can hide
behind.
"""

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu

enable_cpu()

# torchtitan must not be imported before enable_cpu().
from bench.record import conclude  # noqa: E402
from tests.lib.processes import run_processes, values  # noqa: E402
from torchtitan_cad.integration.pingpong.loop import PingPong  # noqa: E402
from torchtitan_cad.integration.pingpong.segment_graph import FIRST_TORCH  # noqa: E402
from torchtitan_cad.planning import (  # noqa: E402
    AttentionShape,
    Plan,
    PlannerConfig,
    TokenLayout,
    make_plan,
)
from torchtitan_cad.runtime.engine import CoreAttentionEngine, register_engine  # noqa: E402
from torchtitan_cad.runtime.kernels.base import Merged, VarlenArgs  # noqa: E402
from torchtitan_cad.runtime.packing import RowFormat  # noqa: E402
from torchtitan_cad.runtime.transport.base import Pending, Route, Routes, Transport  # noqa: E402
from torchtitan_cad.runtime.transport.collective import CollectiveTransport  # noqa: E402

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
SHAPE = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, dtype_bytes=4)
ENGINE = "overlap"
SIGNAL_ONLY, TRACED_SIGNAL_ONLY = "signal only", "traced signal only"
"""Modes without a network."""
TOKENS = 1024
"""Per rank and half: one document on the first rank, eight on the others."""
LONGEST_S = 3600.0


@dataclasses.dataclass(frozen=True)
class Options:
    shares: tuple[float, ...] = (0.2, 0.5, 0.8, 1.2)
    """Time of the largest exchange over that of the work it can hide behind."""
    ranks: int = 2
    layers: int = 8
    work_ms: float = 20.0
    """Linear work, and attention, of one half in one layer, forward; backward takes twice that."""
    repeats: int = 3
    counted: bool = False
    """Count the time of work and messages instead of letting it pass. What the host does takes none."""
    output: Path | None = None
    """JSON file for the figures."""


class Clock:
    """The machine's clock, or one that only this rank's sleeps move."""

    def __init__(self) -> None:
        self.counted: float | None = None
        """Seconds of a clock that counts; None: the machine's."""

    def now(self) -> float:
        return time.perf_counter() if self.counted is None else self.counted

    def sleep(self, seconds: float) -> None:
        if self.counted is None:
            time.sleep(max(0.0, seconds))
        else:
            self.counted += max(0.0, seconds)


CLOCK = Clock()


@dataclasses.dataclass(eq=False)
class Link:
    """A transport over a link that one message after the other takes; see the module for the modes."""

    inner: Transport
    seconds_per_byte: float
    mode: str
    name: str = "delayed"
    free_at: float = 0.0
    busy: float = 0.0

    def __post_init__(self) -> None:
        self.prepare, self.begin, self.buffer_bytes = (
            self.inner.prepare,
            self.inner.begin,
            self.inner.buffer_bytes,
        )

    def start(
        self,
        messages: Sequence[Sequence[Tensor]],
        routes: Routes,
        phase: str,
        call: int,
    ) -> Pending:
        total = [route.num_received for route in routes]
        if self.mode.endswith(SIGNAL_ONLY):
            routes = Routes(one_row_each(route) for route in routes)
        pending = self.inner.start(messages, routes, phase, call)
        for parts, route in zip(messages, routes, strict=True):
            num_bytes = (
                max(sum(route.send_counts), route.num_received)
                * RowFormat(parts).row_bytes
            )
            self.free_at = (
                max(self.free_at, CLOCK.now()) + num_bytes * self.seconds_per_byte
            )
            self.busy += num_bytes * self.seconds_per_byte
        arriving = _Arriving(pending, self.free_at, total)
        if self.mode == "single stream":
            arriving.wait()
        return arriving


def one_row_each(route: Route) -> Route:
    """At most one row from every rank to every other."""
    sent, received = (
        [min(count, 1) for count in counts]
        for counts in (route.send_counts, route.recv_counts)
    )
    rows = torch.zeros(sum(sent), dtype=torch.int64)
    return Route(
        route.kind, rows, sent, received, [0] * len(sent), len(received), route.buffer
    )


class _Arriving:
    def __init__(self, pending: Pending, at: float, rows: Sequence[int]) -> None:
        self.pending, self.rows = pending, rows
        self.received: list[Tensor] = []
        self._at = torch.tensor(at, dtype=torch.float64)
        self._last_sent: dist.Work | None = None
        # such a clock knows nothing of other ranks, so they say when they have sent
        if CLOCK.counted is not None:
            self._last_sent = dist.all_reduce(
                self._at, dist.ReduceOp.MAX, async_op=True
            )

    def wait(self) -> list[Tensor]:
        if not self.received:
            received = self.pending.wait()
            if self._last_sent is not None:
                self._last_sent.wait()
            CLOCK.sleep(float(self._at) - CLOCK.now())
            for x, rows in zip(received, self.rows, strict=True):
                self.received.append(
                    x if len(x) == rows else x.new_zeros(rows, x.shape[1])
                )
        return self.received

    def release(self) -> None:
        self.pending.release()


class SleepingKernel:
    """Takes its time for its share of the pairs and returns zeros."""

    name, squares_only = "sleeping", False

    def __init__(self, seconds: float, pairs: float) -> None:
        self.seconds_per_pair = seconds / pairs

    def check(self, dtype: torch.dtype, head_dim: int, value_dim: int) -> None: ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: VarlenArgs
    ) -> tuple[Tensor, Tensor]:
        self._sleep(call, 1)
        return torch.zeros_like(q), q.new_zeros(q.shape[:2])

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        merged: Merged,
        call: VarlenArgs,
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._sleep(call, 2)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    def _sleep(self, call: VarlenArgs, factor: float) -> None:
        q = torch.from_numpy(call.cu_q_host).diff()
        k = torch.from_numpy(call.cu_k_host).diff()
        pairs = q * k - (q * (q - 1) // 2 if call.causal else 0)
        CLOCK.sleep(factor * self.seconds_per_pair * float(pairs.sum()))


@torch.library.custom_op("torchtitan_cad_bench::sleep", mutates_args=())
def sleep(x: Tensor, seconds: float) -> Tensor:
    """A copy of ``x`` that takes so long; backward takes twice that."""
    CLOCK.sleep(seconds)
    return x.clone()


@sleep.register_fake
def _sleep_fake(x: Tensor, seconds: float) -> Tensor:
    return x.clone()


def _sleep_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    _, ctx.seconds = inputs


sleep.register_autograd(
    lambda ctx, gradient: (sleep(gradient, 2 * ctx.seconds), None),
    setup_context=_sleep_context,
)


class SleepingBlock(nn.Module):
    """A ``BlockView`` of a block whose MLP takes ``seconds``."""

    traceable, engine, rescale = True, "", None

    def __init__(self, seconds: float) -> None:
        super().__init__()
        dim = HEADS * HEAD_DIM
        self.block, self.seconds = nn.Module(), seconds
        self.wq, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.wk, self.wv = (
            nn.Linear(dim, KV_HEADS * HEAD_DIM, bias=False) for _ in range(2)
        )

    def project(
        self, x: Tensor, rope: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            linear(x).view(-1, linear.out_features // HEAD_DIM, HEAD_DIM)
            for linear in (self.wq, self.wk, self.wv)
        )
        return q, k, v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        h = x + self.wo(attended)
        return h + sleep(h, self.seconds)


def make_half(ranks: int) -> Plan:
    """The plan of either half."""
    short = TOKENS // 8
    others = [
        [(1 + 8 * rank + i, 0, short) for i in range(8)] for rank in range(ranks - 1)
    ]
    return make_plan(
        TokenLayout.from_segments([[(0, 0, TOKENS)], *others]), SHAPE, PlannerConfig()
    )


def dispatched_bytes(plan: Plan) -> int:
    """Bytes of Q, K and V that the busiest rank sends or receives at once, forward: the largest exchange."""
    query = HEADS * HEAD_DIM * SHAPE.dtype_bytes
    kv = 2 * KV_HEADS * HEAD_DIM * SHAPE.dtype_bytes
    tables = [plan.exchange(rank) for rank in range(plan.layout.num_ranks)]
    return max(
        max(len(t.queries.send_rows), t.queries.num_received) * query
        + max(len(t.keys.send_rows), t.keys.num_received) * kv
        for t in tables
    )


def run_rank(group: dist.ProcessGroup, options: Options) -> list[dict[str, Any]]:
    """One rank's figures, every mode at every speed; see ``measure``."""
    rank = group.rank()
    seconds, plan = options.work_ms / 1e3, make_half(options.ranks)
    pairs = (
        sum(n * (n + 1) / 2 for n in plan.layout.doc_lengths.tolist()) / options.ranks
    )
    kernel, link = (
        SleepingKernel(seconds, pairs),
        Link(CollectiveTransport(group), 0.0, ""),
    )
    engine = CoreAttentionEngine(
        kernel, link, rank=rank, device=torch.device("cpu"), scale=1.0
    )
    for key in range(2):
        engine.add_plan(key, plan)
    register_engine(ENGINE, engine)
    torch.manual_seed(0)
    CLOCK.counted = 0.0 if options.counted else None
    return run_link(options, link, dispatched_bytes(plan))


def run_link(options: Options, link: Link, num_bytes: int) -> list[dict[str, Any]]:
    """Every mode of the exchange of core attention, of which the largest has ``num_bytes``, at every speed."""
    seconds = options.work_ms / 1e3
    blocks = [SleepingBlock(seconds) for _ in range(options.layers)]
    loops = dict.fromkeys(
        (SIGNAL_ONLY, "single stream", "ping-pong"), PingPong(blocks, ENGINE)
    )
    if TorchVersion(torch.__version__) >= FIRST_TORCH:
        traced = PingPong(blocks, ENGINE, traced_on=torch.device("cpu"))
        traced.compile("inductor")
        loops |= {TRACED_SIGNAL_ONLY: traced, "traced": traced}
    figures = []
    for share in options.shares:
        link.seconds_per_byte = share * seconds / num_bytes
        figures += measure(loops, link, options.repeats, share)
    return figures


def measure(
    loops: Mapping[str, PingPong], link: Link, repeats: int, share: float
) -> list[dict[str, Any]]:
    """Take a step of every mode in each of ``repeats`` rounds, so that what disturbs the machine disturbs all of them.

    Returns: a row for every mode: medians over the rounds of the step's seconds (``step``), of those above the mode
    without a network (``exposed``, with ``quartiles``), and the seconds that the link was busy (``link``).
    """
    steps: dict[str, list[float]] = {mode: [] for mode in loops}
    busy: dict[str, float] = {}
    for _ in range(repeats + 1):
        for mode, loop in loops.items():
            link.mode = mode
            steps[mode].append(one_step(loop, link))
            busy[mode] = link.busy
    rows = []
    for mode, times in steps.items():
        if mode in (SIGNAL_ONLY, TRACED_SIGNAL_ONLY):
            bare = times
        exposed = np.subtract(times, bare)[1:]
        low, median, high = np.quantile(exposed, (0.25, 0.5, 0.75)).tolist()
        step = statistics.median(times[1:])
        row = {
            "share": share,
            "mode": mode,
            "step": step,
            "link": busy[mode],
            "exposed": median,
        }
        rows.append(row | {"quartiles": [low, high]})
    return rows


def one_step(loop: PingPong, link: Link) -> float:
    """Its seconds."""
    dist.barrier()
    link.busy, link.free_at = 0.0, 0.0
    CLOCK.counted = None if CLOCK.counted is None else 0.0
    x = torch.randn(2, TOKENS, HEADS * HEAD_DIM, requires_grad=True)
    begin = CLOCK.now()
    loop(x, torch.empty(0), None, 0).sum().backward()
    return CLOCK.now() - begin


def main(options: Options) -> None:
    """Runs the ranks and prints a table."""
    figures = values(
        run_processes(options.ranks, run_rank, options, timeout_s=LONGEST_S)
    )[0]
    print(
        f"{options.ranks} ranks, {options.layers} layers, medians of {options.repeats} steps of each mode, in turns"
    )
    rows = []
    for figure in figures:
        times = {
            f"{name} ms": 1e3 * figure[name] for name in ("step", "link", "exposed")
        }
        shares = [
            f"{each / (figure['link'] or 1.0):.1%}"
            for each in (figure["exposed"], *figure["quartiles"])
        ]
        row = {"share": figure["share"], "mode": figure["mode"], **times}
        rows.append(row | {"exposed of link": shares[0], "its quartiles": shares[1:]})
    conclude(options.output, "bench.overlap", figures, rows)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
