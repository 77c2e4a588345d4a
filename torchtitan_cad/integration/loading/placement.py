# SPDX-License-Identifier: BSD-3-Clause
"""``cad.placement``: new homes for the tokens of an optimizer step, and the exchange that brings them there."""

import dataclasses
import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_cad.integration.gathering import gather_objects
from torchtitan_cad.integration.loading.redistribution import (
    POSITIONS,
    Batch,
    Redistribution,
    check_redistributable,
    columns_of,
    make_redistribution,
)
from torchtitan_cad.integration.topology import Topology
from torchtitan_cad.planning import (
    LayerTimes,
    PlannedMicrobatch,
    PlannerConfig,
    TokenLayout,
    plan_step,
)
from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.model.batch import BatchShape, slots_of_nano_batches
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.runtime.errors import PeerError, PlanMismatchError

logger = logging.getLogger(__name__)

Layouts = list[list[TokenLayout]]
"""For every microbatch of a step, the layouts of its nano-batches over data-parallel x context-parallel ranks."""
PlannedMicrobatches = Sequence[PlannedMicrobatch]


@dataclass(frozen=True, eq=False)
class Parcel:
    """What a rank sends of the batches of a step that it has loaded, and how it makes batches of what comes.

    Attributes:
        rows: [B * S, 3] ids, labels and positions in the order in which they are sent.
        send_counts, receive_counts: [ranks of the group] how many of them go to each rank, and come from it.
        batches: number of batches.
        shape: of their tokens, one batch below the other.
    """

    redistribution: Redistribution
    rows: Tensor
    send_counts: list[int]
    receive_counts: list[int]
    batches: int
    shape: torch.Size

    def unpack(self, came: Tensor) -> list[Batch]:
        """Return the batches that this rank trains on, from what ``Placement.exchange`` has returned."""
        columns = self.redistribution.scatter(came).unbind(1)
        of_batches = [column.view(self.shape).chunk(self.batches) for column in columns]
        return [
            ({"input": ids, POSITIONS: positions.to(torch.int32)}, targets)
            for ids, targets, positions in zip(*of_batches, strict=True)
        ]


