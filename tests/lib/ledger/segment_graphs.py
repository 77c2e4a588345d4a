# SPDX-License-Identifier: BSD-3-Clause
"""Segments on ledger devices: the compiled graphs of two gloo ranks, with the real engine, plans and messages."""

import copy
import dataclasses
import functools
import math
import random
import tempfile
import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack, chdir
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

from tests.lib.accuracy import assert_as_exact
from tests.lib.ledger import load
from torchtitan_cad.integration.pingpong import segment_graph
from torchtitan_cad.integration.pingpong.loop import PingPong
from torchtitan_cad.planning import (
    AttentionShape,
    PlannerConfig,
    TokenLayout,
    make_plan,
)
from torchtitan_cad.planning.exchange.messages import Chunks, MostRows, RowBytes
from torchtitan_cad.planning.model.batch import BatchShape, nano_layouts
from torchtitan_cad.runtime import steps, traced
from torchtitan_cad.runtime.engine import CoreAttentionEngine, register_engine
from torchtitan_cad.runtime.ops import core_attention
from torchtitan_cad.runtime.packing import RowFormat
from torchtitan_cad.runtime.transport.base import Route, Routes

SHAPE = AttentionShape(2, 1, 16, 4)
TOKENS = 64
DIM = SHAPE.num_heads * SHAPE.head_dim
KEYS_DIM = SHAPE.num_kv_heads * SHAPE.head_dim
ENGINE = "segments"
NUM_PLANS = 21


@dataclasses.dataclass(frozen=True)
class Job:
    """A case: graphs to compile, and how often to run them.

    Attributes:
        compiler: "nodes" runs the graphs node by node, see graphs.py; "inductor" lets Inductor compile them.
        runs: the first one in the order of the graphs, with "nodes" each other in another legal order; each by another
            pair of plans.
        without: what is left out or done wrong: of ``WITHOUT``.
        in_rows: halve rows in the middle, so that the later nano-batch attends to the earlier one's keys.
        keep: servers keep what they received, for backward.
        microbatches: how many take forward before backward of the first, as in a pipeline.
        recompute: compute linear work again in backward, as activation checkpointing by operator may.
        validate: run every microbatch without gradients, too, before backward.
    """

    compiler: str = "nodes"
    runs: int = 1
    without: tuple[str, ...] = ()
    blocks: int = 3
    in_rows: bool = False
    keep: bool = False
    microbatches: int = 1
    recompute: bool = False
    validate: bool = False


@dataclasses.dataclass
class Outcome:
    """Results of one rank: of every run the races and histories, forward and backward."""

    races: list[tuple[list[str], list[str]]] = dataclasses.field(default_factory=list)
    histories: list[tuple[list[str], list[str]]] = dataclasses.field(
        default_factory=list
    )
    errors: list[str] = dataclasses.field(default_factory=list)
    """Outputs and gradients that are less exact than those of the same blocks, each as a whole."""
    graphs: list[int] = dataclasses.field(default_factory=list)
    """Graphs that Dynamo had traced after each run."""
    objects: list[int] = dataclasses.field(default_factory=list)
    """Streams and events that torch keeps alive for graphs after each run."""


class BlockSegment(nn.Module):
    """The linear work of a block without norms: see ``pingpong.block.BlockSegment``."""

    def __init__(self, before: nn.Module | None, after: nn.Module | None) -> None:
        super().__init__()
        self.before = before
        self.after = after

    def forward(
        self, x: Tensor, attended: Tensor | None, rope: None, positions: None
    ) -> tuple[Tensor | None, ...]:
        if self.before is not None and attended is not None:
            hidden = x + (attended.flatten(0, 1) @ self.before.wo).view(x.shape)
            x = hidden + (
                torch.relu(hidden.flatten(0, 1) @ self.before.w1) @ self.before.w2
            ).view(x.shape)
        if self.after is None:
            return x, None, None, None
        return x, *project(x, self.after)


def project(x: Tensor, block: nn.Module) -> tuple[Tensor, ...]:
    widths = [DIM, KEYS_DIM, KEYS_DIM]
    parts = (x.flatten(0, 1) @ block.wqkv).split(widths, 1)
    return tuple(
        part.reshape(x.shape[0] * x.shape[1], -1, SHAPE.head_dim) for part in parts
    )


