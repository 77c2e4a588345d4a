# SPDX-License-Identifier: BSD-3-Clause
"""From every rank's document boundaries to plans that the engine can execute.

Every rank of a CAD group gathers the boundaries of all, computes the same plans for itself and compares fingerprints.
The gathers run over a gloo group of their own, so planning never touches the accelerator's communicators. All batches
of an optimizer step are planned together, by the same gathers on every rank; the first and the last begin with a status
word, through which a rank that fails in between tells its peers. Where tokens get new homes, ids and labels follow by
one all-to-all of the same group, for which everything is ready before that last gather.
"""

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_cad.integration.loading.placement import (
    Layouts,
    Parcel,
    Placement,
    PlannedMicrobatches,
    moved_bytes,
)
from torchtitan_cad.integration.loading.redistribution import Batch, columns_of
from torchtitan_cad.integration.topology import Topology
from torchtitan_cad.planning import (
    CostModel,
    LayerTimes,
    Plan,
    PlannerConfig,
    plan_step,
)
from torchtitan_cad.planning.exchange.traffic import measure_traffic
from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.model.batch import (
    BatchShape,
    divides_by_row,
    step_layouts,
)
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.planning.placement.microbatch import LEAST_GAIN
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.errors import PeerError, PlanMismatchError
from torchtitan_cad.runtime.servers.client import ServerPool

logger = logging.getLogger(__name__)

_OK, _EXHAUSTED, _FAILED = range(3)
_SHAPE = slice(3, 6)
_BATCHES = 6
_SERVERS = 7
_WORDS = 7
"""Numbers after the status in the first gather: how many document starts there are, the columns that can be
redistributed (0: the step cannot), the shape of a batch, how many batches of it are planned together, and the list of
joined servers that the plans use, if this is the group's first rank. In the last: a fingerprint of the plans, and
zeros."""


@dataclass(frozen=True)
class PlannedBatch:
    """The plans of one batch.

    Attributes:
        keys: int64 [rows] under which the engines find the plan of a row's microbatch, that of nano-batch 0;
            nano-batch 1 has the next number.
        microbatches: what was planned; in ticks, for every pool.
        seconds: that planning took.
        engine_keys: of all plans, in the order of ``by_kind``.
        layers: of every kind of attention.
        copied_bytes: per plan, what this rank's kernel calls copy in the mean layer's forward.
        between_hosts: per plan, the bytes of the mean layer's forward between hosts; empty where there is one host.
        home_bytes: see ``moved_bytes``; None without placement, and where tokens cannot be redistributed.
    """

    keys: Tensor
    microbatches: PlannedMicrobatches = field(repr=False)
    seconds: float
    engine_keys: list[int]
    layers: tuple[int, ...] = (1,)
    copied_bytes: list[int] = field(default_factory=list)
    between_hosts: list[int] = field(default_factory=list)
    home_bytes: np.ndarray | None = field(default=None, repr=False)

    @property
    def nano_batches(self) -> int:
        """Nano-batches of every microbatch."""
        return len(self.microbatches[0].plans[0])

    @property
    def plans(self) -> list[Plan]:
        """Plans of the first kind of attention: of every microbatch that of nano-batch 0, then that of nano-batch 1."""
        return [plans[0] for plans in self.by_kind]

    @property
    def by_kind(self) -> list[tuple[Plan, ...]]:
        """For every nano-batch of every microbatch the plans of all kinds of attention."""
        by_microbatch = (
            zip(*microbatch.plans, strict=True) for microbatch in self.microbatches
        )
        return list(chain.from_iterable(by_microbatch))


@dataclass(frozen=True)
class PlanRules:
    """Options of planning; the same on all ranks.

    Attributes:
        config: of the planner.
        kinds: of the model's attention, with the heads of a rank.
        cost: of forward and backward together, by a profile; None: tile area.
        nano_batches: parts of every microbatch, each with a plan of its own.
        times: rates of this machine, by which tolerances are chosen; None: the config's is taken.
        hosts: [ranks of the group] number of every rank's host.
    """

    config: PlannerConfig
    kinds: Sequence[AttentionKind]
    cost: CostModel | None = None
    nano_batches: int = 1
    times: LayerTimes | None = None
    hosts: tuple[int, ...] = (0,)


