# SPDX-License-Identifier: BSD-3-Clause
"""From every rank's document boundaries to plans that the engine can execute.

Every rank of a CAD group gathers the boundaries of all, computes the same plans for itself and compares fingerprints.
The gathers run over a gloo group of their own, so planning never touches the accelerator's communicators. All batches
of an optimizer step are planned together, by two gathers on every rank: of what it has loaded, and of its fingerprint.
A rank that fails in between tells its peers in place of the next. Where tokens get new homes, ids, labels and positions
follow by one all-to-all of the same group.
"""

import contextlib
import hashlib
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_cad.integration.gathering import gather_objects
from torchtitan_cad.integration.loading.placement import (
    Layouts,
    Placement,
    PlannedMicrobatches,
)
from torchtitan_cad.integration.loading.redistribution import Redistribution
from torchtitan_cad.integration.run_state import run_state
from torchtitan_cad.integration.topology import Topology
from torchtitan_cad.planning import (
    LayerTimes,
    Plan,
    PlannerConfig,
    plan_step,
)
from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.model.batch import (
    BatchShape,
    divides_by_row,
    pool_layouts,
    step_layouts,
)
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.planning.pipeline.program import Pool
from torchtitan_cad.planning.placement.microbatch import LEAST_GAIN
from torchtitan_cad.planning.servers import JoinedServer
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.errors import PeerError, PlanMismatchError
from torchtitan_cad.runtime.servers.client import ServerPool

logger = logging.getLogger(__name__)

KEY_STEP = 2
"""Between the keys of one planner, in multiples of the nano-batches: training and validation take turns."""


class _End(Enum):
    """What a rank says that will not plan with its peers."""

    EXHAUSTED = 1
    FAILED = 2


@dataclass(frozen=True)
class _Loaded:
    """What a rank has loaded of a step.

    Attributes:
        starts: its starts of documents in the rows of all batches, one after another.
        shape: of every batch.
        batches: that are planned together.
        can_redistribute: whether tokens may get other homes.
        servers: that have joined and that this rank is connected to.
    """

    starts: np.ndarray
    shape: BatchShape
    batches: int
    can_redistribute: bool
    servers: list[JoinedServer]

    @property
    def of_step(self) -> BatchShape:
        """The shape of all batches, one below the other."""
        return replace(self.shape, rows=self.batches * self.shape.rows)

    @property
    def described(self) -> str:
        """The batches, in words."""
        sizes = list(vars(self.shape).values())
        return f"{self.batches} of (rows, tokens, rows per microbatch) = {sizes}"

    @property
    def columns(self) -> IntArray:
        """The column of each document's first token."""
        return self.starts % self.shape.seq_len


@dataclass(frozen=True)
class PlannedBatch:
    """The plans of one batch.

    Attributes:
        keys: int64 [rows] under which the engines find the plan of a row's microbatch, that of nano-batch 0;
            nano-batch 1 has the next number.
        by_key: plans of all kinds of attention, by their key: of every microbatch, in ticks of every pool, that of
            nano-batch 0, then that of nano-batch 1.
        nano_batches: of every microbatch.
        layers: of every kind of attention.
        seconds: that planning took.
    """

    keys: Tensor
    by_key: dict[int, tuple[Plan, ...]] = field(repr=False)
    nano_batches: int = 1
    layers: tuple[int, ...] = (1,)
    seconds: float = 0.0

    @property
    def plans(self) -> list[Plan]:
        """Plans of the first kind of attention, in the order of ``by_key``."""
        return [plans[0] for plans in self.by_key.values()]


class Exhausted(Exception):
    """Some ranks of the group, whose global numbers are its arguments, have no more data; all stop together."""