def new_block() -> nn.Module:
    block = nn.Module()
    sizes = {
        "wqkv": (DIM, DIM + 2 * KEYS_DIM),
        "wo": (DIM, DIM),
        "w1": (DIM, 2 * DIM),
        "w2": (2 * DIM, DIM),
    }
    for name, (rows, columns) in sizes.items():
        setattr(
            block,
            name,
            nn.Parameter((torch.randn(rows, columns) / rows**0.5).to("ledger")),
        )
    return block


class Collective:
    """A transport as over NCCL: a stream of its own, which waits for the current one."""

    name = "ledger"
    buffer_bytes = 2**22

    def __init__(self, group: dist.ProcessGroup, *, one_buffer: bool = False) -> None:
        self._group, self._stream, self._one_buffer = (
            group,
            torch.Stream("ledger"),
            one_buffer,
        )
        self._buffers: dict[tuple[int, ...], Tensor] = {}

    def prepare(self, exchanges: Sequence[Routes]) -> None: ...

    def begin(self) -> int:
        return 0

    def start(
        self,
        messages: Sequence[Sequence[Tensor]],
        routes: Routes,
        phase: str,
        call: int,
    ) -> "Pending":
        return Pending(
            [
                self._start(message, route)
                for message, route in zip(messages, routes, strict=True)
            ]
        )

    def _start(self, parts: Sequence[Tensor], route: Route) -> "Arriving":
        message = RowFormat(parts).pack(parts, route.rows)
        shape = route.num_received, message.shape[1]
        received = message.new_empty(shape)
        if self._one_buffer:
            received = self._buffers.setdefault(shape, received)
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            torch.ops.ledger.use([message], [received], "all_to_all")
        arrived = self._stream.record_event()
        hosts = [
            torch.ops.ledger.on_host(x)
            if x.numel()
            else torch.empty(x.shape, dtype=x.dtype)
            for x in (received, message)
        ]
        work = dist.all_to_all_single(
            *hosts,
            route.recv_counts,
            route.send_counts,
            group=self._group,
            async_op=True,
        )
        return Arriving(work, received, message, arrived)


class Arriving(NamedTuple):
    work: dist.Work
    received: Tensor
    sent: Tensor
    arrived: torch.Event


@dataclasses.dataclass
class Pending:
    messages: list[Arriving]

    def wait(self) -> list[Tensor]:
        for message in self.messages:
            message.work.wait()
            torch.accelerator.current_stream().wait_event(message.arrived)
        return [message.received for message in self.messages]

    take = wait

    def release(self) -> None: ...


# Steps left out, or done wrong ----------------------------------------------------------------------------------------


def _no_wait(
    self: segment_graph.SegmentGraph,
    way: str,
    nano_batch: int,
    step: str,
    token: Tensor,
    key: Tensor,
) -> Tensor:
    with self.side_streams.sides[nano_batch]:
        return traced.step(token, step, key, self.engine)


def _early(
    self: segment_graph.SegmentGraph,
    way: str,
    nano_batch: int,
    step: str,
    token: Tensor,
    key: Tensor,
) -> Tensor:
    ready, done = getattr(self.side_streams, way)[nano_batch]
    side = self.side_streams.sides[nano_batch]
    ready.record(self.side_streams.current())
    side.wait_event(ready)
    done.record(side)
    with side:
        return traced.step(token, step, key, self.engine)


class _Forgetful(steps.PendingCall):
    """Keeps nothing alive for the side stream."""

    _keepalive = property(lambda self: (), lambda self, tensors: None)  # type: ignore[assignment]


class _Unmarked(steps.PendingCall):
    """Lets no part wait for the one before."""

    _event = property(lambda self: None, lambda self, event: None)  # type: ignore[assignment]


_chunks = MostRows.chunks


def _short_chunks(most: MostRows, row_bytes: RowBytes, _: int) -> Chunks:
    return _chunks(most, row_bytes, 8 * row_bytes.queries_home)


