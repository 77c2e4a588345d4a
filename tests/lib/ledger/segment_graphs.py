# SPDX-License-Identifier: BSD-3-Clause
"""Segments on ledger devices: the compiled graphs of two gloo ranks, with the real loop, engine, plans and messages."""

import functools
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, chdir
from dataclasses import dataclass
from typing import NamedTuple
from unittest import mock

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
from tests.lib.plain_blocks import NanoBatchesAndWhole
from torchtitan_cad.integration.pingpong.segment_graph import SegmentGraph
from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.planning.exchange.messages import MostRows
from torchtitan_cad.runtime import steps, traced
from torchtitan_cad.runtime.packing import RowFormat

SHAPE = AttentionShape(2, 1, 16, 4)
TOKENS = 64
DIM = SHAPE.num_heads * SHAPE.head_dim


class Job(NamedTuple):
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
    in_rows: bool = False
    keep: bool = False
    microbatches: int = 1
    recompute: bool = False
    validate: bool = False


class Outcome(NamedTuple):
    """Of one run of a rank: races, history forward and backward, and afterwards ...

    Attributes:
        graphs: graphs that Dynamo had traced.
        objects: streams and events that torch keeps alive for graphs.
    """

    races: list[str]
    forward: list[str]
    backward: list[str]
    graphs: int
    objects: int


class Collective:
    """A transport as over NCCL: a stream of its own, which waits for the current one."""

    name = "ledger"
    buffer_bytes = 2**22

    def __init__(self, group):
        self._group = group
        self._stream = torch.Stream("ledger")

    @staticmethod
    def new_buffer(dtype, rows, width):
        return torch.empty(rows, width, dtype=dtype, device="ledger")

    def prepare(self, exchanges): ...

    def begin(self):
        return 0

    def start(self, messages, routes, phase, call):
        return Pending(
            [
                self._start(message, route)
                for message, route in zip(messages, routes, strict=True)
            ]
        )

    def _start(self, parts, route):
        message = RowFormat(parts).pack(parts, route.rows)
        row_bytes = message.shape[1]
        received = self.new_buffer(message.dtype, route.num_received, row_bytes)
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
        return work, received, message, arrived


@dataclass
class Pending:
    messages: list[tuple]
    """Of every message, the work, rows that are received and sent, and the event after which they are."""

    def wait(self):
        for work, *_, arrived in self.messages:
            work.wait()
            torch.accelerator.current_stream().wait_event(arrived)
        return [received for _, received, *_ in self.messages]

    take = wait

    def release(self): ...


# Steps left out, or done wrong ----------------------------------------------------------------------------------------


def _no_wait(self, way, nano_batch, step, token, key):
    with self.side_streams.sides[nano_batch]:
        return traced.step(token, step, key, self.engine)


def _early(self, way, nano_batch, step, token, key):
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


def _short_chunks(most, row_bytes, _):
    return _chunks(most, row_bytes, 8 * row_bytes.queries_home)


@functools.cache
def _one_buffer(dtype, width):
    return torch.empty(4096, width, dtype=dtype, device="ledger")


def _same_buffer(dtype, rows, width):
    return _one_buffer(dtype, width)[:rows]


WITHOUT = {
    "one chunk": mock.patch.object(MostRows, "chunks", _short_chunks),
    "marks": mock.patch.object(steps, "PendingCall", _Unmarked),
    "a wait": mock.patch.object(SegmentGraph, "_wait", _no_wait),
    "a record in time": mock.patch.object(SegmentGraph, "_exchange", _early),
    "buffers of their own": mock.patch.object(
        Collective, "new_buffer", staticmethod(_same_buffer)
    ),
    "inputs kept alive": mock.patch.object(steps, "PendingCall", _Forgetful),
}


# A rank ---------------------------------------------------------------------------------------------------------------