@dataclass(eq=False)
class BatchPlanner:
    """Plans steps for one CAD group. All ranks of the group must plan the same steps in the same order.

    Args:
        group: of gloo; None for a group of one.
        ranks: global numbers of the group's ranks: stages x data-parallel x context-parallel, the last changing first.
        topology: degrees of these; all stages of a group load the same batches.
        config: of the planner.
        kinds: of the model's attention, with the heads of a rank.
        engines: of every kind of attention, which get the plans.
        nano_batches: parts of every microbatch, each with a plan of its own.
        times: rates of this machine, by which tolerances are chosen; None: the config's is taken.
        keys: of microbatches, at least ``nano_batches`` apart.
        placement: gives the tokens new homes; ``plan`` then plans for batches as they have been redistributed.
        servers: that have joined the job; None: the job takes none.
        pools: of a pipeline in ticks, each of which has plans of its own in every batch, over all stages.
    """

    group: dist.ProcessGroup | None
    ranks: list[int]
    topology: Topology
    config: PlannerConfig
    kinds: Sequence[AttentionKind]
    engines: Sequence[CoreAttentionEngine]
    nano_batches: int = 1
    times: LayerTimes | None = None
    keys: Iterator[int] = field(default_factory=itertools.count)
    placement: Placement | None = None
    servers: ServerPool | None = None
    pools: Sequence[Pool] = ()
    _has_stayed: bool = field(default=False, init=False)

    def check_rows(self, rows: int) -> None:
        """Raise ValueError for rows of a microbatch that cannot be halved: tensor parallelism has cut them already."""
        tp = self.topology.tp
        if self.nano_batches == 2 and tp > 1 and not divides_by_row(rows):
            raise ValueError(
                f"cad.nano_batches = 2 with parallelism.tensor_parallel_degree = {tp} halves microbatches by "
                f"rows, and the data loader gave {rows}; let it leave out such batches, or set cad.nano_batches to 1"
            )

    def plan(
        self,
        starts: np.ndarray,
        shape: BatchShape,
        batches: int = 1,
        *,
        can_redistribute: bool = False,
    ) -> tuple[list[PlannedBatch], Redistribution | None]:
        """Plan the ``batches`` of a step and make the plans known to the engines.

        Tokens get new homes if there is a placement and every rank can redistribute its part. How this rank's then come
        there is returned, too; all ranks call ``placement.exchange`` with it next. Whatever fails on a rank before that
        is announced.

        Args:
            starts: this rank's starts of documents in the rows of all batches, one after another.
            shape: of every batch.

        Raises:
            PeerError: a peer failed or disagrees on shapes or on documents.
            PlanMismatchError: a peer computed another plan, or a replica other homes.
            Exhausted: a peer has no more data.
        """
        with self.announced_failure("preparing to plan a batch"):
            self.check_rows(shape.rows_per_microbatch)
            servers = self.servers.look() if self.servers else []
        own = _Loaded(
            starts,
            shape,
            batches,
            can_redistribute=can_redistribute,
            servers=servers,
        )
        loaded = self._gather(own)
        self._check_alike(loaded)
        # ranks outside the group may have failed, which its others do not know
        with self.announced_failure("planning a batch", known=()):
            if self.servers is not None:
                self.servers.take_lists([part.servers for part in loaded])
            planned, redistribution = self._plan_step(own, loaded)
        self._compare(planned)
        self._say_whether_attention_stays(planned)
        return planned, redistribution

    def _say_whether_attention_stays(self, planned: Sequence[PlannedBatch]) -> None:
        """Log once that a step stays home by its time, and why."""
        if self.times is None or self.config.planner == "home" or self._has_stayed:
            return
        plans = list(chain.from_iterable(batch.plans for batch in planned))
        if any(plan.config.planner != "home" for plan in plans):
            return
        self._has_stayed = True
        imbalance = max(plan.stats.max_over_mean for plan in plans)
        logger.info(
            f"CAD leaves attention where its tokens are when moving it saves less than {100 * LEAST_GAIN:.0f} % of a "
            f"layer, as in this step: imbalance {imbalance:.3f}, {self.times.describe()}"
        )

    def _plan_step(
        self, own: _Loaded, loaded: Sequence[_Loaded]
    ) -> tuple[list[PlannedBatch], Redistribution | None]:
        """Plan what all ranks have loaded, this one its ``own``."""
        begin = time.perf_counter()  # without waits for peers
        cp = self.topology.cp
        shape = own.shape
        of_rows = loaded[: self.topology.dp * cp : cp]
        layouts = step_layouts(
            [part.starts for part in of_rows],
            [part.of_step for part in of_rows],
            cp,
            nano_batches=self.nano_batches,
        )
        columns = np.concatenate([part.columns for part in of_rows])
        placed = None
        may_move = all(part.can_redistribute and part.shape == shape for part in loaded)
        if self.placement is not None and may_move:
            placed = self.placement.choose(layouts, columns, self.times)
        planned = []
        for first in range(0, len(layouts), shape.microbatches):
            part = slice(first, first + shape.microbatches)
            of_batch = None if placed is None else placed[part]
            microbatches = self._plan_batch(layouts[part], columns, of_batch)
            planned.append(self._make_executable(microbatches, shape))
        seconds = (time.perf_counter() - begin) / own.batches
        redistribution = None
        if self.placement is not None:
            redistribution = self.placement.redistribution(layouts, placed, own.of_step)
        return [replace(batch, seconds=seconds) for batch in planned], redistribution

    def _plan_batch(
        self,
        layouts: Layouts,
        columns: IntArray,
        placed: PlannedMicrobatches | None,
    ) -> PlannedMicrobatches:
        """Return the plans of a batch: those of its homes, or new ones for its ``layouts``, or for all pools."""
        if self.pools:
            homes = layouts
            if placed is not None:
                homes = [microbatch.layouts for microbatch in placed]
            per_stage = self.topology.dp * self.topology.cp
            layouts = [pool_layouts(homes, pool, per_stage) for pool in self.pools]
        elif placed is not None:
            return placed
        return plan_step(
            layouts,
            self.kinds,
            self.config,
            times=self.times,
            columns=columns,
            place=False,
        )

    def _make_executable(
        self, microbatches: PlannedMicrobatches, shape: BatchShape
    ) -> PlannedBatch:
        """Give the engines the plans of a batch, those of a microbatch under a key and the next ones."""
        first_keys = []
        by_key: dict[int, tuple[Plan, ...]] = {}
        for microbatch in microbatches:
            first_key = next(self.keys)
            first_keys.append(first_key)
            of_nano_batches = zip(*microbatch.plans, strict=True)
            for key, plans in enumerate(of_nano_batches, first_key):
                if self.servers is not None:
                    plans = tuple(map(self.servers.assign, plans))
                by_key[key] = plans
        for key, plans in by_key.items():
            for engine, plan in zip(self.engines, plans, strict=True):
                engine.add_plan(key, plan)
                # computed here, beside training, not when they are logged
                _ = plan.stats
        of_microbatches = torch.tensor(first_keys[: shape.microbatches])
        return PlannedBatch(
            of_microbatches.repeat_interleave(shape.rows_per_microbatch),
            by_key,
            self.nano_batches,
            layers=tuple(kind.layers for kind in self.kinds),
        )

    def drop(self, planned: PlannedBatch) -> None:
        """Make the engines forget the plans of a batch that has been trained on."""
        for engine in self.engines:
            for key in planned.by_key:
                engine.drop_plan(key)

    # Among ranks ------------------------------------------------------------------------------------------------------

    def announce_exhausted(self) -> NoReturn:
        """End planning on all ranks: raises ``Exhausted`` on every rank of the group. Replaces a call of ``plan``."""
        self._gather(_End.EXHAUSTED)
        raise AssertionError("a gather with an exhausted rank always raises")

    @contextlib.contextmanager
    def announced_failure(
        self, doing: str, known: tuple[type[Exception], ...] = (PeerError,)
    ) -> Iterator[None]:
        """Make the others raise ``PeerError`` naming this rank, in the gather they come to next, for an error in here.

        Args:
            doing: what has failed then, as "planning a batch".
            known: errors that all ranks of the group raise, which are not announced.
        """
        try:
            yield
        except known:
            raise
        except BaseException as error:
            run_state().own_error = error
            # The peers may take long to come, so the error is logged first.
            logger.exception(f"this rank has failed while {doing}")
            with contextlib.suppress(PeerError):
                gather_objects(_End.FAILED, self.group, "planning")
            raise

    def _gather(self, own: Any) -> list[Any]:
        """Return what all ranks say; raises ``PeerError`` if one has failed, ``Exhausted`` if one has no more data."""
        messages = gather_objects(
            own, self.group, f"planning gather among ranks {self.ranks}"
        )
        message_of = dict(zip(self.ranks, messages, strict=True))
        failed = [rank for rank in self.ranks if message_of[rank] is _End.FAILED]
        exhausted = [rank for rank in self.ranks if message_of[rank] is _End.EXHAUSTED]
        if failed:
            names = ", ".join(f"rank {rank}" for rank in failed)
            raise PeerError(
                f"{names} failed while loading or planning a batch; its log has the error"
            )
        if exhausted:
            raise Exhausted(*exhausted)
        return messages

    def _check_alike(self, loaded: Sequence[_Loaded]) -> None:
        """Raise PeerError unless ranks have loaded as many microbatches and, if they share rows, the same documents."""
        cp = self.topology.cp
        first = loaded[0]
        for number, part in enumerate(loaded):
            rank = self.ranks[number]
            counts = (part.batches, part.shape.microbatches)
            if counts != (first.batches, first.shape.microbatches):
                raise PeerError(
                    f"rank {rank} loaded {part.described}, and rank {self.ranks[0]} {first.described}: all ranks must "
                    "load batches of as many microbatches in the same order; mend the data loader, or, for steps of "
                    "one batch, set training.global_batch_size to -1"
                )
            sharing = (number - number % cp) % (self.topology.dp * cp)
            other = loaded[sharing]
            if part.shape != other.shape or not np.array_equal(
                part.starts, other.starts
            ):
                raise PeerError(
                    f"ranks {self.ranks[sharing]} and {rank} share a sequence but loaded "
                    "different documents; the data loader must depend on the data-parallel rank alone"
                )

    def _compare(self, planned: Sequence[PlannedBatch]) -> None:
        """Raise ``PlanMismatchError`` unless all ranks have made the same plans."""
        digest = hashlib.sha256()
        for batch in planned:
            for plan in chain.from_iterable(batch.by_key.values()):
                digest.update(plan.fingerprint().encode())
        fingerprints = self._gather(digest.hexdigest())
        differing = [
            rank
            for rank, fingerprint in zip(self.ranks, fingerprints, strict=True)
            if fingerprint != fingerprints[0]
        ]
        if differing:
            raise PlanMismatchError(
                f"ranks {differing} planned a batch differently from rank {self.ranks[0]}: "
                "all ranks must run the same version of torchtitan_cad and numpy with the same [cad] table"
            )
