# SPDX-License-Identifier: BSD-3-Clause
"""Whether rows are there when their word is: the GPU writes both into host memory, where the CPU checks every byte.

The put kernel writes rows into pinned memory of the host, over PCIe, and the post kernel sets the word with release
order at the system's scope, as in a job. The CPU looks at the word until it has the round's number, and then compares
all rows. The rows differ in every word of 8 bytes from those that were there before. Rounds are launched in batches
behind a gate, so that the post follows the put at once on the device. Every round of a batch has memory of its own.

This is a litmus test: it can find a wrong order, and not prove a right one. The CPU compares a microsecond or so after
it has seen the word. On the CPU Triton's interpreter runs the kernels in a thread, which stands for the device.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from bench.gpu.parts import Emit
from torchtitan_cad.runtime.packing import RowFormat
from torchtitan_cad.runtime.triton import put, signals

GATE_CYCLES = 30_000_000
"""The device sleeps some 15 ms while the host launches a batch."""
PATIENCE_S = 15.0
"""For a word to arrive."""
MULTIPLIER = 0x9E3779B97F4A7C15
"""Odd, so that the rows of any two rounds differ in every word."""
WORDS_PER_LINE = 16
"""int64 from one word of a batch to the next, so that each has a cache line of its own"""


class Sizes(NamedTuple):
    """Sizes of a run.

    Attributes:
        row_shapes: rows and int64 elements of a row; the shapes take turns by batches.
        batch: rounds of a batch.
        seconds: duration; at least one batch of every shape runs.
    """

    row_shapes: tuple[tuple[int, int], ...]
    batch: int
    seconds: float


CUDA = Sizes(((64, 32), (1024, 16), (96, 256)), 48, 9.0)
CPU = Sizes(((6, 4), (3, 16)), 2, 0.0)


class Mismatch(NamedTuple):
    """What the CPU has found in a round instead of its rows.

    Attributes:
        row: the first row with wrong bytes.
        num_bytes: wrong bytes of the round.
        mended: whether the rows were right a moment later.
    """

    round: int
    row: int
    num_bytes: int
    mended: bool


class Litmus:
    """Rows of one shape and a word for every round of a batch, in memory of the host.

    Attributes:
        rounds: rounds checked so far.
        mismatches: those of them whose rows were wrong when their word was there.
    """

    def __init__(
        self, num_rows: int, row_words: int, batch: int, device: torch.device
    ) -> None:
        on_gpu = device.type == "cuda"
        self._device = device
        self._batch = batch
        self.rounds, self.mismatches = 0, list[Mismatch]()
        self.round_bytes = 8 * num_rows * row_words
        host = torch.zeros(
            batch, num_rows, row_words, dtype=torch.int64, pin_memory=on_gpu
        )
        words = torch.zeros(batch, WORDS_PER_LINE, dtype=torch.int64, pin_memory=on_gpu)
        self._received, self._words = host.numpy(), words.numpy()
        pattern = np.random.default_rng(0).integers(
            0, 2**63, (num_rows, row_words), dtype=np.int64
        )
        self._pattern = pattern.view(np.uint64)
        self._keep_alive = (host, words)
        self._source = torch.from_numpy(pattern).to(device)
        self._sent = torch.empty_like(self._source)
        self._blocks = put.Blocks.of(
            [put.split_into_blocks([num_rows], [0])], [None], device
        )
        self._host_addresses, self._word_addresses = (
            [torch.tensor([x[number].data_ptr()]).to(device) for number in range(batch)]
            for x in (host, words)
        )
        self._peers = torch.zeros(1, dtype=torch.int32, device=device)
        self._failed = torch.zeros(1, dtype=torch.int64, device=device)

    def run_batch(self) -> None:
        """Launch a batch of rounds and check them in order.

        Raises TimeoutError if a word does not arrive.
        """
        numbers = range(self.rounds + 1, self.rounds + 1 + self._batch)
        with self._launched(numbers):
            expected = [self._expected(number) for number in numbers]
            for number, rows in zip(numbers, expected, strict=True):
                self._check(number, rows)

    @contextlib.contextmanager
    def _launched(self, numbers: Sequence[int]) -> Iterator[None]:
        """Launch rounds; at the end, wait until the device has done them."""
        if self._device.type == "cuda":
            torch.cuda._sleep(GATE_CYCLES)
            for number in numbers:
                self._launch(number)
            yield
            torch.cuda.synchronize()
            return
        with ThreadPoolExecutor(1) as stand_in:
            launched = [stand_in.submit(self._launch, number) for number in numbers]
            try:
                yield
            finally:  # its error comes before that of a word that has not arrived
                for future in launched:
                    future.result()

    def _launch(self, number: int) -> None:
        torch.add(self._source, _signed(number * MULTIPLIER), out=self._sent)
        self.send(number)

    def send(self, number: int) -> None:
        """Launch the put of a round's rows and the post of its word."""
        self.put(number)
        self.post(number)

    def put(self, number: int) -> None:
        addresses = self._host_addresses[number % self._batch]
        put.put_rows(
            [([self._sent], RowFormat.of([self._sent]))],
            self._blocks,
            [0],
            addresses,
            self._failed,
        )

    def post(self, number: int) -> None:
        addresses = self._word_addresses[number % self._batch]
        signals.post(self._peers, addresses, 0, number, self._failed)

    def _expected(self, number: int) -> np.ndarray:
        return (self._pattern + np.uint64(number * MULTIPLIER % 2**64)).view(np.int64)

    def _check(self, number: int, expected: np.ndarray) -> None:
        """Wait for the word of a round and compare its rows."""
        place = number % self._batch
        received = self._received[place]
        word = self._words[place]
        deadline = time.monotonic() + PATIENCE_S
        while word[0] != number:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the word of round {number} is {word[0]} after {PATIENCE_S:.0f} s"
                )
        if not np.array_equal(received, expected):
            found = received.copy()  # what differs by now, which may be nothing
            wrong = found.view(np.uint8) != expected.view(np.uint8)
            rows = np.flatnonzero(wrong.any(axis=1))
            time.sleep(0.01)
            mended = np.array_equal(received, expected)
            self.mismatches.append(
                Mismatch(
                    number, int(rows[0]) if len(rows) else -1, int(wrong.sum()), mended
                )
            )
        self.rounds += 1


