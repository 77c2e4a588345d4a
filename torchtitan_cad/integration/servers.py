# SPDX-License-Identifier: BSD-3-Clause
"""Opening a job to attention servers (``cad.servers``)."""

import logging
import os
import secrets
from typing import Any

import torch.distributed as dist

from torchtitan_cad import __version__
from torchtitan_cad.integration.config import Cad
from torchtitan_cad.integration.job import Job
from torchtitan_cad.planning import TileAreaCost
from torchtitan_cad.runtime import rates
from torchtitan_cad.runtime.errors import first_sentence
from torchtitan_cad.runtime.kernels.base import AttentionKernel
from torchtitan_cad.runtime.servers.client import ServerPool
from torchtitan_cad.runtime.servers.registry import JobCard, Registry, open_store

logger = logging.getLogger(__name__)


def open_to_servers(
    job: Job,
    kernel: AttentionKernel,
    cost: TileAreaCost,
    group: dist.ProcessGroup | None,
) -> ServerPool:
    """Publish the job for attention servers, in a store that rank 0 hosts, and log how they join.

    Collective over all ranks of the job. Raises ValueError if rank 0 cannot have the port, or another cannot reach it.

    Args:
        cost: of the plans.
        group: the CAD group on the host; None for one rank.
    """
    rank = dist.get_rank()
    number, token, store = _open_store(job.cad, hosts=rank == 0)
    registry = Registry(store, number, token)
    if rank == 0:
        dtype = str(job.dtype).removeprefix("torch.")
        registry.publish(JobCard(dtype, job.shape, cost.granularity), __version__)
        logger.info(
            f"CAD takes attention servers: torchtitan-cad serve --join {store.host}:{store.port} --token {token}"
        )
    unit = rates.attention_seconds(kernel, job.shape, job.dtype, job.device, cost)
    if group is not None:
        (unit,) = rates.slowest([unit], group)
    share = 1 / (job.topology.num_groups * job.topology.tp)
    return ServerPool(registry, rank, unit, share)


def _open_store(cad: Cad, *, hosts: bool) -> tuple[int, str, dist.TCPStore]:
    """Return number and token of this start of the job, and a client of the store in which servers find it.

    torchrun's own store has another port at every start of a job, or what the last start has left in it.

    Args:
        hosts: whether this rank, the first, hosts the store.
    """
    store = _tcp_store(cad.servers_port, hosts=True) if hosts else None
    opened: list[Any] = [
        secrets.randbits(62),
        cad.servers_token or secrets.token_urlsafe(9),
        store.port if store else 0,
    ]
    dist.broadcast_object_list(opened)
    number, token, port = opened
    return number, token, store or _tcp_store(port, hosts=False)


def _tcp_store(port: int, *, hosts: bool) -> dist.TCPStore:
    host = os.environ["MASTER_ADDR"]
    try:
        return open_store(host, port, hosts=hosts)
    except RuntimeError as error:
        raise ValueError(
            f"cad.servers_port = {port} of {host}: {first_sentence(error)}; set another that is free and open to all "
            "ranks, or 0 for any that is free"
        ) from error
