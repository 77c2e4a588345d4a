# SPDX-License-Identifier: BSD-3-Clause
"""Where a job's ranks run, and how fast the links between them are."""

import os
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from torchtitan_cad.planning import LayerTimes
from torchtitan_cad.runtime import rates
from torchtitan_cad.runtime.transport.base import Transport


def device_bytes(device: torch.device, ranks_of_host: int) -> float:
    """Return the memory of a rank's device; on CPU an equal part of its host's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks_of_host


def ranks_per_host(hosts: Sequence[int]) -> int | None:
    """Count the neighbouring ranks that share a host; None if they are not as many everywhere, are one, or all."""
    count = hosts.count(hosts[0])
    even = (
        list(hosts) == [rank // count for rank in range(len(hosts))]
        and len(hosts) % count == 0
    )
    return count if even and 1 < count < len(hosts) else None


def measure_times(
    compute: tuple[float, float],
    transport: Transport,
    hosts: tuple[int, ...],
    rank: int,
    device: torch.device,
    group: dist.ProcessGroup,
    *,
    overlaps: bool,
) -> LayerTimes:
    """Measure the links, and return the slowest rank's times.

    All ranks of the transport, which are those of the gloo ``group``, must call it together.

    Args:
        compute: this rank's seconds of attention per unit of cost, and of a layer's linear work per token.
    """
    unit, linear = rates.slowest(list(compute), group)
    host = np.array(hosts)
    together = host[:, None] == host
    others = ~np.eye(len(host), dtype=bool)
    links = [
        rates.link_rate(transport, rank, sends, device=device, group=group)
        if sends.any()
        else None
        for sends in (together & others, ~together)
    ]
    (inside, _), (between, seconds) = (
        link or next(filter(None, links)) for link in links
    )
    return LayerTimes(
        unit,
        linear,
        inside,
        between_hosts=between,
        exchange=seconds,
        overlaps=overlaps,
        hosts=hosts,
    )
