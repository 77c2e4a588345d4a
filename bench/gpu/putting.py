"""The put kernel (runtime/triton/put.py) alone: this process sends rows to itself.

Rows are read from and written to the same device's memory, so rates say what the kernel's programs can move, not what
NVLink can. On the CPU Triton's interpreter runs the kernel.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from torchtitan_cad.runtime.triton import put

ROW = (32, 128)
"""Heads and head dim of a row."""


class Putting:
    """Rows in random order, bf16, and memory for them.

    Attributes:
        memory: "symmetric" or "plain"; if it should be symmetric and is not, why.
        num_bytes: read and written by a put.
    """

    def __init__(self, num_rows: int, device: torch.device, *, symmetric: bool = False) -> None:
        self.part = torch.randn(num_rows, *ROW, device=device).bfloat16()
        self.rows = torch.randperm(num_rows).to(device)
        self.row_bytes = self.part[0].nbytes
        self.num_bytes = 2 * self.part.nbytes
        self.target, self.memory = torch.zeros(self.part.nbytes, dtype=torch.uint8, device=device), "plain"
        if symmetric:
            self.target, self.memory = _symmetric(self.target)
        self.blocks = put.split_into_blocks([num_rows], [0]).to(device)
        self.addresses = torch.tensor([self.target.data_ptr()]).to(device)
        self.failed = torch.zeros(1, dtype=torch.int64, device=device)

    def run(self) -> None:
        put.put_rows([self.part], [0], self.rows, self.blocks, self.addresses, 0, self.row_bytes, self.failed)

    def received(self) -> Tensor:
        """The rows that were written."""
        return self.target.view(torch.bfloat16).view_as(self.part)


@contextlib.contextmanager
def programs(most: int) -> Iterator[None]:
    """Limits the programs of a put to ``most`` in this context."""
    before, put.PROGRAMS = put.PROGRAMS, most
    try:
        yield
    finally:
        put.PROGRAMS = before


def _symmetric(plain: Tensor) -> tuple[Tensor, str]:
    """Symmetric memory of this rank alone, as large as ``plain``; or that, with the reason."""
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        memory = symm_mem._SymmetricMemory.empty_strided_p2p(plain.shape, (1,), torch.uint8, plain.device)
        symm_mem.rendezvous(memory, dist.group.WORLD)
    except Exception as error:  # whatever this system lacks
        return plain, f"plain: {type(error).__name__}: {error}"[:500]
    return memory, "symmetric"
