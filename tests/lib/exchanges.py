# SPDX-License-Identifier: BSD-3-Clause
"""Exchanges of known rows between ranks, to be run over any transport."""

import itertools
import random
import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.lib import cpu_memory
from torchtitan_cad.planning.exchange.messages import BUFFERS_PER_CALL
from torchtitan_cad.runtime.errors import PeerError
from torchtitan_cad.runtime.packing import RowFormat
from torchtitan_cad.runtime.transport.base import Pending, Route, Routes, Transport
from torchtitan_cad.runtime.transport.build import build_transport

CPU = torch.device("cpu")
BUFFER_BYTES = 2**20
ONE_EACH = np.array([[0, 2], [1, 0]])
"""Rows [sender, receiver]."""
FORMATS: list[list[tuple[tuple[int, ...], torch.dtype]]] = [
    [((2, 4), torch.float32)],
    [((3, 5), torch.bfloat16), ((3,), torch.float32)],
    [((2, 8), torch.float16), ((2, 8), torch.float16)],
    [
        ((4, 4), torch.float64),
        ((4, 4), torch.float64),
        ((4,), torch.float64),
        ((4,), torch.float64),
    ],
]


def random_counts(rng, num_ranks, most: int) -> np.ndarray:
    """Rows [sender, receiver] of one exchange: none from a rank to itself, many pairs without rows, empty ranks."""
    counts = rng.integers(0, most + 1, (num_ranks, num_ranks))
    counts *= rng.random(counts.shape) < 0.6
    sends, receives = rng.random((2, num_ranks)) < 0.85
    return counts * np.outer(sends, receives) * ~np.eye(num_ranks, dtype=bool)


def make_route(counts, rank, rows: Tensor | None, buffer: int = 0) -> Route:
    before = np.cumsum(counts, axis=0) - counts
    most = int(max(counts.sum(axis=0).max(), counts.sum(axis=1).max()))
    return Route(
        "queries",
        rows,
        counts[rank].tolist(),
        counts[:, rank].tolist(),
        before[rank].tolist(),
        most,
        buffer,
    )


def start(transport, parts: list[Tensor], route, phase: str, call: int) -> Pending:
    """Start an exchange of one route."""
    return transport.start([parts], Routes([route]), phase, call)


def late_peer(group, transport) -> str:
    """What rank 0 learns at its next plan, as rank 1 starts nothing."""
    route = make_route(ONE_EACH, group.rank(), None)
    call = transport.begin()
    if group.rank() == 1:
        dist.barrier(group)
        return ""
    part = torch.zeros(sum(route.send_counts), 4, device=transport._memory.own.device)
    start(transport, [part], route, "forward rows", call).wait()
    if part.is_cuda:
        torch.cuda.synchronize()
    try:
        transport.prepare([])
    except PeerError as error:
        return str(error)
    finally:
        dist.barrier(group)
    return "not noticed"


def make_parts(exchange, sender, num_rows) -> list[Tensor]:
    """A rank's rows in an exchange: known to all, different in every exchange."""
    generator = torch.Generator().manual_seed(1000 * exchange + sender)
    kinds = FORMATS[exchange % len(FORMATS)]
    return [
        torch.randn(num_rows, *tail, generator=generator).to(dtype)
        for tail, dtype in kinds
    ]


def chosen_rows(exchange, sender, num_rows) -> Tensor | None:
    """Which rows it sends; in every third exchange all of them in order."""
    if exchange % 3 == 0:
        return None
    generator = torch.Generator().manual_seed(7 * exchange + sender)
    return torch.randint(0, max(1, num_rows), (num_rows,), generator=generator)


def assert_received(rows: list[Tensor], counts, exchange, rank):
    at = 0
    for sender in range(len(counts)):
        first = int(counts[sender, :rank].sum())
        count = int(counts[sender, rank])
        total = int(counts[sender].sum())
        chosen = chosen_rows(exchange, sender, total)
        for got, part in zip(rows, make_parts(exchange, sender, total), strict=True):
            want = part if chosen is None else part[chosen]
            message = f"exchange {exchange}: rows of rank {sender} at rank {rank}"
            assert torch.equal(
                got[at : at + count].cpu(), want[first : first + count]
            ), message
        at += count
    assert at == len(rows[0])


def exchange_at_random(
    group, name, seed, num_exchanges, max_delay_s, device_type="cpu", hosts=None
) -> int:
    """Exchanges of two calls in flight; every rank waits, holds and releases at its own random pace.

    Args:
        hosts: number of every rank's host, by default its own.

    Returns the number of rows received.
    """
    num_ranks = group.size()
    rank = group.rank()
    shared = np.random.default_rng(seed)
    own = random.Random(1000 * seed + rank)
    device = torch.device(device_type)
    if device_type == "cpu":
        cpu_memory.install()
    transport = build_transport(name, group, device, BUFFER_BYTES, hosts=hosts)
    calls: list[tuple[int, deque, Iterator[int]]] = []
    received = 0

    def pause():
        if own.random() < 0.3:
            time.sleep(own.random() * max_delay_s)

    def finish(pending_calls):
        sent, pending = pending_calls.popleft()
        pause()
        messages = pending.wait()
        for looks in range(2):  # nobody may have overwritten them after a while
            for (exchange, counts, row_format), message in zip(
                sent, messages, strict=True
            ):
                assert_received(row_format.unpack(message), counts, exchange, rank)
            if not looks:
                pause()
        pending.release()

    for exchange in range(num_exchanges):
        if not calls or shared.random() < 0.3:
            if len(calls) == 2:
                _, pending_calls, _ = calls.pop(0)
                while pending_calls:
                    finish(pending_calls)
            calls.append(
                (transport.begin(), deque(), itertools.cycle(range(BUFFERS_PER_CALL)))
            )
        call, pending_calls, buffers = calls[int(shared.integers(len(calls)))]
        together = int(shared.integers(1, BUFFERS_PER_CALL + 1))  # messages
        while sum(len(sent) for sent, _ in pending_calls) > BUFFERS_PER_CALL - together:
            finish(pending_calls)
        sent = []
        messages = []
        routes = []
        for number in range(
            exchange * BUFFERS_PER_CALL, exchange * BUFFERS_PER_CALL + together
        ):
            counts = random_counts(
                shared, num_ranks, most=3 + 60 * exchange // num_exchanges
            )
            total = int(counts[rank].sum())
            messages.append(
                [part.to(device) for part in make_parts(number, rank, total)]
            )
            rows = chosen_rows(number, rank, total)
            buffer = next(buffers) if together == 1 else 0
            routes.append(
                make_route(
                    counts,
                    rank,
                    None if rows is None else rows.to(device),
                    buffer=buffer,
                )
            )
            sent.append((number, counts, RowFormat(messages[-1])))
        transport.prepare([Routes(routes)])
        pause()
        pending_calls.append(
            (
                sent,
                transport.start(messages, Routes(routes), f"exchange {exchange}", call),
            )
        )
        received += sum(route.num_received for route in routes)
    for _, pending_calls, _ in calls:
        while pending_calls:
            finish(pending_calls)
    return received


def symmetric(group, timeout_s=60.0, **sizes) -> Transport:
    """``sizes``: those of ``build_transport``, on whose way a busy machine may take longer than ``timeout_s``."""
    cpu_memory.install()
    transport = build_transport("symm_mem", group, CPU, **sizes)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
    return transport