def _signed(value: int) -> int:
    """The int64 with the lowest 64 bits of ``value``."""
    return (value + 2**63) % 2**64 - 2**63


def measure(device: str, emit: Emit, make: Callable[..., Litmus] = Litmus) -> None:
    """Rounds, rows and bytes that were checked, and those that were wrong. Raises RuntimeError if any was."""
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    sizes = CUDA if device == "cuda" else CPU
    litmuses = [make(*shape, sizes.batch, where) for shape in sizes.row_shapes]
    begin = time.monotonic()
    while True:
        for litmus in litmuses:
            litmus.run_batch()
        seconds = time.monotonic() - begin
        if seconds >= sizes.seconds or any(litmus.mismatches for litmus in litmuses):
            break
    mismatches = [
        mismatch._asdict() for litmus in litmuses for mismatch in litmus.mismatches
    ]
    emit("rounds", sum(litmus.rounds for litmus in litmuses))
    emit(
        "rows",
        sum(
            litmus.rounds * shape[0]
            for litmus, shape in zip(litmuses, sizes.row_shapes, strict=True)
        ),
    )
    emit(
        "bytes_checked", sum(litmus.rounds * litmus.round_bytes for litmus in litmuses)
    )
    emit("seconds", seconds)
    emit("mismatches", len(mismatches))
    if mismatches:
        emit("first_mismatches", mismatches[:10])
        raise RuntimeError(
            f"{len(mismatches)} rounds had other rows than were sent when their word was there"
        )
