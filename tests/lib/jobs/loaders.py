# SPDX-License-Identifier: BSD-3-Clause
"""Data loaders to plan for in tests: of one rank, or of several, which are threads with a gloo group over sockets."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeVar

import torch
import torch.distributed as dist

from tests.lib.threaded import thread_transports
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu

enable_cpu()

# torchtitan must not be imported before enable_cpu().
from torchtitan.components.dataloader import (  # noqa: E402
    BaseDataLoader,
    ParallelAwareDataloader,  # noqa: F401  for tests, which must not import torchtitan first
)

from torchtitan_cad.integration.loading.batch_planner import BatchPlanner  # noqa: E402
from torchtitan_cad.integration.loading.documents import DocumentRule  # noqa: E402
from torchtitan_cad.integration.loading.loader import PlanningLoader  # noqa: E402
from torchtitan_cad.integration.loading.placement import Placement  # noqa: E402
from torchtitan_cad.integration.topology import Topology  # noqa: E402
from torchtitan_cad.planning import AttentionShape, PlannerConfig, warm_up  # noqa: E402
from torchtitan_cad.planning.model.kind import AttentionKind  # noqa: E402
from torchtitan_cad.runtime.engine import CoreAttentionEngine  # noqa: E402
from torchtitan_cad.runtime.kernels.select import get_kernel  # noqa: E402
from torchtitan_cad.runtime.transport.base import Transport  # noqa: E402

EOS = 9
CPU = torch.device("cpu")


class CountingLoader(BaseDataLoader):
    """Batches whose tokens all equal their number; optionally fails at one, or has documents that depend on it."""

    documents: Callable[[int], torch.Tensor] | None = None

    def __init__(self, num_batches, fails_at=None, extra=None):
        self.num_batches = num_batches
        self.fails_at = fails_at
        self.extra = extra or {}
        self.next = 0

    def __iter__(self):
        while self.next < self.num_batches:
            if self.next == self.fails_at:
                raise OSError("disk on fire")
            tokens = torch.full((4, 8), self.next)
            if self.documents is not None:
                self.extra["document_ids"] = self.documents(self.next)
            self.next += 1
            yield {"input": tokens, **self.extra}, tokens

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state_dict):
        self.next = state_dict["next"]


class ShorterFrom(CountingLoader):
    """A loader whose batches from number ``at`` on have ``rows`` rows in place of four."""

    def __init__(self, at, num_batches=8, rows=2):
        super().__init__(num_batches)
        self.at = at
        self.rows = rows

    def __iter__(self):
        for inputs, labels in super().__iter__():
            rows = 4 if self.next <= self.at else self.rows
            yield {"input": inputs["input"][:rows]}, labels[:rows]


RANKS = [4, 6, 8]
"""Global ranks of the group, other than the group ranks so that messages cannot confuse the two."""
CONFIG = PlannerConfig(tolerance=0.0, min_shard=1, tile=1)


TRANSPORT = thread_transports(len(RANKS))[0]
"""Plans are prepared for it, but nothing is executed."""
GROUP_TIMEOUT_S = 300.0
AT_ONCE_S = 60.0
"""Far below the group's timeout, far above what these few batches take."""

S = TypeVar("S")
T = TypeVar("T")


def documents(group_rank: int) -> dict[str, torch.Tensor]:
    """Rows are single documents on the first rank, tokens are on the others: balance takes moving work."""
    rows = torch.arange(32).view(4, 8)
    return {"document_ids": rows // 8 if group_rank == 0 else rows}


@dataclass
class OneRank:
    """Arguments that may differ between the ranks of a test."""

    inner: CountingLoader
    config: PlannerConfig = CONFIG
    transport: Transport | None = TRANSPORT
    placement: Literal["balanced", "auto", "loader"] = "loader"


def counting(*lengths: int, **arguments) -> list[OneRank]:
    """Ranks with as many batches each."""
    return [
        OneRank(CountingLoader(length, extra=documents(rank)), **arguments)
        for rank, length in enumerate(lengths)
    ]


def on_all(items: Iterable[S], body: Callable[[S], T]) -> list[T]:
    """``body`` of every rank's item, all at the same time."""
    items = list(items)
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(body, items))


def groups(timeout_s: float = GROUP_TIMEOUT_S, size: int = len(RANKS)):
    """A function that gives each of ``size`` threads its gloo group, once all have called it."""
    store = dist.HashStore()
    timeout = timedelta(seconds=timeout_s)
    kind = dist.ProcessGroup.BackendType.GLOO

    def join(rank: int):
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        group = dist.ProcessGroup(store, rank, size)
        group._register_backend(CPU, kind, gloo)
        group._set_default_backend(kind)
        return group

    return join


def connect(
    ranks: list[OneRank],
    cp: int = 1,
    timeout_s: float = GROUP_TIMEOUT_S,
    accumulation: int = 1,
    microbatches: int = 2,
) -> list[PlanningLoader]:
    """One loader per rank, over one gloo group if there are several."""
    group_of = groups(timeout_s, len(ranks))
    topology = Topology(1, len(ranks) // cp, cp, 1)
    kinds = [
        AttentionKind("full", 1, AttentionShape(2, 2, 8, 4)),
        AttentionKind("chunked", 3, AttentionShape(2, 2, 8, 4), block=8),
    ]
    kernel = get_kernel("cpu", CPU)

    def build(group_rank):
        rank = ranks[group_rank]
        group = group_of(group_rank) if len(ranks) > 1 else None
        engines = [
            CoreAttentionEngine(
                kernel, rank.transport, rank=group_rank, device=CPU, scale=1.0
            )
            for _ in kinds
        ]
        placement = None
        if rank.placement != "loader":
            placement = Placement(
                group,
                None,
                topology,
                group_rank,
                CONFIG,
                kinds,
                strict=rank.placement == "balanced",
            )
        planner = BatchPlanner(
            group,
            RANKS[: len(ranks)],
            topology,
            config=rank.config,
            kinds=kinds,
            engines=engines,
            placement=placement,
        )
        return PlanningLoader(
            rank.inner,
            lambda: planner,
            documents=DocumentRule(EOS),
            microbatches=microbatches,
            accumulation=accumulation,
            snapshot=True,
            on_batch=lambda planned: None,
        )

    return on_all(range(len(ranks)), build)


def drain(loader: PlanningLoader) -> tuple[list[int], BaseException | None]:
    """The numbers of all batches, and what ended them."""
    numbers = []
    try:
        for _, labels in loader:
            numbers.append(int(labels[0, 0]))
    except BaseException as error:
        return numbers, error
    return numbers, None


def drain_at_once(
    loaders: list[PlanningLoader],
) -> tuple[list[list[int]], list[BaseException | None]]:
    warm_up()  # a new machine compiles the planner
    begin = time.perf_counter()
    numbers, errors = zip(*on_all(loaders, drain), strict=True)
    assert time.perf_counter() - begin < AT_ONCE_S
    return list(numbers), list(errors)
