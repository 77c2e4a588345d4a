# SPDX-License-Identifier: BSD-3-Clause
"""Opening a job to attention servers (``cad.servers``)."""

import dataclasses
import logging
import os
import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torchtitan_cad import __version__
from torchtitan_cad.integration.config import Cad
from torchtitan_cad.integration.job import Job
from torchtitan_cad.planning import TileAreaCost
from torchtitan_cad.runtime import rates
from torchtitan_cad.runtime.errors import first_sentence
from torchtitan_cad.runtime.kernels.base import AttentionKernel
from torchtitan_cad.runtime.servers.client import RankRates, ServerPool
from torchtitan_cad.runtime.servers.registry import JobCard, Registry, digest_of

logger = logging.getLogger(__name__)

_STORE_TIMEOUT_S = 10.0


def open_to_servers(
    job: Job,
    ranks: Sequence[int],
    kernel: AttentionKernel,
    cost: TileAreaCost,
    group: dist.ProcessGroup | None,
) -> ServerPool:
    """Publish the job for attention servers, in a store that rank 0 hosts, and log how they join.

    Collective over all ranks of the job. Raises ValueError, on all of them, if rank 0 cannot have the port.

    Args:
        ranks: global numbers of this rank's CAD group.
        cost: of the plans.
        group: the CAD group on the host; None for one rank.
    """
    rank = dist.get_rank()
    number, token, store = _open_store(job.cad, hosts=rank == 0)
    registry = Registry(store, token)
    if rank == 0:
        card = JobCard(
            job=number,
            version=__version__,
            dtype=str(job.dtype).removeprefix("torch."),
            shape=dataclasses.asdict(job.shape),
            ranks=dist.get_world_size(),
            digest=digest_of(token, number),
        )
        registry.open_job(card)
        logger.info(
            f"CAD takes attention servers: torchtitan-cad serve --join {store.host}:{store.port} --token {token}"
        )
    measured = [
        rates.attention_seconds(kernel, job.shape, job.dtype, job.device, of_cost)
        for of_cost in (TileAreaCost(), cost)
    ]
    if group is not None:
        measured = rates.slowest(measured, group)
    groups = job.topology.num_groups * job.topology.tp
    return ServerPool(
        registry,
        number,
        rank,
        group=min(ranks),
        rates=RankRates(measured[0], measured[1], 1 / groups),
        pinned=job.device.type == "cuda",
    )


def _open_store(cad: Cad, *, hosts: bool) -> tuple[int, str, dist.TCPStore]:
    """Return number and token of this start of the job, and a client of the store in which servers find it.

    torchrun's own store has another port at every start of a job, or what the last start has left in it.

    Args:
        hosts: whether this rank, the first, hosts the store.
    """
    host = os.environ["MASTER_ADDR"]
    number = secrets.randbits(62)
    token = cad.servers_token or secrets.token_urlsafe(9)
    port = cad.servers_port
    reason = ""
    if hosts:
        try:
            store = _tcp_store(host, port, hosts=True)
            port = store.port
        except RuntimeError as error:
            reason = first_sentence(error)
    opened: list[Any] = [number, token, port, reason]
    dist.broadcast_object_list(opened)
    number, token, port, reason = opened
    if reason:
        raise ValueError(
            f"cad.servers_port = {port} of {host} cannot be had ({reason}); set another, or 0 for any that is free"
        )
    if hosts:
        return number, token, store
    try:
        return number, token, _tcp_store(host, port, hosts=False)
    except RuntimeError as error:
        raise ValueError(
            f"cad.servers_port = {port} of {host} cannot be reached ({first_sentence(error)}); open it to all ranks"
        ) from error


def _tcp_store(host: str, port: int, *, hosts: bool) -> dist.TCPStore:
    return dist.TCPStore(
        host,
        port,
        is_master=hosts,
        wait_for_workers=False,
        timeout=timedelta(seconds=_STORE_TIMEOUT_S),
    )
