# SPDX-License-Identifier: BSD-3-Clause
"""``cad.placement``: new homes for the tokens of an optimizer step, and the exchange that brings them there."""

import dataclasses
import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain

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
        node = self.config.ranks_per_node
        if self.topology.group_stages > 1 and node and self._per_stage % node:
            # homes are on the ranks of a stage, which such nodes do not divide
            self.config = dataclasses.replace(self.config, ranks_per_node=None)

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
        return plan_step(
            loaded,
            self.kinds,
            self.config,
            times=times,
            columns=columns,
            stages=self.topology.pp,
        )

    def redistribution(
        self,
        loaded: Layouts,
        placed: PlannedMicrobatches | None,
        shape: BatchShape,
    ) -> Redistribution | None:
        """Return how this rank's tokens come to their homes; None if all stay. Collective over the replicas.

        Args:
            loaded: homes of the loader.
            placed: what ``choose`` returned; None if some rank cannot redistribute its part of the step, which then
                stays where it was loaded.
            shape: of all the step's rows.

        Raises PeerError if a replica is gone, PlanMismatchError if one chose other homes.
        """
        cp = self.topology.cp
        homes = [microbatch.layouts for microbatch in placed or ()]
        self._compare(homes)
        old = []
        new = []
        slots = []
        for number, after in enumerate(homes):
            of_microbatch = slots_of_nano_batches(
                shape, number, cp, nano_batches=len(after)
            )
            held = len(of_microbatch)  # layouts that hold all tokens between them
            slots += of_microbatch
            old += loaded[number][-held:]
            new += after[-held:]
        if all(layout is other for layout, other in zip(old, new, strict=True)):
            return None
        return make_redistribution(
            old, new, slots, dp_rank=self.rank % self._per_stage // cp
        )

    def exchange(
        self, redistribution: Redistribution, batches: Sequence[Batch]
    ) -> list[Batch]:
        """Return the batches that this rank trains on, for those that it has loaded. Collective over the group.

        Args:
            batches: of one step and one shape, as ``check_redistributable`` takes them.

        Raises PeerError if a peer is gone.
        """
        by_column = zip(*(columns_of(*batch) for batch in batches), strict=True)
        columns = [torch.cat(column) for column in by_column]
        # int64 whatever a rank has loaded, as all ranks send rows of the same bytes
        rows = torch.stack([column.flatten().long() for column in columns], dim=1)
        rows[redistribution.received] = self._exchange_rows(
            rows[redistribution.sent], redistribution
        )
        ids, targets, positions = (
            column.view_as(columns[0]).chunk(len(batches)) for column in rows.unbind(1)
        )
        return [
            ({"input": ids[i], POSITIONS: positions[i].int()}, targets[i])
            for i in range(len(batches))
        ]

    def _exchange_rows(self, sent: Tensor, redistribution: Redistribution) -> Tensor:
        """Return what comes for the rows that are ``sent``, in the order of arrival."""
        if self.group is None:
            return sent
        came = torch.empty_like(sent)
        received_rows = self._per_peer(redistribution.receive_counts)
        sent_rows = self._per_peer(redistribution.send_counts)
        try:
            dist.all_to_all_single(
                came, sent, received_rows, sent_rows, group=self.group
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
            for column in ("seg_rank", "seg_doc", "seg_start", "seg_length"):
                digest.update(getattr(layout, column).tobytes())
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
