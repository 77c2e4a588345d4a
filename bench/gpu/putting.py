# SPDX-License-Identifier: BSD-3-Clause
"""The put kernel (runtime/triton/put.py): this process sends rows to itself.

Rows are read from and written to the same device's memory, so rates say what the kernel's programs can move, not what
NVLink can. On the CPU Triton's interpreter runs the kernel.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from torchtitan_cad.runtime.packing import RowFormat
from torchtitan_cad.runtime.triton import put
from torchtitan_cad.runtime.triton.rows import WIDTH

ROW = (32, 128)
"""Heads and head dim of a row."""


class Putting:
    """Rows in random order, bf16, and memory for them.

    Attributes:
        num_bytes: read and written by a put.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.part = torch.randn(num_rows, *ROW, device=device).bfloat16()
        self._message = [self.part], RowFormat([self.part])
        self.num_bytes = 2 * self.part.nbytes
        self.target = torch.zeros(self.part.nbytes, dtype=torch.uint8, device=device)
        order = torch.randperm(num_rows).to(device)
        self._blocks = put.Blocks.of(
            [put.split_into_blocks([num_rows], [0])], [order], device
        )
        self.addresses = torch.tensor([self.target.data_ptr()]).to(device)
        self.failed = torch.zeros(1, dtype=torch.int64, device=device)

    def run(self, multiprocessors: Tensor | None = None) -> None:
        """Put the rows; ``multiprocessors`` is an argument of ``put_rows``."""
        put.put_rows(
            [self._message],
            self._blocks,
            [0],
            self.addresses,
            self.failed,
            multiprocessors,
        )

    def multiprocessors(self) -> Counter[int]:
        """The multiprocessors on which a put's programs run on the current stream, and how many run on each."""
        tiles = len(self._blocks.table) * triton.cdiv(
            self.part[0].nbytes, 8 * WIDTH.value
        )
        numbers = torch.zeros(
            min(put.PROGRAMS, tiles), dtype=torch.int32, device=self.part.device
        )
        self.run(numbers)
        return Counter(numbers.tolist())


@contextlib.contextmanager
def programs(most: int) -> Iterator[None]:
    """Limits the programs of a put to ``most`` in this context."""
    before = put.PROGRAMS
    put.PROGRAMS = most
    try:
        yield
    finally:
        put.PROGRAMS = before
