"""All ranks of a CAD group as threads of one process: real engines and tables, mailboxes instead of a network."""

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
TIMEOUT_S = 60


class ThreadTransport:
    """A ``Transport`` between threads. ``max_delay_s`` delays every message by a random time."""

    name = "threads"

    def __init__(self, rank: int, mailboxes: dict[tuple[int, int], queue.Queue], max_delay_s: float = 0.0) -> None:
        self.rank, self.mailboxes, self.max_delay_s = rank, mailboxes, max_delay_s
        self.num_ranks = int(len(mailboxes) ** 0.5)
        self.rows_sent = 0

    def start(self, message: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], phase: str):
        assert message.shape[0] == sum(send_counts)
        for peer, rows in enumerate(message.split(list(send_counts))):
            if self.max_delay_s:
                time.sleep(random.random() * self.max_delay_s)
            self.mailboxes[self.rank, peer].put((phase, rows.clone()))
            self.rows_sent += rows.shape[0]
        return _ThreadPending(self, list(recv_counts), phase)


class _ThreadPending:
    def __init__(self, transport: ThreadTransport, recv_counts: list[int], phase: str) -> None:
        self.transport, self.recv_counts, self.phase = transport, recv_counts, phase

    def wait(self) -> Tensor:
        received = []
        for peer, count in enumerate(self.recv_counts):
            phase, rows = self.transport.mailboxes[peer, self.transport.rank].get(timeout=TIMEOUT_S)
            assert phase == self.phase, f"rank {peer} is in '{phase}', rank {self.transport.rank} in '{self.phase}'"
            assert rows.shape[0] == count, f"{phase}: rank {peer} sent {rows.shape[0]} rows, expected {count}"
            received.append(rows)
        return torch.cat(received)


def thread_transports(num_ranks: int, max_delay_s: float = 0.0) -> list[ThreadTransport]:
    mailboxes: dict[tuple[int, int], queue.Queue] = {
        (a, b): queue.Queue() for a in range(num_ranks) for b in range(num_ranks)
    }
    return [ThreadTransport(rank, mailboxes, max_delay_s) for rank in range(num_ranks)]


def run_ranks(num_ranks: int, body: Callable[[int], T]) -> list[T]:
    """``body(rank)`` on one thread per rank; the first error is raised."""
    barrier = threading.Barrier(num_ranks)

    def start(rank: int) -> T:
        barrier.wait(TIMEOUT_S)
        return body(rank)

    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(start, rank) for rank in range(num_ranks)]
        return [future.result(timeout=TIMEOUT_S) for future in futures]
