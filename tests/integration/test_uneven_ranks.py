# SPDX-License-Identifier: BSD-3-Clause
"""Data of several ranks: unequal rows or numbers of batches, and however one of them ends, all learn of it at once.

Ranks are threads with a gloo group of their own, connected through real sockets.
"""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import NoReturn
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from tests.lib.jobs.harness import parse_job
from tests.lib.jobs.loaders import (
    AT_ONCE_S,
    CPU,
    RANKS,
    CountingLoader,
    OneRank,
    ParallelAwareDataloader,
    ShorterFrom,
    connect,
    counting,
    documents,
    drain,
    drain_at_once,
    groups,
    on_all,
)
from tests.lib.refusals import refusal
from tests.lib.threaded import thread_transports
from torchtitan_cad.integration.loading.batch_planner import BatchPlanner
from torchtitan_cad.integration.loading.loader import PLAN_KEYS, PlanningLoader
from torchtitan_cad.integration.loading.placement import Placement
from torchtitan_cad.integration.loading.redistribution import POSITIONS
from torchtitan_cad.integration.machine import measure_times
from torchtitan_cad.integration.torchtitan_v0_2 import plugin
from torchtitan_cad.integration.torchtitan_v0_2.validation import ValidationLoader
from torchtitan_cad.planning import PlannerConfig
from torchtitan_cad.planning.model.batch import BatchShape
from torchtitan_cad.runtime.errors import PeerError, PlanMismatchError


def planning_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "cad-planning"]


@pytest.fixture(autouse=True)
def _no_planning_thread_is_left() -> Iterator[None]:
    yield
    deadline = time.perf_counter() + AT_ONCE_S
    while threads := planning_threads():
        assert time.perf_counter() < deadline, threads
        time.sleep(0.01)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_shortest_rank_ends_all_after_the_same_step(accumulation):
    loaders = connect(counting(5, 3, 5), accumulation=accumulation)
    numbers, errors = drain_at_once(loaders)
    assert numbers == [[0, 1, 2][: 4 - accumulation]] * 3
    assert errors == [None] * 3


def torn(*_: object) -> NoReturn:
    raise SystemExit("torn")  # no ``Exception``


def tear(loader: PlanningLoader, where: str) -> None:
    """Make a rank fail at a call."""
    placement = loader.planner().placement
    if where == "state":
        loader.inner.state_dict = Mock(side_effect=[{}, SystemExit("torn")])
    elif where == "redistribution":
        placement.redistribution = torn
    elif where == "exchange":

        def exchange_torn(*arguments):
            Placement.exchange(placement, *arguments)
            torn()

        placement.exchange = exchange_torn


OWN_POSITIONS = {"positions": torch.arange(8).expand(4, 8)}
PIXELS = {"pixels": torch.zeros(4, 8)}
INSISTS = {"placement": "balanced", "inner": CountingLoader(8, extra=PIXELS)}
MAGIC = {"placement": "loader", "config": PlannerConfig(planner="magic")}
BURNT = {"inner": CountingLoader(8, fails_at=2, extra=documents(1))}


