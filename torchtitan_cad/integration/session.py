# SPDX-License-Identifier: BSD-3-Clause
"""State of one training process with CAD: groups, engine, planners, statistics.

torchtitan calls the hooks of a TrainSpec one by one and passes nothing between them, so they meet here. There is one
Trainer per process, hence one session.
"""

import itertools
import logging
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn

from torchtitan_cad.integration.engines import (
    Ticks,
    build_engines,
    kept_bytes,
    kernel_shape,
)
from torchtitan_cad.integration.gathering import gather_objects, new_host_group
from torchtitan_cad.integration.host_tensor import HostTensor
from torchtitan_cad.integration.job import Job
from torchtitan_cad.integration.loading.batch_planner import (
    KEY_STEP,
    BatchPlanner,
    PlannedBatch,
)
from torchtitan_cad.integration.loading.documents import OWN_POSITIONS
from torchtitan_cad.integration.loading.loader import JOIN_S, Loader, PlanningLoader
from torchtitan_cad.integration.loading.placement import Placement
from torchtitan_cad.integration.machine import (
    device_bytes,
    measure_times,
    ranks_per_host,
)
from torchtitan_cad.integration.report.statistics import StepStatistics
from torchtitan_cad.integration.room import (
    RankParts,
    active_parameters,
    blocks_of,
    room_of,
)
from torchtitan_cad.integration.servers import open_to_servers
from torchtitan_cad.integration.topology import Topology
from torchtitan_cad.planning import LayerTimes, TileAreaCost, warm_up
from torchtitan_cad.planning.model.batch import BatchShape
from torchtitan_cad.planning.placement.place import warm_up_placement
from torchtitan_cad.runtime import rates, triton
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.hosts import host_name, number_hosts
from torchtitan_cad.runtime.kernels.select import get_kernel
from torchtitan_cad.runtime.liveness import PeerMonitor, store_of_attempt
from torchtitan_cad.runtime.servers.client import ServerPool
from torchtitan_cad.runtime.transport.base import Transport, gather
from torchtitan_cad.runtime.transport.build import build_transport

logger = logging.getLogger(__name__)


