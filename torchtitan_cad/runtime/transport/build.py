"""Chooses and builds the transport of a CAD group."""

import torch
import torch.distributed as dist

from torchtitan_cad.runtime.transport.base import Transport
from torchtitan_cad.runtime.transport.collective import CollectiveTransport
from torchtitan_cad.runtime.transport.memory import CpuMemory
from torchtitan_cad.runtime.transport.symmetric import Capacity, SymmetricTransport

TRANSPORTS = ("auto", "symm_mem", "collective")


def build_transport(
    name: str, group: dist.ProcessGroup, device: torch.device, capacity: Capacity | None = None
) -> Transport:
    """The transport called ``name`` over ``group``; all ranks of the group must call it together.

    Raises:
        ValueError: unknown or unavailable transport; names the key ``cad.transport``.
    """
    match name:
        case "auto" | "collective":
            return CollectiveTransport(group)
        case "symm_mem":
            return SymmetricTransport(
                dist.get_process_group_ranks(group),
                group.rank(),
                lambda num_bytes: CpuMemory.allocate(num_bytes, group),
                lambda: group._get_backend(device).options._timeout.total_seconds(),
                capacity,
            )
        case _:
            raise ValueError(f"cad.transport = {name!r}: set cad.transport to one of {', '.join(TRANSPORTS)}")
