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
from torchtitan_cad.integration.job import Job
from torchtitan_cad.planning import CostModel, TileAreaCost
from torchtitan_cad.runtime import rates
from torchtitan_cad.runtime.kernels.base import AttentionKernel
from torchtitan_cad.runtime.servers.client import RankRates, ServerPool
from torchtitan_cad.runtime.servers.registry import JobCard, Registry, digest_of

logger = logging.getLogger(__name__)

_STORE_TIMEOUT_S = 10.0


def open_to_servers(
    job: Job,
    ranks: Sequence[int],
    kernel: AttentionKernel,
    cost: CostModel,
    group: dist.ProcessGroup | None,
) -> ServerPool:
    """Publish the job for attention servers, and log how they join. Collective over all ranks of the job.

    Args:
        ranks: global numbers of this rank's CAD group.
        cost: of the plans.
        group: the CAD group on the host; None for one rank.
    """
    rank = dist.get_rank()
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    secret: list[Any] = [
        secrets.randbits(62),
        job.cad.servers_token or secrets.token_urlsafe(9),
    ]
    dist.broadcast_object_list(secret)
    number, token = secret
    timeout = timedelta(seconds=_STORE_TIMEOUT_S)
    # A store of its own: waits for servers do not block what else this process asks the job's store.
    store = dist.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timeout
    )
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
            f"CAD takes attention servers: torchtitan-cad serve --join {host}:{port} --token {token}"
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