class CadSession:
    """See the module's docstring. ``build`` completes it, when the model is parallelized."""

    times: LayerTimes | None = None
    _group: dist.ProcessGroup | None = None
    _ticks: Ticks | None = None
    _loader: PlanningLoader | None = None
    _servers: ServerPool | None = None
    _placement: Placement | None = None
    _batches = 0

    def __init__(self, job: Job) -> None:
        self.job = job
        self.cad = job.cad
        self.topology = job.topology
        self.device = job.device
        self.rank = dist.get_rank()
        self.ranks = self.topology.group_ranks(self.rank)
        self.group_rank = self.topology.group_rank(self.rank)
        self.statistics = StepStatistics()
        self._engines: list[CoreAttentionEngine] = []
        self._validated: deque[PlannedBatch] = deque()
        if self.redistributes:
            warm_up_placement()
        host_names = [*gather(host_name(), None).values()]
        self.hosts = number_hosts([host_names[rank] for rank in self.ranks])
        self._device_bytes = device_bytes(
            self.device, host_names.count(host_names[self.rank])
        )
        self.monitor = self._start_monitor(host_names)
        self._train_group = new_host_group(self.ranks, job.planning_timeout_s)
        self._config = self.cad.planner_config(self.topology)
        if self._config.ranks_per_node is None:
            nodes = ranks_per_host(self.hosts)
            self._config = replace(self._config, ranks_per_node=nodes)
        self.kernel = get_kernel(
            self.cad.kernel,
            self.device,
            kernel_shape(job.kinds),
            group=self._train_group,
        )
        for kind in job.kinds:
            self.kernel.check(job.dtype, kind.shape)
        if self.cad.servers:
            cost = TileAreaCost(self._config.cost_tile)
            self._servers = open_to_servers(
                job, self.kernel, cost, group=self._train_group
            )
        if self.redistributes:
            self._placement = self._build_placement()

    @property
    def redistributes(self) -> bool:
        """Tell whether tokens of training batches may get other homes, or microbatches, than the loader's."""
        in_pipeline = (
            self.topology.pp > 1 and self.job.microbatches * self.job.accumulation > 1
        )
        return self.cad.placement != "loader" and (
            in_pipeline or self.topology.dp * self.topology.cp > 1
        )

    @property
    def engine(self) -> CoreAttentionEngine:
        """Executes core attention of the first kind; there is none before ``build``."""
        return self._engines[0]

    @cached_property
    def _training(self) -> BatchPlanner:
        """Plans ahead, in a thread."""
        nano_batches = self.cad.nano_batches
        return BatchPlanner(
            self._train_group,
            self.ranks,
            self.topology,
            config=self._config,
            kinds=self.job.kinds,
            engines=self._engines,
            nano_batches=nano_batches,
            times=self.times,
            keys=itertools.count(0, KEY_STEP * nano_batches),
            placement=self._placement,
            servers=self._servers,
            pools=self._ticks.training.pools if self._ticks else (),
        )

    @cached_property
    def validation(self) -> BatchPlanner:
        """Plans on the fly. Only jobs that validate have its group, as one of gloo wakes a thread every 10 ms."""
        nano_batches = self.cad.nano_batches
        return replace(
            self._training,
            group=new_host_group(self.ranks, self.job.planning_timeout_s),
            keys=itertools.count(nano_batches, KEY_STEP * nano_batches),
            placement=None,
            servers=None,
            pools=self._ticks.validation.pools if self._ticks else (),
        )

    # Set-up -----------------------------------------------------------------------------------------------------------

    def _start_monitor(self, host_names: Sequence[str]) -> PeerMonitor:
        return PeerMonitor(
            store_of_attempt(dist.distributed_c10d._get_default_store()),
            self.rank,
            dist.get_world_size(),
            group=self.ranks,
            host_ranks=[
                rank
                for rank, name in enumerate(host_names)
                if name == host_names[self.rank]
            ],
            launcher=os.getppid() if dist.is_torchelastic_launched() else 0,
            interval_s=self.cad.heartbeat_seconds,
            stall_s=self.job.step_timeout_s / 2,
        )

    def _build_placement(self) -> Placement:
        world = range(dist.get_world_size())
        same_place = [
            rank for rank in world if self.topology.group_rank(rank) == self.group_rank
        ]
        replicas = new_host_group(same_place, self.job.planning_timeout_s)
        nodes = gather_objects(self._config.ranks_per_node, replicas, "set-up")
        if len({*nodes}) > 1:
            # stages lie on hosts differently
            self._config = replace(self._config, ranks_per_node=None)
        return Placement(
            self._train_group,
            replicas,
            self.topology,
            rank=self.group_rank,
            config=self._config,
            kinds=self.job.kinds,
            strict=self.cad.placement == "balanced",
        )

    def build(
        self,
        parts: RankParts,
        ticks: Ticks | None = None,
    ) -> CoreAttentionEngine:
        """Build the transport, the engines and the planners; returns the first engine. Collective over all ranks.

        Args:
            parts: of the model, that this rank runs; the mean parameters of blocks stand for a layer's linear work.
            ticks: of a pipeline in ticks, for which batches are then planned.
        """
        transport = None
        if len(self.ranks) > 1:
            self._group = cad_group(self.topology, self.job.start_timeout_s)
            transport = self._build_transport(self._group)
        blocks = blocks_of(parts.modules)
        room = room_of(parts, self.job, self._device_bytes)
        kept = kept_bytes(
            self.cad.backward, room, self._train_group, in_ticks=ticks is not None
        )
        if self.cad.tolerance == "auto" and transport is not None:
            times = replace(self._measure_times(transport, blocks), kept_bytes=kept)
            # groups that choose the same homes take the times of the first
            replicas = None if self._placement is None else self._placement.replicas
            self.times = gather_objects(times, replicas, "set-up")[0]
            logger.info(f"CAD plans by time: {self.times.describe()}")
        self._engines = build_engines(
            self.job.kinds,
            ticks,
            kernel=self.kernel,
            transport=transport,
            rank=self.group_rank,
            device=self.device,
            kept_bytes=kept,
        )
        self._ticks = ticks
        for engine in self._engines:
            engine.servers = self._servers
        return self.engine

    def _measure_times(
        self, transport: Transport, blocks: Sequence[nn.Module]
    ) -> LayerTimes:
        """Measure how fast this machine is. Collective over the group.

        A pipeline stage without blocks counts on the linear work of the others.
        """
        assert self._train_group is not None
        cost = TileAreaCost(self._config.cost_tile)
        dtype = self.job.dtype
        unit = rates.attention_seconds(
            self.kernel, self.job.shape, dtype, device=self.device, cost=cost
        )
        linear = 0.0
        if blocks:
            active = active_parameters(blocks, self.job.experts_per_token)
            count = int(active) // len(blocks) // self.topology.tp
            matrix = next(
                parameter for parameter in blocks[0].parameters() if parameter.ndim > 1
            )
            width = max(matrix.shape[-2:])
            linear = rates.linear_seconds(count, width, dtype, device=self.device)
        return measure_times(
            (unit, linear),
            transport,
            self.hosts,
            rank=self.group_rank,
            device=self.device,
            group=self._train_group,
            overlaps=self.cad.nano_batches == 2,
        )

    def _build_transport(self, group: dist.ProcessGroup) -> Transport:
        if triton.runs_on(self.device):
            from torchtitan_cad.runtime.triton.warm_up import warm_up

            for shape in dict.fromkeys(kind.shape for kind in self.job.kinds):
                warm_up(shape, self.job.dtype, self.device)
        transport = build_transport(
            self.cad.transport,
            group,
            self.device,
            buffer_bytes=self.cad.buffer_bytes,
            agreement=self._train_group,
            hosts=self.hosts,
            calls_in_flight=self.cad.nano_batches,
        )
        logger.info(f"CAD exchanges rows by {transport.description}")
        return transport

    def wrap_loader(self, loader: Loader) -> PlanningLoader:
        """Wrap the training loader by one that plans ahead of training."""
        self._loader = PlanningLoader(
            loader,
            lambda: self._training,
            documents=self.job.documents,
            microbatches=self.job.microbatches,
            accumulation=self.job.accumulation,
            snapshot=self.job.checkpoints,
            on_batch=self._on_batch,
        )
        return self._loader

    # While training ---------------------------------------------------------------------------------------------------

    def _on_batch(self, planned: PlannedBatch) -> None:
        self.statistics.add(planned)
        self._batches += 1
        # As torchtitan does for its own groups: after the first step, lazy initialisation is over.
        if self._batches == self.job.accumulation + 1 and self._group is not None:
            # torchtitan's own ``set_pg_timeouts`` does not know the group; the first is of torch 2.15
            set_timeout = getattr(
                dist, "set_timeout", dist.distributed_c10d._set_pg_timeout
            )
            set_timeout(timedelta(seconds=self.job.step_timeout_s), self._group)

    def rows_per_microbatch(self, rows: int) -> int:
        """Count the rows, of a batch of ``rows``, that go through the model together."""
        return rows // self.job.microbatches

    def plan_now(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Plan a batch that did not come through the planning loader (validation); returns its plan keys [B]."""
        rule = self.job.documents
        if OWN_POSITIONS not in inputs:  # a token's column is its position then
            rule = replace(rule, by_positions=False)
        # a pipeline may be given several microbatches at once
        while len(self._validated) >= self.job.accumulation:
            self.validation.drop(self._validated.popleft())
        rows, seq_len = inputs["input"].shape
        shape = BatchShape(rows, seq_len, self.rows_per_microbatch(rows))
        starts = rule.starts(inputs)
        (planned,), _ = self.validation.plan(starts, shape)
        self._validated.append(planned)
        return HostTensor.wrap(planned.keys)

    def confirm_exchanges(self) -> None:
        """Wait until the device is idle; raises ``PeerError`` if an exchange so far has failed there."""
        transport = self.engine.transport
        if transport is None:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        transport.prepare(())

    def close(self, *, failed: bool = False) -> None:
        """End the session's threads. After a failure the planning thread is not waited for: peers may never answer."""
        if self._loader is not None:
            self._loader.close(timeout_s=1.0 if failed else JOIN_S)
        if self._servers is not None:
            self._servers.close()
        self.monitor.close()


def cad_group(topology: Topology, timeout_s: float) -> dist.ProcessGroup:
    """Return this rank's CAD group, with a communicator of its own. Collective over all ranks.

    In FSDP's, exchanges of rows would queue behind its collectives, and a timeout set for one would hold for all.
    """
    ranks = range(dist.get_world_size())
    groups = [
        topology.group_ranks(rank) for rank in ranks if not topology.group_rank(rank)
    ]
    group, _ = dist.new_subgroups_by_enumeration(groups, timedelta(seconds=timeout_s))
    assert group is not None
    return group


_session: CadSession | None = None


def open_session(job: Job) -> CadSession:
    """Create the process's session; collective over all ranks of each CAD group."""
    global _session
    if _session is not None:
        _session.close()
    # before any rank watches another: one of every machine may have to compile
    warm_up(logger.info)
    _session = CadSession(job)
    if job.deterministic:
        logger.info(
            f"debug.deterministic = true: plans depend on the batch alone (cad.tolerance = {job.cad.tolerance}), not "
            "on measured rates"
        )
    logger.info(
        f"CAD session: group of {len(_session.ranks)} ranks, kernel {_session.kernel}, "
        f"planner {_session.cad.planner}, tolerance {_session.cad.tolerance}, "
        f"placement {_session.cad.placement if _session.redistributes else 'loader'}"
    )
    return _session


def current_session() -> CadSession:
    """Return this process's session.

    Raises:
        RuntimeError: there is none, as no data loader with CAD has been built.
    """
    if _session is None:
        raise RuntimeError(
            "no CAD session: the data loader must be built by torchtitan_cad's TrainSpec first"
        )
    return _session


def close_session(*, failed: bool = False) -> None:
    """Close this process's session, if there is one; ``failed`` after an error."""
    global _session
    if _session is not None:
        _session.close(failed=failed)
        _session = None
