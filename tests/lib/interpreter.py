# SPDX-License-Identifier: BSD-3-Clause
"""Triton kernels on the CPU: Triton's interpreter, which must be chosen before triton is imported, so in processes."""

import os
import sys
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from tests.lib.cpu_memory import CpuMemory
from torchtitan_cad.runtime import triton
from torchtitan_cad.runtime.transport.base import NearRanks
from torchtitan_cad.runtime.transport.far import FarRanks, transfer_over
from torchtitan_cad.runtime.transport.symmetric import SymmetricTransport


def interpreted_memory(num_bytes, group):
    """The memory for devices, in memory that CPU ranks share; an interpreted kernel looks some 3000 times a second."""
    from torchtitan_cad.runtime.transport.cuda_memory import DeviceMemory

    near = NearRanks(group, range(group.size()), group.size())
    shared = CpuMemory.share(CpuMemory.reserve(num_bytes, torch.device("cpu")), near)
    dist.barrier(group)  # until all have opened it
    addresses = [buffer.data_ptr() for buffer in shared.buffers.values()]
    return DeviceMemory(shared.own, addresses, None, owner=shared)


def interpreted_transport(
    group, buffer_bytes, *, timeout_s=30.0, hosts=None
) -> SymmetricTransport:
    """The transport for devices, over such memory; a global rank is 40 more than that in the group."""
    allocate = partial(interpreted_memory, group=group)
    far = None
    ranks = range(40, 40 + group.size())
    rank = group.rank()
    if hosts is not None:
        near = [peer for peer, host in enumerate(hosts) if host == hosts[rank]]
        far = FarRanks(rank, near, ranks, transfer_over(group), torch.device("cpu"))
    return SymmetricTransport(
        ranks, rank, allocate, lambda: timeout_s, buffer_bytes, far=far
    )


def interpret(*, everywhere: bool = False):
    """Makes this process interpret Triton kernels.

    Args:
        everywhere: the runtime takes its kernels on the CPU too, as it does on CUDA.
    """
    assert "triton" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"
    _round_as_devices_do()
    _loop_over_numbers()
    if everywhere:
        triton.runs_on = lambda device: True


def _round_as_devices_do():
    """The interpreter cuts off what does not fit into bfloat16; devices round to the nearest."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_or_round(data, source, target, mode):
        if (source, target) == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.array(data, np.float32)).bfloat16()
            return rounded.view(torch.int16).numpy().view(np.uint16)
        return convert(data, source, target, mode)

    interpreter._convert_float = convert_or_round


def _loop_over_numbers():
    """Triton 3.6 makes the bounds of loops by converting arrays of one number, which numpy 2.4 no longer does."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_with_index
