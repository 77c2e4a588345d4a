# SPDX-License-Identifier: BSD-3-Clause
"""The planning loader on several ranks: however one of them ends, all learn of it at once.

Ranks are threads with a gloo group of their own, connected through real sockets.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn, TypeVar

import pytest
import torch
import torch.distributed as dist

from tests.lib.jobs.loaders import CPU, EOS, CountingLoader, gloo_group
from tests.lib.profiles import make_profile
from tests.lib.threaded import thread_transports
from torchtitan_cad.integration.loading.batch_planner import BatchPlanner, PlanRules
from torchtitan_cad.integration.loading.documents import DocumentRule
from torchtitan_cad.integration.loading.loader import PlanningLoader
from torchtitan_cad.integration.loading.placement import Parcel, Placement
from torchtitan_cad.integration.loading.redistribution import POSITIONS, Redistribution
from torchtitan_cad.integration.machine import check_same_profile, measure_times
from torchtitan_cad.integration.topology import Topology
from torchtitan_cad.planning import AttentionShape, LayerTimes, PlannerConfig, warm_up
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.errors import PeerError, PlanMismatchError
from torchtitan_cad.runtime.kernels.select import get_kernel
from torchtitan_cad.runtime.transport import Transport

RANKS = [4, 6, 8]
"""Global ranks of the group, other than the group ranks so that messages cannot confuse the two."""
CONFIG = PlannerConfig(tolerance=0.0, min_shard=1, tile=1)


TRANSPORT = thread_transports(len(RANKS))[0]
"""Plans are prepared for it, but nothing is executed."""
GROUP_TIMEOUT_S = 300.0
AT_ONCE_S = 60.0
"""Far below the group's timeout, far above what these few batches take."""

S, T = TypeVar("S"), TypeVar("T")


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
    times: LayerTimes | None = None


def on_all(items: Iterable[S], body: Callable[[S], T]) -> list[T]:
    """``body`` of every rank's item, all at the same time."""
    items = list(items)
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(body, items))


def connect(
    ranks: list[OneRank],
    cp: int = 1,
    timeout_s: float = GROUP_TIMEOUT_S,
    accumulation: int = 1,
) -> list[PlanningLoader]:
    """One loader per rank, over one gloo group."""
    store = dist.HashStore()

    def build(group_rank: int) -> PlanningLoader:
        mine = ranks[group_rank]
        group = gloo_group(store, group_rank, len(ranks), timeout_s)
        engine = CoreAttentionEngine(
            get_kernel("cpu", CPU),
            mine.transport,
            rank=group_rank,
            device=CPU,
            scale=1.0,
        )
        kinds = [AttentionKind("full", 1, AttentionShape(2, 2, 8, 4))]
        rules = PlanRules(mine.config, kinds, times=mine.times)
        placement, topology = None, Topology(1, len(ranks) // cp, cp, 1)
        if mine.placement != "loader":
            strict = mine.placement == "balanced"
            placement = Placement(
                group, None, topology, group_rank, CONFIG, kinds, None, strict=strict
            )
        planner = BatchPlanner(
            group, RANKS[: len(ranks)], topology, rules, [engine], placement=placement
        )
        return PlanningLoader(
            mine.inner,
            lambda: planner,
            documents=DocumentRule(EOS),
            rows_per_microbatch=2,
            accumulation=accumulation,
            snapshot=True,
            on_batch=lambda planned: None,
        )

    return on_all(range(len(ranks)), build)


def drain(loader: PlanningLoader) -> tuple[list[int], BaseException | None]:
    """The numbers of all batches, and what ended them."""
    numbers: list[int] = []
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


def planning_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "cad-planning"]


@pytest.fixture(autouse=True)
def _no_planning_thread_is_left() -> Iterator[None]:
    yield
    deadline = time.perf_counter() + AT_ONCE_S
    while threads := planning_threads():
        assert time.perf_counter() < deadline, threads
        time.sleep(0.01)