def run_job(group: dist.ProcessGroup, job: Job) -> list[Outcome]:
    """One rank of a group of two; output and gradients are as exact as those of the same blocks undivided."""
    load()
    from tests.lib.ledger import graphs

    with tempfile.TemporaryDirectory() as folder, chdir(folder), ExitStack() as stack:
        # torch dumps graphs
        # torch 2.14 asks Triton how fast the device's memory is.
        bandwidth = "torch._inductor.analysis.device_info.datasheet_dram_bw_gbs"
        stack.enter_context(mock.patch(bandwidth, return_value=1e3))
        for name in job.without:
            stack.enter_context(WITHOUT[name])
        if job.compiler == "nodes":
            compiler = mock.patch.object(torch, "compile", graphs.compile_for_shuffling)
            stack.enter_context(compiler)
        else:
            from tests.lib.ledger import inductor  # noqa: F401
        try:
            return _run(group, job)
        except torch._dynamo.exc.TorchDynamoException as error:
            # cannot be sent to another process
            raise AssertionError(str(error)) from None


def _run(group: dist.ProcessGroup, job: Job) -> list[Outcome]:
    from tests.lib.ledger import graphs
    from tests.lib.ledger.ranks import OneKernel

    device = torch.device("ledger", 0)
    rank = group.rank()
    blocks = NanoBatchesAndWhole(
        device,
        torch.float32,
        DIM,
        2 * TOKENS if job.in_rows else TOKENS,
        SHAPE,
        seed=0,
        rows=1 if job.in_rows else 2,
        transports=[Collective(group)] * 2,
        microbatches=job.runs * job.microbatches,
        keep=job.keep,
        kernel=OneKernel(),
    )
    for block in blocks.blocks:  # Inductor's norms are not for this device
        block.norms = nn.ModuleList([nn.Identity(), nn.Identity()])

    def prepare(loop):
        loop.traced_on = device
        if job.recompute:
            loop.checkpoint(
                lambda parts: [*map(_recomputed, parts)], whole_blocks=False
            )

    halved = blocks.copied(torch.float32)
    loop = blocks.run_nano_batches(halved, "inductor", rank, prepare)
    outcomes = []
    for run in range(job.runs):
        graphs.shuffle = run
        numbers = range(run * job.microbatches, (run + 1) * job.microbatches)
        exact, whole = (
            _train(blocks.run_whole(copy, rank), copy, numbers, job.validate)[0]
            for copy in (blocks.copied(torch.float64), blocks.copied(torch.float32))
        )
        results, *seen = _train(loop, halved, numbers, job.validate)
        if "buffers of their own" not in job.without:
            for tensors in zip(results, whole, exact, strict=True):
                assert_as_exact(*tensors)
        traced = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        kept = len(torch._dynamo.graph_bytecode_inputs.keep_alive)
        outcomes.append(Outcome(*seen, traced, kept))
    return outcomes


def _recomputed(segment: nn.Module) -> nn.Module:
    def nothing_kept(*args, **kwargs):
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, nothing_kept)
    return checkpoint_wrapper(segment, context_fn=contexts, preserve_rng_state=False)


def _train(
    run: Callable[[int], Tensor],
    blocks: nn.Module,
    numbers: Sequence[int],
    validate: bool,
) -> tuple[list[Tensor], list[str], list[str], list[str]]:
    """Outputs and gradients; races, and histories of forward and of backward.

    Args:
        numbers: of the microbatches that are in flight together.
    """
    ledger = torch.ops.ledger
    blocks.zero_grad()
    torch.accelerator.synchronize()
    ledger.reset()
    outputs = [run(number) for number in numbers]
    results = [*outputs]
    if validate:
        with torch.no_grad():
            results += [run(number) for number in numbers]
    races = ledger.races()
    forward = ledger.history()
    ledger.reset()
    for number, out in enumerate(outputs, start=1):
        (number * out.square().sum()).backward()
    races += ledger.races()
    backward = ledger.history()
    torch.accelerator.synchronize()
    results += [parameter.grad for parameter in blocks.parameters()]
    return [x.detach().cpu() for x in results], races, forward, backward