@pytest.mark.parametrize(
    ("where", "changes", "error", "batches"),
    [
        ("iterator", {"inner": None}, "'NoneType' object", (0, 0)),
        ("batch", BURNT, "on fire", (2, 2)),
        ("state", {}, "torn", (0, 0)),
        ("planner", MAGIC, "magic", (0, 0)),
        ("engine", {"transport": None}, "give the engine a tra", (0, 0)),
        ("pixels", INSISTS, "cannot redistribute batch key 'pixels'", (0, 0)),
        ("redistribution", {}, "torn", (0, 0)),
        # What fails after tokens have come is announced in the next step, which the peers plan ahead.
        ("exchange", {}, "torn", (1, 0)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_rank_that_fails_is_reported_on_all(where, changes, error, batches):
    """``batches``: how many the peers have got, and the rank itself."""
    first, second, third = counting(8, 8, 8, placement="auto")
    loaders = connect([first, replace(second, **changes), third])
    tear(loaders[1], where)
    numbers, errors = drain_at_once(loaders)
    of_peers, own = batches
    assert [len(drained) for drained in numbers] == [of_peers, own, of_peers]
    assert error in str(errors[1])
    assert not isinstance(errors[1], PeerError)
    for peer in (0, 2):
        assert isinstance(errors[peer], PeerError)
        assert "rank 6 failed while loading or planning a batch" in str(errors[peer])


def test_a_failure_is_raised_as_itself_when_no_peer_is_left_to_tell():
    ranks = [OneRank(CountingLoader(8, fails_at=0)), OneRank(CountingLoader(8))]
    alone, _ = connect(ranks, timeout_s=1)
    numbers, error = drain(alone)
    assert numbers == []
    assert isinstance(error, OSError)


@pytest.mark.parametrize(
    ("extras", "redistributed"),
    [
        ([{}, {}, {}], True),
        ([OWN_POSITIONS] * 3, True),
        ([OWN_POSITIONS, OWN_POSITIONS, {}], True),
        ([{}, PIXELS, {}], False),
    ],
    ids=["none", "positions", "positions on some", "pixels on one"],
)
def test_tokens_are_redistributed_unless_a_rank_has_what_cannot_be(
    caplog, extras, redistributed
):
    ranks = counting(2, 2, 2, placement="auto")
    for rank, extra in zip(ranks, extras, strict=True):
        rank.inner.extra.update(extra)
    for batches in on_all(connect(ranks), list):
        has_positions = [POSITIONS in inputs for inputs, _ in batches]
        assert has_positions == [redistributed] * 2
    said = [line for line in caplog.messages if "leaves batches on the ranks" in line]
    assert len(said) == (not redistributed)
    assert all("batch key 'pixels'" in line for line in said)


def shorter_from(*numbers: int) -> list[OneRank]:
    return [OneRank(ShorterFrom(number, rows=3)) for number in numbers]


OTHER_CONFIG = PlannerConfig(tolerance=100.0, min_shard=1, tile=1)


@pytest.mark.parametrize(
    ("ranks", "options", "kind", "text"),
    [
        (
            [*counting(8, 8), OneRank(CountingLoader(8), OTHER_CONFIG)],
            {},
            PlanMismatchError,
            "ranks [8] planned a batch differently from rank 4",
        ),
        (
            counting(8, 8),
            {"cp": 2},
            PeerError,
            "ranks 4 and 6 share a sequence but loaded different documents",
        ),
        # All that is named has been loaded: a step's batches of one shape are planned together.
        (
            shorter_from(2, 1),
            {"accumulation": 3},
            PeerError,
            "rank 6 loaded 1 of (rows, tokens, rows per microbatch) = [4, 8, 2], and rank 4 2 of ",
        ),
        (
            shorter_from(1, 0),
            {"accumulation": 3},
            PeerError,
            "rank 6 loaded 3 of (rows, tokens, rows per microbatch) = [3, 8, 1], and rank 4 1 of ",
        ),
    ],
    ids=["plans", "documents of a sequence", "order of shapes", "shapes"],
)
def test_what_differs_between_ranks_is_an_error_on_all(ranks, options, kind, text):
    _, errors = drain_at_once(connect(ranks, **options))
    for error in errors:
        assert isinstance(error, kind)
        assert text in str(error)


def take_two_and_close(loader: PlanningLoader) -> float:
    """Seconds that closing took."""
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    begin = time.perf_counter()
    loader.close()
    return time.perf_counter() - begin


def test_all_ranks_can_close_and_start_over():
    loaders = connect(counting(1000, 1000, 1000))
    for _ in range(2):
        assert max(on_all(loaders, take_two_and_close)) < AT_ONCE_S
        assert not planning_threads()
        on_all(loaders, lambda loader: loader.load_state_dict({"next": 0}))


def test_closing_waits_no_longer_than_told_for_a_peer_that_never_plans():
    alone, _ = connect(counting(8, 8), timeout_s=3)
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


def test_all_ranks_plan_by_the_times_of_the_slowest():
    """Ranks of two hosts measure different times; all take the same, bit for bit."""
    group_of = groups()
    transports = thread_transports(len(RANKS))

    def measure(group_rank):
        return measure_times(
            (1.0 + group_rank, 3.0 - group_rank),
            transports[group_rank],
            (0, 0, 1),
            group_rank,
            CPU,
            group_of(group_rank),
            overlaps=True,
        )

    first, *others = on_all(range(len(RANKS)), measure)
    assert others == [first, first]
    assert (first.unit, first.linear) == (3.0, 3.0)


# Unequal rows, and unequal numbers of validation batches --------------------------------------------------------------


def test_ranks_with_fewer_rows_are_planned_with_the_others():
    inner = [CountingLoader(3), ShorterFrom(1), CountingLoader(3)]
    loaders = connect([OneRank(loader) for loader in inner], microbatches=1)
    tokens_of_ranks = []
    loaders[0].on_batch = lambda planned: tokens_of_ranks.append(
        planned.plans[0].layout.tokens_per_rank.tolist()
    )
    assert drain_at_once(loaders) == ([[0, 1, 2]] * 3, [None] * 3)
    assert tokens_of_ranks == [[32, 32, 32], [32, 16, 32], [32, 16, 32]]


def validation(
    steps: int, lengths: list[int], last_rows: int = 4, *, pp: int = 1, tp: int = 1
) -> list[ValidationLoader]:
    """The validation loaders of all ranks, over gloo."""
    config = Mock(
        **{
            "validation.steps": steps,
            "validation.local_batch_size": 4,
            "validation.dataset": "small",
            "parallelism.pipeline_parallel_degree": pp,
            "parallelism.tensor_parallel_degree": tp,
            "cad.nano_batches": 2,
        }
    )
    planners = connect([OneRank(CountingLoader(0)) for _ in lengths])
    loaders = []
    for number, (length, loader) in enumerate(zip(lengths, planners, strict=True)):
        session = Mock(
            validation=loader.planner(),
            plan_now=partial(plan_now, loader.planner()),
            ranks=RANKS[: len(lengths)],
            group_rank=number,
        )
        inner = ShorterFrom(length - 1, length, last_rows)
        inner.dataset = inner
        loaders.append(ValidationLoader(inner, config, session))
    return loaders


def plan_now(planner: BatchPlanner, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    rows, seq_len = batch["input"].shape
    starts = np.arange(0, rows * seq_len, seq_len)
    (planned,), _ = planner.plan(starts, BatchShape(rows, seq_len, rows))
    return planned.keys


def batches_of(loader: ValidationLoader) -> list[tuple[int, int]]:
    """Numbers and rows of the batches that were planned."""
    return [
        (int(labels[0, 0]), len(labels))
        for batch, labels in loader
        if PLAN_KEYS in batch
    ]


def test_validation_of_a_whole_set_ends_on_all_ranks_and_begins_anew(caplog):
    loaders = validation(-1, [2, 4, 3])
    for _ in range(2):
        assert on_all(loaders, batches_of) == [[(0, 4), (1, 4)]] * 3
    assert (
        "validation.steps = -1 ends after 2 batches, with the data of rank 4: other ranks have more"
        in caplog.messages[0]
    )


@pytest.mark.parametrize(
    ("degrees", "rows"),
    [({}, [(0, 4), (1, 3)]), ({"tp": 2}, [(0, 4)]), ({"pp": 2}, [(0, 4)])],
    ids=["data parallel", "tp2", "pp2"],
)
def test_rows_that_are_left_over_are_served_where_that_is_possible(
    degrees, rows, caplog
):
    loaders = validation(-1, [2, 2], last_rows=3, **degrees)
    assert on_all(loaders, batches_of) == [rows] * 2
    said = caplog.text.count("validation leaves out the last 3 rows of this rank")
    assert said == (2 if degrees else 0)


def test_a_number_of_validation_batches_is_that_of_torchtitan():
    loaders = validation(1, [3, 3])
    iterators = on_all(loaders, iter)
    assert all(PLAN_KEYS in batch for batch, _ in on_all(iterators, next))
    # torchtitan draws one more, for which peers need not be asked
    assert next(iterators[0], None) is None
    assert loaders[0].inner.next == 2


def test_a_rank_with_no_more_batches_than_validation_takes_does_not_hold_up_others():
    assert on_all(validation(1, [1, 3]), batches_of) == [[(0, 4)]] * 2


class LoadedByWorkers(CountingLoader, IterableDataset):
    """A data set of batches."""


def test_validation_of_a_whole_set_begins_anew_in_workers_that_persist():
    options = {"num_workers": 1, "batch_size": None, "persistent_workers": True}
    inner = ParallelAwareDataloader(LoadedByWorkers(2), 0, 1, **options)
    (loader,) = validation(-1, [2])
    loader = replace(loader, inner=inner)
    for _ in range(2):
        assert batches_of(loader) == [(0, 4), (1, 4)]


def test_a_rank_without_a_validation_batch_is_named_on_all():
    loaders = validation(-1, [2, 0])
    with ThreadPoolExecutor(2) as pool:
        for drained in [pool.submit(batches_of, loader) for loader in loaders]:
            with refusal("validation.dataset", "small"):
                drained.result(60)


@pytest.mark.parametrize(
    "switches",
    [["--parallelism.no-cad"], ["--parallelism.cad", "--cad.shadow"]],
    ids=str,
)
def test_document_ids_are_left_out_without_cad(switches, tmp_path):
    """By validation too."""
    from torchtitan.components.validate import Validator

    tokens = torch.zeros(1, 4)
    batch = {"input": tokens, "document_ids": tokens, "pixels": tokens}
    validator = Mock(**{"parallel_dims.cp_enabled": False})
    try:
        plugin.on_config(parse_job(tmp_path, *switches))
        _, _, others, _ = Validator.post_dataloading_process(
            validator, batch, tokens, [Mock()]
        )
        assert list(others) == ["pixels"]
    finally:
        plugin.restore()