def counting(lengths: list[int]) -> list[OneRank]:
    return [
        OneRank(CountingLoader(length, extra=documents(i)))
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_shortest_rank_ends_all_after_the_same_step(accumulation):
    loaders = connect(counting([5, 3, 5]), accumulation=accumulation)
    assert drain_at_once(loaders) == ([[0, 1, 2][: 4 - accumulation]] * 3, [None] * 3)


ERRORS = {"iterator": SystemExit, "batch": OSError, "state": SystemExit}
"""Errors by where they are raised, also some that are no ``Exception``."""


class FailingLoader(CountingLoader):
    """Fails while creating its iterator, drawing its third batch, or giving its state after the second."""

    def __init__(self, at: str) -> None:
        super().__init__(8, fails_at=2 if at == "batch" else None, extra=documents(1))
        self.at = at

    def __iter__(self) -> Iterator[Any]:
        if self.at == "iterator":
            raise SystemExit("no workers")
        return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        if self.at == "state" and self.next == 2:
            raise SystemExit("no workers")
        return super().state_dict()


def assert_peers_name_rank_6(errors: list[BaseException | None]) -> None:
    for peer in (0, 2):
        assert isinstance(errors[peer], PeerError)
        assert "rank 6 failed while loading or planning a batch" in str(errors[peer])


@pytest.mark.parametrize("at", ERRORS)
def test_an_inner_loader_that_fails_on_one_rank_is_reported_on_all(at):
    ranks = counting([8, 8, 8])
    ranks[1].inner = FailingLoader(at)
    numbers, errors = drain_at_once(connect(ranks))
    assert isinstance(errors[1], ERRORS[at])
    assert numbers[1] == {"iterator": [], "batch": [0, 1], "state": [0]}[at]
    assert_peers_name_rank_6(errors)
    assert (
        numbers[0]
        == numbers[2]
        == {"iterator": [], "batch": [0, 1], "state": [0, 1]}[at]
    )


@pytest.mark.parametrize("where", ["make_plan", "add_plan"])
def test_planning_that_fails_on_one_rank_is_reported_on_all(where):
    ranks = counting([8, 8, 8])
    if where == "make_plan":
        ranks[1].config = PlannerConfig(planner="magic")
    else:
        ranks[1].transport = None
    numbers, errors = drain_at_once(connect(ranks))
    assert numbers == [[], [], []]
    assert isinstance(errors[1], ValueError)
    assert {"make_plan": "magic", "add_plan": "give the engine a transport"}[
        where
    ] in str(errors[1])
    assert_peers_name_rank_6(errors)


class TornRedistribution(Redistribution):
    """A redistribution that fails once tokens have come."""

    def scatter(self, came: torch.Tensor) -> torch.Tensor:
        raise ValueError("torn")


def fail(*_: Any) -> NoReturn:
    raise ValueError("torn")


@pytest.mark.parametrize("where", ["describe", "pack", "unpack"])
def test_a_rank_that_fails_once_plans_are_made_is_reported_on_all(where):
    """What has failed after the exchange of tokens is announced in the next step, which the peers plan ahead."""
    loaders = connect([replace(rank, placement="auto") for rank in counting([8, 8, 8])])
    planner = loaders[1].planner()
    placement: Any = planner.placement
    pack = placement.pack

    def pack_torn(*arguments: Any) -> Parcel:
        parcel = pack(*arguments)
        return replace(
            parcel, redistribution=TornRedistribution(**vars(parcel.redistribution))
        )

    if where == "describe":
        planner._engines[0].plan = fail  # type: ignore[method-assign]
    elif where == "pack":
        placement._per_peer = fail
    else:
        placement.pack = pack_torn
    numbers, errors = drain_at_once(loaders)
    assert [len(batches) for batches in numbers] == (
        [1, 0, 1] if where == "unpack" else [0, 0, 0]
    )
    assert isinstance(errors[1], ValueError)
    assert "torn" in str(errors[1])
    assert_peers_name_rank_6(errors)


def test_a_failure_is_raised_as_itself_when_no_peer_is_left_to_tell():
    alone, _ = connect(
        [OneRank(CountingLoader(8, fails_at=0)), OneRank(CountingLoader(8))],
        timeout_s=1,
    )
    ((numbers,), (error,)) = drain_at_once([alone])
    assert numbers == []
    assert isinstance(error, OSError)


def test_different_plans_are_an_error_on_all_ranks():
    ranks = counting([8, 8, 8])
    ranks[2].config = PlannerConfig(tolerance=100.0, min_shard=1, tile=1)
    _, errors = drain_at_once(connect(ranks))
    for error in errors:
        assert isinstance(error, PlanMismatchError)
        assert "ranks [8] planned a batch differently from rank 4" in str(error)


OWN_POSITIONS = {"positions": torch.arange(8).expand(4, 8)}
PIXELS = {"pixels": torch.zeros(4, 8)}


@pytest.mark.parametrize(
    ("extras", "redistributed", "warnings"),
    [
        ([{}, {}, {}], True, 0),
        ([OWN_POSITIONS] * 3, True, 0),
        ([OWN_POSITIONS, OWN_POSITIONS, {}], False, 0),
        ([{}, PIXELS, {}], False, 1),
    ],
    ids=["none", "positions", "positions on some", "pixels on one"],
)
def test_tokens_are_redistributed_unless_a_rank_has_what_cannot_be(
    caplog, extras, redistributed, warnings
):
    ranks = [replace(rank, placement="auto") for rank in counting([2, 2, 2])]
    for rank, extra in zip(ranks, extras, strict=True):
        rank.inner.extra.update(extra)
    batches = on_all(connect(ranks), list)
    assert [len(each) for each in batches] == [2, 2, 2]
    inputs = [inputs for each in batches for inputs, _ in each]
    assert all((POSITIONS in each) == redistributed for each in inputs)
    said = [line for line in caplog.messages if "leaves batches on the ranks" in line]
    assert len(said) == warnings
    assert PIXELS not in extras or "batch key 'pixels'" in said[0]


def redistributed_over_steps(accumulation: int) -> list[PlanningLoader]:
    """Loaders of two ranks whose documents get other homes; the lengths of the first rank's differ between batches."""
    ranks = [replace(rank, placement="auto") for rank in counting([12, 12])]
    rows = torch.arange(32).view(4, 8)
    ranks[0].inner.documents = lambda number: rows // (8 >> number % 4)
    return connect(ranks, accumulation=accumulation)


def test_a_step_that_is_resumed_in_its_middle_is_redistributed_alike():
    def numbers(batches: list[Any]) -> list[list[int]]:
        return [labels.flatten().tolist() for _, labels in batches]

    loaders = redistributed_over_steps(4)
    iterators = [iter(loader) for loader in loaders]
    first = on_all(
        iterators, lambda iterator: numbers(list(itertools.islice(iterator, 6)))
    )
    states = [loader.state_dict() for loader in loaders]
    rest = on_all(iterators, lambda iterator: numbers(list(iterator)))
    assert any(len(set(batch)) > 1 for batch in first[0][:4]), (
        "no document came from another batch"
    )
    for step in range(2):
        in_step = [
            token
            for batches in first
            for batch in batches[4 * step : 4 * step + 4]
            for token in batch
        ]
        assert step or sorted(in_step) == sorted([0, 1, 2, 3] * 64)
    resumed = redistributed_over_steps(4)
    for loader, state in zip(resumed, states, strict=True):
        loader.load_state_dict(state)
    assert on_all(resumed, lambda loader: numbers(list(loader))) == rest


def test_what_cannot_be_redistributed_ends_a_job_that_insists():
    ranks = [replace(rank, placement="balanced") for rank in counting([2, 2])]
    ranks[1].inner.extra["pixels"] = torch.zeros(4, 8)
    numbers, errors = drain_at_once(connect(ranks))
    assert numbers == [[], []]
    assert isinstance(errors[0], PeerError)
    assert isinstance(errors[1], ValueError)
    assert "cannot redistribute batch key 'pixels'" in str(errors[1])


def test_ranks_that_share_a_sequence_must_load_the_same_documents():
    _, errors = drain_at_once(connect(counting([8, 8]), cp=2))
    for error in errors:
        assert isinstance(error, PeerError)
        assert "ranks 4 and 6 share a sequence but loaded different documents" in str(
            error
        )


class ShorterFrom(CountingLoader):
    """A loader whose batches from number ``at`` on have two rows in place of four."""

    def __init__(self, at: int) -> None:
        super().__init__(8)
        self.at = at

    def __iter__(self) -> Iterator[Any]:
        for number, (inputs, labels) in enumerate(super().__iter__()):
            yield (
                (inputs, labels)
                if number < self.at
                else ({"input": inputs["input"][:2]}, labels[:2])
            )


@pytest.mark.parametrize(
    ("at", "said"),
    [
        (
            (2, 1),
            "rank 6 loaded 1 and rank 4 2 batches of (rows, tokens, rows per microbatch) = [4, 8, 2] before one ",
        ),
        (
            (1, 0),
            "rank 6 loaded a batch of (rows, tokens, rows per microbatch) = [2, 8, 2], and rank 4 one of [4, 8, ",
        ),
    ],
)
def test_batches_of_other_shapes_in_another_order_are_named_as_loaded(at, said):
    """All that is named has been loaded: a step's batches of one shape are planned together."""
    _, errors = drain_at_once(
        connect([OneRank(ShorterFrom(number)) for number in at], accumulation=3)
    )
    for error in errors:
        assert isinstance(error, PeerError)
        assert said in str(error)


def take_two_and_close(loader: PlanningLoader) -> float:
    """Seconds that closing took."""
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    begin = time.perf_counter()
    loader.close()
    return time.perf_counter() - begin


def test_all_ranks_can_close_and_start_over():
    loaders = connect(counting([1000, 1000, 1000]))
    for _ in range(2):
        assert max(on_all(loaders, take_two_and_close)) < AT_ONCE_S
        assert not planning_threads()
        on_all(loaders, lambda loader: loader.load_state_dict({"next": 0}))


def test_a_rank_that_closes_early_ends_the_others():
    loaders = connect(counting([1000, 1000, 1000]))
    with ThreadPoolExecutor(3) as pool:
        closing = pool.submit(take_two_and_close, loaders[0])
        peers = [pool.submit(drain, loader) for loader in loaders[1:]]
        assert closing.result(AT_ONCE_S) < AT_ONCE_S
        (first, first_error), (second, second_error) = (
            peer.result(AT_ONCE_S) for peer in peers
        )
    assert first_error is second_error is None
    assert first == second
    assert 2 <= len(first) <= 4  # what was planned ahead when the rank closed


def test_closing_waits_no_longer_than_told_for_a_peer_that_never_plans():
    alone, _ = connect(counting([8, 8]), timeout_s=3)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(drain, alone)
        deadline = time.perf_counter() + AT_ONCE_S
        while not planning_threads():
            assert time.perf_counter() < deadline
            time.sleep(0.01)
        alone.close(timeout_s=0.2)
        assert not waiting.done()
        numbers, error = waiting.result(AT_ONCE_S)
    assert numbers == []
    assert isinstance(error, RuntimeError)


@pytest.mark.parametrize("third", ["same", "another", "none"])
def test_ranks_must_read_the_same_profile(third):
    profile, store = make_profile(), dist.HashStore()
    others = {
        "same": make_profile(),
        "another": make_profile(kernel="other"),
        "none": None,
    }

    def check(group_rank: int) -> str | None:
        group = gloo_group(store, group_rank, len(RANKS), GROUP_TIMEOUT_S)
        try:
            check_same_profile(
                group,
                RANKS,
                "profile.json",
                others[third] if group_rank == 2 else profile,
            )
        except ValueError as error:
            return str(error)
        return None

    errors = on_all(range(len(RANKS)), check)
    if third == "same":
        assert errors == [None] * 3
    else:
        message = "cad.profile = 'profile.json': ranks [8] read another profile than rank 4; set it to one file"
        assert all(error is not None and error.startswith(message) for error in errors)


def test_all_ranks_plan_by_the_times_of_the_slowest():
    """Ranks of two hosts measure different times; all take the same, bit for bit."""
    store, hosts, transports = (
        dist.HashStore(),
        (0, 0, 1),
        thread_transports(len(RANKS)),
    )

    def measure(group_rank: int) -> LayerTimes:
        group = gloo_group(store, group_rank, len(RANKS), GROUP_TIMEOUT_S)
        compute = 1.0 + group_rank, 3.0 - group_rank
        return measure_times(
            compute,
            transports[group_rank],
            hosts,
            group_rank,
            CPU,
            group,
            overlaps=True,
        )

    first, *others = on_all(range(len(RANKS)), measure)
    assert others == [first, first]
    assert (first.unit, first.linear) == (3.0, 3.0)


def test_a_batch_that_stays_home_says_why_once(caplog):
    caplog.set_level("INFO")
    slow = LayerTimes(1e-9, 0.0, 1e6, 1e6, 0.0, overlaps=False)
    ranks = [
        OneRank(CountingLoader(3, extra=documents(rank)), times=slow)
        for rank in range(2)
    ]
    _, errors = drain_at_once(connect(ranks))
    assert errors == [None, None]
    said = [
        message
        for message in caplog.messages
        if message.startswith("CAD leaves attention where its tokens are")
    ]
    assert len(said) == 2  # of two ranks
    assert "a link of 0.001 GB/s" in said[0]