class Exhausted(Exception):
    """Some ranks of the group, whose global numbers are its arguments, have no more data; all stop together."""


class BatchPlanner:
    """Plans steps for one CAD group. All ranks of the group must plan the same steps in the same order.

    Args:
        group: of gloo; None for a group of one.
        ranks: global numbers of the group's ranks: stages x data-parallel x context-parallel, the last changing first.
        topology: degrees of these; all stages of a group load the same batches.
        rules: how to plan.
        engines: of every kind of attention, which get the plans.
        keys: the arithmetic progression (start, step) from which this planner draws the keys of microbatches; the step
            is at least ``rules.nano_batches``.
        placement: gives the tokens new homes; ``plan`` then plans for batches as they have been redistributed.
        servers: that have joined the job; None: the job takes none.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        ranks: list[int],
        topology: Topology,
        rules: PlanRules,
        engines: Sequence[CoreAttentionEngine],
        keys: tuple[int, int] = (0, 1),
        placement: Placement | None = None,
        servers: ServerPool | None = None,
    ) -> None:
        self._servers = servers
        self._group = group
        self._ranks = ranks
        self._tp = topology.tp
        self._cp = topology.cp
        self._per_stage = topology.dp * topology.cp
        self._rules = rules
        self._engines = engines
        self.placement = placement
        self._layers = tuple(kind.layers for kind in rules.kinds)
        self._next_key, self._key_step = keys
        self._has_stayed = False

    def check_rows(self, rows: int) -> None:
        """Raise ValueError for rows of a microbatch that cannot be halved: tensor parallelism has cut them already."""
        halves = self._rules.nano_batches == 2 and self._tp > 1
        if halves and not divides_by_row(rows):
            raise ValueError(
                f"cad.nano_batches = 2 with parallelism.tensor_parallel_degree = {self._tp} halves microbatches by "
                f"rows, and the data loader gave {rows}; let it leave out such batches, or set cad.nano_batches to 1"
            )

    def plan(
        self,
        starts: np.ndarray,
        shape: BatchShape,
        batches: int = 1,
        *,
        to_redistribute: Sequence[Batch] | None = None,
    ) -> tuple[list[PlannedBatch], Parcel | None]:
        """Plan the ``batches`` of a step and make the plans known to the engines.

        Tokens get new homes if there is a placement and every rank can redistribute its part. The parcel is then what
        this rank brings to ``placement.exchange``, which all ranks call next. Whatever fails on a rank before that is
        announced.

        Args:
            starts: this rank's ``document_starts`` in the rows of all batches, one after another.
            shape: of every batch.
            to_redistribute: the batches, with equal columns; None if this rank cannot redistribute them.

        Raises:
            PeerError: a peer failed or disagrees on shapes or on documents.
            PlanMismatchError: a peer computed another plan, or a replica other homes.
            Exhausted: a peer has no more data.
        """
        travelling = len(columns_of(*to_redistribute[0])) if to_redistribute else 0
        servers = self._list_servers()
        gathered, steps, can_redistribute, servers = self._gather_starts(
            starts, shape, batches, columns=travelling, servers=servers
        )
        begin = time.perf_counter()  # without waits for peers
        parcel = None
        try:
            if self._servers is not None:
                self._servers.take_list(servers)
            layouts = step_layouts(
                gathered, steps, self._cp, nano_batches=self._rules.nano_batches
            )
            columns = _first_columns(gathered, steps)
            placed = None
            if self.placement is not None and can_redistribute:
                placed = self.placement.choose(layouts, columns, self._rules.times)
            by_batch, homes = self._plan_batches(
                layouts, columns, placed, count=shape.microbatches
            )
            plans = [*chain(*map(_in_order, by_batch))]
            keys = [self._add_to_engines(microbatches) for microbatches in by_batch]
            self._say_that_it_stays(plans)
            for plan in plans:
                # computed here, beside training, not when they are logged
                _ = plan.stats
            seconds = (time.perf_counter() - begin) / batches
            planned = [
                self._describe(*batch, shape, seconds)
                for batch in zip(by_batch, keys, homes, strict=True)
            ]
            if self.placement is not None:
                parcel = self.placement.pack(
                    layouts, placed, steps[0], to_redistribute or ()
                )
        except Exception:
            self.announce_failure("planning a batch")
            raise
        self._compare(plans)
        return planned, parcel

    def _plan_batches(
        self,
        layouts: Layouts,
        columns: IntArray,
        placed: PlannedMicrobatches | None,
        *,
        count: int,
    ) -> tuple[list[PlannedMicrobatches], list[PlannedMicrobatches | None]]:
        """Return the plans, and the chosen homes, of the microbatches of every batch, which are ``count``."""
        plans = []
        homes = []
        for first in range(0, len(layouts), count):
            part = slice(first, first + count)
            of_batch = None if placed is None else placed[part]
            microbatches = self._plan_batch(layouts[part], columns, of_batch)
            plans.append(self._with_servers(microbatches))
            homes.append(of_batch)
        return plans, homes

    def _list_servers(self) -> int:
        """Return the number of the list of joined servers, which the group's first rank makes; 0 on other ranks."""
        if self._servers is None:
            return 0
        try:
            return self._servers.make_list()
        except Exception:
            self.announce_failure("looking for attention servers")
            raise

    def _with_servers(self, microbatches: PlannedMicrobatches) -> PlannedMicrobatches:
        """Return the microbatches with plans in which joined servers take part."""
        servers = self._servers
        if servers is None:
            return microbatches
        return [
            replace(
                microbatch,
                plans=[list(map(servers.assign, nanos)) for nanos in microbatch.plans],
            )
            for microbatch in microbatches
        ]

    def _describe(
        self,
        microbatches: PlannedMicrobatches,
        keys: list[int],
        homes: PlannedMicrobatches | None,
        shape: BatchShape,
        seconds: float,
    ) -> PlannedBatch:
        """Return what one batch needs of its plans, of whose microbatches these are the keys, and the chosen homes."""
        nanos = range(self._rules.nano_batches)
        engine_keys = [key + nano for key, nano in product(keys, nanos)]
        planned = PlannedBatch(
            keys=torch.tensor(keys[: shape.microbatches]).repeat_interleave(
                shape.rows_per_microbatch
            ),
            microbatches=microbatches,
            seconds=seconds,
            engine_keys=engine_keys,
            layers=self._layers,
            copied_bytes=[self._copied_bytes(key) for key in engine_keys],
            home_bytes=None if homes is None else moved_bytes(homes, self._rules.kinds),
        )
        return replace(planned, between_hosts=self._between_hosts(planned))

    def _copied_bytes(self, key: int) -> int:
        executed = zip(self._engines, self._rules.kinds, strict=True)
        return self._mean(
            [engine.plan(key).copied_bytes(kind.shape) for engine, kind in executed]
        )

    def _between_hosts(self, planned: PlannedBatch) -> list[int]:
        hosts = np.array(self._rules.hosts)
        if not hosts.any():
            return []

        def received(plan: Plan) -> int:
            return int(
                measure_traffic(
                    plan.shape, plan.query_needs, plan.key_needs, node=hosts
                ).inter_in.sum()
            )

        return [
            self._mean([received(plan) for plan in plans]) for plans in planned.by_kind
        ]

    def _mean(self, of_kinds: Sequence[int]) -> int:
        """Return the mean over layers."""
        weighted = (
            layers * value for layers, value in zip(self._layers, of_kinds, strict=True)
        )
        return sum(weighted) // sum(self._layers)

    def drop(self, planned: PlannedBatch) -> None:
        """Make the engines forget the plans of a batch that has been trained on."""
        for engine in self._engines:
            for key in planned.engine_keys:
                engine.drop_plan(key)

    def _plan_batch(
        self,
        layouts: Layouts,
        columns: IntArray,
        placed: PlannedMicrobatches | None,
    ) -> PlannedMicrobatches:
        """Return the plans of a batch: those of its homes, or new ones for ``layouts``."""
        if placed is not None:
            return placed
        rules = self._rules
        return plan_step(
            layouts,
            rules.kinds,
            rules.config,
            times=rules.times,
            cost=rules.cost,
            columns=columns,
            place=False,
        )

    def _say_that_it_stays(self, plans: Sequence[Plan]) -> None:
        """Log once that a batch stays home by its time, and why."""
        moves = any(plan.config.planner != "home" for plan in plans)
        times = self._rules.times
        if (
            times is None
            or self._rules.config.planner == "home"
            or self._has_stayed
            or moves
        ):
            return
        self._has_stayed = True
        imbalance = max(plan.stats.max_over_mean for plan in plans)
        logger.info(
            f"CAD leaves attention where its tokens are when moving it saves less than {100 * LEAST_GAIN:.0f} % of a "
            f"layer, as in this batch: imbalance {imbalance:.3f}, {times.describe()}"
        )

    def announce_exhausted(self) -> NoReturn:
        """End planning on all ranks: raises ``Exhausted`` on every rank of the group. Replaces a call of ``plan``."""
        self._gather_header(_EXHAUSTED)
        raise AssertionError("a gather with an exhausted rank always raises")

    def announce_failure(self, doing: str) -> None:
        """Make the others raise ``PeerError`` naming this rank, in the gather of a status that they come to next.

        Replaces a call of ``plan`` after an error. ``doing``: what has failed, as "planning a batch".
        """
        # The peers may take long to come, so the error is logged first.
        logger.exception(f"this rank has failed while {doing}")
        try:
            self._gather_rows(torch.tensor([_FAILED] + [0] * _WORDS))
        except PeerError:
            logger.warning(
                "CAD could not tell the peers of this failure: they do not answer",
                exc_info=True,
            )

    def _add_to_engines(self, microbatches: PlannedMicrobatches) -> list[int]:
        """Make plans executable, those of a microbatch under a key and the next ones; returns the first of each."""
        keys = []
        for microbatch in microbatches:
            for engine, nanos in zip(self._engines, microbatch.plans, strict=True):
                for nano, plan in enumerate(nanos):
                    engine.add_plan(self._next_key + nano, plan)
            keys.append(self._next_key)
            self._next_key += self._key_step
        return keys

    def _gather_starts(
        self,
        starts: np.ndarray,
        shape: BatchShape,
        batches: int,
        columns: int,
        servers: int,
    ) -> tuple[list[np.ndarray], list[BatchShape], bool, int]:
        """Return every data-parallel rank's ``document_starts``, its step's shape, and what the group has agreed on.

        That is whether the step can be redistributed, which takes one shape and as many ``columns``, at least one, on
        all ranks; and the list of ``servers`` of the first rank.
        """
        words = [
            len(starts),
            columns,
            shape.rows,
            shape.seq_len,
            shape.rows_per_microbatch,
            batches,
            servers,
        ]
        headers = self._gather_header(_OK, *words)
        padded = torch.zeros(int(headers[:, 1].max()), dtype=torch.int64)
        padded[: len(starts)] = torch.from_numpy(starts)
        rows = self._gather_rows(padded).numpy()
        all_starts = [rows[i, : headers[i, 1]] for i in range(len(self._ranks))]
        shapes = [BatchShape(*row) for row in headers[:, _SHAPE].tolist()]
        for i, own in enumerate(all_starts):
            first = (i - i % self._cp) % self._per_stage
            if shapes[i] != shapes[first] or not np.array_equal(own, all_starts[first]):
                raise PeerError(
                    f"ranks {self._ranks[first]} and {self._ranks[i]} share a sequence but loaded "
                    "different documents; the data loader must depend on the data-parallel rank alone"
                )
        travelling = headers[:, 2]
        is_alike = len({*shapes}) == 1 and (travelling == travelling[0]).all()
        first_of_rows = slice(0, self._per_stage, self._cp)
        steps = [replace(own, rows=batches * own.rows) for own in shapes[first_of_rows]]
        return (
            all_starts[first_of_rows],
            steps,
            bool(is_alike and travelling[0]),
            int(headers[0, _SERVERS]),
        )

    def _gather_header(self, status: int, *words: int) -> Tensor:
        """[ranks, 1 + ``_WORDS``] of all ranks, before their batches are planned."""
        headers = self._gather_status(status, *words)
        if exhausted := [
            rank
            for rank, row in zip(self._ranks, headers, strict=True)
            if row[0] == _EXHAUSTED
        ]:
            raise Exhausted(*exhausted)
        first = BatchShape(*headers[0, _SHAPE].tolist())
        for rank, row in zip(self._ranks, headers, strict=True):
            if BatchShape(*row[_SHAPE].tolist()).microbatches != first.microbatches:
                raise PeerError(
                    f"rank {rank} loaded a batch of (rows, tokens, rows per microbatch) = {row[_SHAPE].tolist()}, and "
                    f"rank {self._ranks[0]} one of {headers[0, _SHAPE].tolist()}: all ranks of a pipeline must load "
                    "equally many rows"
                )
            if row[_BATCHES] != headers[0, _BATCHES]:
                shape = f"(rows, tokens, rows per microbatch) = {row[_SHAPE].tolist()}"
                raise PeerError(
                    f"rank {rank} loaded {row[_BATCHES]} and rank {self._ranks[0]} {headers[0, _BATCHES]} batches of "
                    f"{shape} before one of another shape or the end of the step: let all ranks load batches of "
                    "the same shapes in the same order, or set training.global_batch_size to -1, for steps of one batch"
                )
        return headers

    def _compare(self, plans: Sequence[Plan]) -> None:
        """Raise ``PlanMismatchError`` unless all ranks have made the same plans."""
        digest = hashlib.blake2b(
            "".join(plan.fingerprint() for plan in plans).encode(), digest_size=7
        ).digest()
        every = self._gather_status(_OK, int.from_bytes(digest))
        differing = [
            rank
            for rank, row in zip(self._ranks, every, strict=True)
            if not torch.equal(row, every[0])
        ]
        if differing:
            raise PlanMismatchError(
                f"ranks {differing} planned a batch differently from rank {self._ranks[0]}: "
                "all ranks must run the same version of torchtitan_cad and numpy with the same [cad] table"
            )

    def _gather_status(self, status: int, *words: int) -> Tensor:
        """[ranks, 1 + ``_WORDS``] status and words of all ranks; raises ``PeerError`` if one of them has failed."""
        every = self._gather_rows(
            torch.tensor([status, *words] + [0] * (_WORDS - len(words)))
        )
        failed = [
            f"rank {rank}"
            for rank, row in zip(self._ranks, every, strict=True)
            if row[0] == _FAILED
        ]
        if failed:
            raise PeerError(
                f"{', '.join(failed)} failed while loading or planning a batch; its log has the error"
            )
        return every

    def _gather_rows(self, row: Tensor) -> Tensor:
        if self._group is None:
            return row.expand(len(self._ranks), -1)
        rows = [torch.empty_like(row) for _ in self._ranks]
        try:
            dist.all_gather(rows, row, group=self._group)
        except RuntimeError as error:
            raise PeerError(
                f"planning gather among ranks {self._ranks} failed: {error}"
            ) from error
        return torch.stack(rows)


def _first_columns(
    starts: Sequence[np.ndarray], shapes: Sequence[BatchShape]
) -> IntArray:
    """Return the column of each document's first token, by id; ids count over data-parallel ranks."""
    columns = [own % shape.seq_len for own, shape in zip(starts, shapes, strict=True)]
    return np.concatenate(columns)


def _in_order(microbatches: PlannedMicrobatches) -> list[Plan]:
    """Return all plans of a batch: kind by kind, and microbatch by microbatch."""
    by_kind = zip(*(microbatch.plans for microbatch in microbatches), strict=True)
    return [*chain(*chain(*by_kind))]