@dataclass(eq=False)
class Placement:
    """Chooses homes and brings tokens there, for one CAD group.

    Args:
        group: gloo group of the CAD group; None for a group of one.
        replicas: gloo group of the ranks with this position in every CAD group, which load the same rows; None for one.
        rank: this one's position in the group.
        strict: refuse batches that cannot be redistributed.
    """

    group: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None
    topology: Topology
    rank: int
    config: PlannerConfig
    kinds: Sequence[AttentionKind]
    _: KW_ONLY
    strict: bool = False
    _warned: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._per_stage = self.topology.dp * self.topology.cp
        if self.topology.group_stages > 1:
            self.config = _of_one_stage(self.config, self._per_stage)

    def can_redistribute(self, inputs: Mapping[str, Tensor], labels: Tensor) -> bool:
        """Tell whether a batch can be redistributed, see ``check_redistributable``; log once, or with ``strict`` raise,
        if not."""
        try:
            check_redistributable(inputs, labels)
        except ValueError as error:
            if self.strict:
                raise
            if not self._warned:
                logger.warning(
                    f"CAD leaves batches on the ranks that loaded them: {error}"
                )
            self._warned = True
            return False
        return True

    def choose(
        self, loaded: Layouts, columns: IntArray, times: LayerTimes | None = None
    ) -> list[PlannedMicrobatch]:
        """Choose homes for the tokens of a step, maybe by time; the same on all ranks of the group.

        Args:
            loaded: homes of the loader, with document ids of the step.
            columns: of each document's first token, by id.
        """
        # in ticks the ranks of a stage do not attend alone
        if self.topology.group_stages > 1:
            times = None
        stages = self.topology.pp
        return plan_step(
            loaded,
            self.kinds,
            self.config,
            times=times,
            columns=columns,
            stages=stages,
        )

    def pack(
        self,
        loaded: Layouts,
        placed: PlannedMicrobatches | None,
        shape: BatchShape,
        batches: Sequence[Batch],
    ) -> Parcel | None:
        """Pack the batches that this rank has loaded for ``exchange``; None if they stay. Collective over the replicas.

        Args:
            loaded: homes of the loader.
            placed: what ``choose`` returned; None if some rank cannot redistribute its part of the step, which then
                stays where it was loaded.
            shape: of all the step's rows.
            batches: of one step and one shape, as ``check_redistributable`` takes them.

        Raises PeerError if a replica is gone, PlanMismatchError if one chose other homes.
        """
        homes = [microbatch.layouts for microbatch in placed or ()]
        redistribution = self._redistribution(loaded, homes, shape) if homes else None
        self._compare(homes)
        if redistribution is None:
            return None
        by_column = zip(*(columns_of(*batch) for batch in batches), strict=True)
        columns = [torch.cat(column) for column in by_column]
        # int64 whatever a rank has loaded, as all ranks send rows of the same bytes
        rows = torch.stack([column.flatten().long() for column in columns], dim=1)
        return Parcel(
            redistribution=redistribution,
            rows=rows[redistribution.sent],
            send_counts=self._per_peer(redistribution.send_counts),
            receive_counts=self._per_peer(redistribution.receive_counts),
            batches=len(batches),
            shape=columns[0].shape,
        )

    def _redistribution(
        self, loaded: Layouts, homes: Layouts, shape: BatchShape
    ) -> Redistribution | None:
        """Return how this rank's tokens come to their homes; None if all tokens stay."""
        cp = self.topology.cp
        old = []
        new = []
        slots = []
        for number, (before, after) in enumerate(zip(loaded, homes, strict=True)):
            of_microbatch = slots_of_nano_batches(
                shape, number, cp, nano_batches=len(before)
            )
            held = len(of_microbatch)  # layouts that hold all tokens between them
            slots += of_microbatch
            old += before[-held:]
            new += after[-held:]
        if all(layout is other for layout, other in zip(old, new, strict=True)):
            return None
        return make_redistribution(
            old, new, slots, dp_rank=self.rank % self._per_stage // cp
        )

    def exchange(self, parcel: Parcel) -> Tensor:
        """Exchange parcels: returns their rows in the order of arrival. Collective over the group.

        Raises PeerError if a peer is gone.
        """
        if self.group is None:
            return parcel.rows
        came = torch.empty_like(parcel.rows)
        try:
            dist.all_to_all_single(
                came,
                parcel.rows,
                parcel.receive_counts,
                parcel.send_counts,
                group=self.group,
            )
        except RuntimeError as error:
            raise PeerError(f"redistributing tokens failed: {error}") from error
        return came

    def _per_peer(self, counts: list[int]) -> list[int]:
        """Per rank of the group, ``counts`` [dp] for those that differ from this one in that coordinate alone."""
        first = self.rank // self._per_stage * self._per_stage
        cp = self.topology.cp
        every = [0] * self.topology.group_size
        every[first + self.rank % cp : first + self._per_stage : cp] = counts
        return every

    def _compare(self, layouts: Layouts) -> None:
        """Raise PlanMismatchError unless the replicas have chosen the same homes."""
        digest = hashlib.sha256()
        for layout in chain.from_iterable(layouts):
            segments = (layout.seg_rank, layout.seg_doc, layout.seg_start)
            digest.update(np.stack([*segments, layout.seg_length]).tobytes())
        fingerprints = gather_objects(
            digest.hexdigest(),
            self.replicas,
            "comparing homes of stages and tensor-parallel ranks",
        )
        if len({*fingerprints}) > 1:
            raise PlanMismatchError(
                "pipeline stages or tensor-parallel ranks redistribute a batch's tokens to different homes: all ranks "
                "must run the same version of torchtitan_cad and numpy with the same [cad] table, and load equal rows"
            )


def _of_one_stage(config: PlannerConfig, num_ranks: int) -> PlannerConfig:
    """Return what holds for homes on the ``num_ranks`` ranks of each stage in a group."""
    node = config.ranks_per_node
    return dataclasses.replace(
        config,
        ranks_per_node=None if node and num_ranks % node else node,
    )