WITHOUT: dict[str, Callable[[], Any]] = {
    "one chunk": lambda: mock.patch.object(MostRows, "chunks", _short_chunks),
    "marks": lambda: mock.patch.object(steps, "PendingCall", _Unmarked),
    "a wait": lambda: mock.patch.object(segment_graph.SegmentGraph, "_wait", _no_wait),
    "a record in time": lambda: mock.patch.object(
        segment_graph.SegmentGraph, "_exchange", _early
    ),
    "buffers of their own": lambda: mock.patch.object(
        Collective.__init__, "__kwdefaults__", {"one_buffer": True}
    ),
    "inputs kept alive": lambda: mock.patch.object(steps, "PendingCall", _Forgetful),
}


def _keep_nothing(*args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


# A rank ---------------------------------------------------------------------------------------------------------------


def make_plans(in_rows: bool) -> list[Any]:
    """One document on the first rank, or two; short ones on the second."""
    draw = random.Random(0)
    layouts = []
    for number in range(NUM_PLANS):
        if in_rows:
            cut = 8 * draw.randrange(3)
            starts = [
                np.unique([0, TOKENS - cut, 2 * TOKENS]),
                np.arange(0, 2 * TOKENS + 1, TOKENS // 8),
            ]
            layouts += nano_layouts(starts, [BatchShape(1, 2 * TOKENS, 1)] * 2, 0, 1, 2)
            continue
        for _ in range(2):
            cut = 8 * draw.randrange(3) if number else 0
            long = [(0, 0, TOKENS - cut), *([(1, 0, cut)] if cut else [])]
            layouts.append(
                TokenLayout.from_segments(
                    [long, [(2 + i, 0, TOKENS // 8) for i in range(8)]]
                )
            )
    plans = [make_plan(layout, SHAPE, PlannerConfig(min_shard=8)) for layout in layouts]
    assert all(plan.moves_rows for plan in plans)
    return plans


def run_job(group: dist.ProcessGroup, job: Job) -> Outcome:
    """One rank of a group of two."""
    load()
    with (
        tempfile.TemporaryDirectory() as folder,
        chdir(folder),
        ExitStack() as stack,
    ):
        # torch dumps graphs
        # torch 2.14 asks Triton how fast the device's memory is.
        stack.enter_context(
            mock.patch(
                "torch._inductor.analysis.device_info.datasheet_dram_bw_gbs",
                return_value=1e3,
            )
        )
        for name in job.without:
            stack.enter_context(WITHOUT[name]())
        try:
            return _run(group, job)
        except torch._dynamo.exc.TorchDynamoException as error:
            # cannot be sent to another process
            raise AssertionError(str(error)) from None


def _run(group: dist.ProcessGroup, job: Job) -> Outcome:
    from tests.lib.ledger import graphs
    from tests.lib.ledger.ranks import OneKernel

    device = torch.device("ledger", 0)
    transport = Collective(group)
    engine = CoreAttentionEngine(
        OneKernel(),
        transport,
        rank=group.rank(),
        device=device,
        scale=0.25,
        kept_bytes=math.inf if job.keep else 0.0,
    )
    for key, plan in enumerate(make_plans(job.in_rows)):
        engine.add_plan(key, plan)
    register_engine(ENGINE, engine)
    torch.manual_seed(0)
    blocks = [new_block() for _ in range(job.blocks)]
    views: list[Any] = [
        types.SimpleNamespace(block=block, traceable=True) for block in blocks
    ]
    doubles = [copy.deepcopy(block).double() for block in blocks]
    segments: list[Any] = [
        BlockSegment(before, after)
        for before, after in zip([None, *blocks], [*blocks, None], strict=True)
    ]
    if job.recompute:
        contexts = functools.partial(
            create_selective_checkpoint_contexts, _keep_nothing
        )
        segments = [
            checkpoint_wrapper(x, context_fn=contexts, preserve_rng_state=False)
            for x in segments
        ]
    if job.compiler == "nodes":
        with mock.patch.object(
            torch, "compile", lambda graph, **_: graphs.compile_for_shuffling(graph)
        ):
            compiled = segment_graph.compile_graphs(segments, ENGINE, device)
    else:
        from tests.lib.ledger import inductor  # noqa: F401

        compiled = segment_graph.compile_graphs(segments, ENGINE, device)
    loop = PingPong(views, ENGINE)
    loop.graphs = compiled

    def whole(
        blocks: list[nn.Module], xs: list[Tensor], keys: list[Tensor]
    ) -> list[Tensor]:
        for block in blocks:
            (q, k, v), (second_q, second_k, second_v) = (project(x, block) for x in xs)
            if job.in_rows:
                second_k = torch.cat((k, second_k))
                second_v = torch.cat((v, second_v))
            nano_batches = (q, k, v), (second_q, second_k, second_v)
            attended = [
                core_attention(*qkv, key, ENGINE)[0].flatten(1)
                for qkv, key in zip(nano_batches, keys, strict=True)
            ]
            xs = [
                BlockSegment(block, None)(x, out[None], None, None)[0]
                for x, out in zip(xs, attended, strict=True)
            ]
        return xs

    def in_graphs(xs: list[Tensor], keys: list[Tensor]) -> list[Tensor]:
        nothing: Any = [None, None]
        nano_batches = loop.nano_batches(
            xs, nothing, nothing, int(keys[0]), job.in_rows
        )
        loop.run_blocks(nano_batches, job.in_rows)
        return [nano_batch.x for nano_batch in nano_batches]

    outcome = Outcome()
    for run in range(job.runs):
        graphs.shuffle = run
        torch.manual_seed(1 + 2 * run + group.rank())
        batches = []
        for number in range(job.microbatches):
            key = 2 * (run * job.microbatches + number)
            batches.append(
                (
                    [torch.randn(1, TOKENS, DIM) for _ in (0, 1)],
                    [torch.tensor(key + i) for i in (0, 1)],
                )
            )
        exactly = [([x.double() for x in xs], keys) for xs, keys in batches]
        want, _, _ = _train(
            functools.partial(whole, blocks), batches, blocks, job.validate
        )
        got, forward, backward = _train(in_graphs, batches, blocks, job.validate)
        exact, _, _ = _train(
            functools.partial(whole, doubles), exactly, doubles, job.validate
        )
        outcome.errors += _less_exact(got, want, exact)
        outcome.races.append((forward[0], backward[0]))
        outcome.histories.append((forward[1], backward[1]))
        outcome.graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        outcome.objects.append(len(torch._dynamo.graph_bytecode_inputs.keep_alive))
    return outcome


def _less_exact(
    results: list[Tensor], independent: list[Tensor], exact: list[Tensor]
) -> list[str]:
    found = []
    for number, (result, other, reference) in enumerate(
        zip(results, independent, exact, strict=True)
    ):
        try:
            assert_as_exact(result, other, reference, f"result {number}")
        except AssertionError as error:
            found.append(str(error))
    return found


Seen = tuple[list[str], list[str]]


def _train(
    model: Callable[..., list[Tensor]],
    batches: list[tuple[list[Tensor], list[Tensor]]],
    blocks: list[nn.Module],
    validate: bool,
) -> tuple[list[Tensor], Seen, Seen]:
    """Outputs and gradients; races and history of forward, and of backward.

    Args:
        batches: nano-batches and keys of the microbatches that are in flight together.
    """
    batches = [
        ([x.to("ledger").requires_grad_() for x in xs], keys) for xs, keys in batches
    ]
    inputs = [x for xs, _ in batches for x in xs]
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    for parameter in parameters:
        parameter.grad = None
    torch.accelerator.synchronize()
    torch.ops.ledger.reset()
    outputs = [model(*batch) for batch in batches]
    results = [x for both in outputs for x in both]
    if validate:
        with torch.no_grad():
            results += [x for batch in batches for x in model(*batch)]
    forward = torch.ops.ledger.races(), torch.ops.ledger.history()
    torch.ops.ledger.reset()
    for a, b in outputs:
        (a.sum() + (b * b).sum()).backward()
    backward = torch.ops.ledger.races(), torch.ops.ledger.history()
    torch.accelerator.synchronize()
    return (
        [
            x.detach().cpu()
            for x in (*results, *(x.grad for x in (*inputs, *parameters)))
        ],
        forward,
        backward,
    )
