# SPDX-License-Identifier: BSD-3-Clause
"""Document boundaries, group layouts and the planning loader, in one process."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from tests.lib.jobs.loaders import (
    EOS,
    CountingLoader,
    OneRank,
    ParallelAwareDataloader,
    connect,
    drain,
)
from tests.lib.reference import local_tokens
from tests.lib.refusals import refusal
from torchtitan_cad.integration.failure import _may_be_caused_by_a_peer
from torchtitan_cad.integration.host_tensor import HostTensor
from torchtitan_cad.integration.loading.documents import (
    DocumentRule,
    cut_for_nano_batches,
)
from torchtitan_cad.integration.loading.loader import (
    PLAN_KEYS,
    PlanningLoader,
    _in_thread,
    _result,
)
from torchtitan_cad.integration.topology import Topology
from torchtitan_cad.planning.model.batch import (
    BatchShape,
    divides_by_row,
    slots_of_nano_batches,
    step_layouts,
)
from torchtitan_cad.runtime.errors import first_sentence

TOKENS = torch.tensor([[1, EOS, 2, 3], [EOS, EOS, 4, EOS]])
POSITIONS = {"positions": torch.tensor([[0, 1, 0, 1], [5, 6, 0, 0]])}
IDS = {"document_ids": torch.tensor([[1, 1, 1, 2], [2, 2, 2, 2]])}
BY_EOS = DocumentRule(EOS)
BY_POSITIONS = DocumentRule(by_positions=True)


@pytest.mark.parametrize(
    ("rule", "more", "expected"),
    [
        (BY_EOS, {}, [0, 2, 4, 5, 6]),
        (BY_EOS, POSITIONS, [0, 2, 4, 5, 6]),
        (BY_POSITIONS, POSITIONS, [0, 2, 4, 6, 7]),
        (BY_POSITIONS, POSITIONS | IDS, [0, 3, 4]),
    ],
    ids=["EOS", "EOS before positions", "positions that restart", "ids"],
)
def test_where_documents_begin(rule, more, expected):
    assert rule.starts({"input": TOKENS, **more}).tolist() == expected


@pytest.mark.parametrize(
    ("rule", "more"),
    [
        (BY_EOS, {"document_ids": IDS["document_ids"][:1]}),
        (BY_POSITIONS, {}),
        (BY_POSITIONS, {"positions": POSITIONS["positions"][:1]}),
    ],
    ids=["ids of another shape", "no positions", "positions of another shape"],
)
def test_documents_that_cannot_be_told_apart_are_refused(rule, more):
    with refusal():
        rule.starts({"input": TOKENS, **more})


few = st.integers(1, 3)
halves = st.integers(1, 2)


@given(st.data(), few, few, halves)
def test_layouts_and_slots_follow_the_halves_of_every_ranks_rows(
    data, cp, microbatches, nano_batches
):
    """Cuts rows of token numbers as the loop and context parallelism cut batches, and looks every token up.

    Data-parallel ranks have rows of equal or of other shapes.
    """
    sizes = data.draw(
        st.lists(st.tuples(st.integers(1, 4), few), min_size=1, max_size=3)
    )
    if data.draw(st.booleans()):
        sizes = sizes[:1] * len(sizes)
    shapes = []
    starts = []
    batches = []
    begins = []
    num_tokens = 0
    for rows, columns in sizes:
        shape = BatchShape(rows * microbatches, 2 * cp * columns, rows)
        size = shape.rows * shape.seq_len
        drawn = data.draw(st.lists(st.integers(0, size - 1)))
        begins_of_rows = np.arange(0, size, shape.seq_len)
        starts.append(np.union1d(begins_of_rows, drawn).astype(np.int64))
        shapes.append(shape)
        batches.append(num_tokens + torch.arange(size).view(shape.rows, -1))
        begins += (num_tokens + starts[-1]).tolist()
        num_tokens += size

    def in_documents(tokens):
        """(document, position) of tokens."""
        doc = np.searchsorted(begins, tokens, side="right") - 1
        return list(zip(doc, tokens.numpy() - np.take(begins, doc), strict=True))

    layouts = step_layouts(starts, shapes, cp, nano_batches)
    assert len(layouts) == microbatches
    for microbatch, nano in product(range(microbatches), range(nano_batches)):
        queries = []
        keys = []
        for shape, batch in zip(shapes, batches, strict=True):
            rows = shape.rows_per_microbatch
            tokens = batch.split(rows)[microbatch]
            in_the_middle = nano_batches == 2 and not divides_by_row(rows)
            if in_the_middle:
                tokens = cut_for_nano_batches(tokens, cp)
            known_by_slice = []
            for part in tokens.chunk(cp, 1):
                parts = part.chunk(nano_batches, int(in_the_middle))
                own = known = parts[nano].flatten()
                if in_the_middle and nano == 1:  # it attends to the first half too
                    known = torch.cat([parts[0].flatten(), own])
                queries.append(in_documents(own))
                keys.append(in_documents(known))
                known_by_slice.append(known.tolist())
            if not in_the_middle or nano == 1:
                slots = slots_of_nano_batches(shape, microbatch, cp, nano_batches)
                slot = slots[0 if in_the_middle else nano]
                assert np.array_equal(slot + int(batch[0, 0]), known_by_slice)
        layout = layouts[microbatch][nano]
        assert local_tokens(layout, queries=True) == queries
        assert local_tokens(layout) == keys


def planning_loader(
    inner, accumulation: int = 1, microbatches: int = 1
) -> tuple[PlanningLoader, list[Any]]:
    """A loader of one rank, and the batches that it has planned and handed out."""
    (loader,) = connect(
        [OneRank(inner)],
        accumulation=accumulation,
        microbatches=microbatches,
    )
    planned = list[Any]()
    loader.on_batch = planned.append
    return loader, planned


@pytest.mark.parametrize("accumulation", [1, 4])
def test_state_is_that_of_the_last_consumed_batch(accumulation):
    """In the middle of a step it is that of the step's beginning."""
    loader, _ = planning_loader(CountingLoader(8), accumulation)
    states = [loader.state_dict()]
    for number, (inputs, labels) in enumerate(islice(loader, 4)):
        assert int(inputs["input"][0, 0]) == number == int(labels[0, 0])
        states.append(loader.state_dict())
    loader.close()
    ends = [number - number % accumulation for number in range(5)]
    assert states == [{"next": end} for end in ends]

    resumed, planned = planning_loader(CountingLoader(8), accumulation)
    resumed.load_state_dict(states[-1])
    assert resumed.state_dict() == states[-1]
    assert drain(resumed) == ([4, 5, 6, 7], None)
    assert resumed.state_dict() == {"next": 8}
    assert len(planned) == 4


class LiveLoader(CountingLoader):
    """Its state has parts that go on changing, as those of torchtitan's data sets have."""

    def state_dict(self):
        return {"own": vars(self)}


def test_state_does_not_change_with_what_is_drawn_ahead():
    inner = LiveLoader(8)
    loader, _ = planning_loader(inner)
    next(iter(loader))
    state = loader.state_dict()
    while inner.next < 2:  # the loader draws ahead, in a thread
        time.sleep(0.01)
    assert state["own"]["next"] == 1
    loader.close()


def test_halves_under_tensor_parallelism_take_even_rows_only():
    """The ranks of a group have cut rows already; the middle of each would be another token."""

    loader, _ = planning_loader(CountingLoader(0))
    planner = loader.planner()
    planner.nano_batches = 2
    planner.check_rows(3)
    planner.topology = Topology(pp=1, dp=1, cp=1, tp=2)
    planner.check_rows(4)
    with refusal("cad.nano_batches", 2, remedy="1"):
        planner.check_rows(3)


def test_a_step_without_enough_data_is_not_begun():
    """torchtitan would draw its batches and train on none of them."""
    loader, planned = planning_loader(CountingLoader(8), accumulation=3)
    assert drain(loader) == ([0, 1, 2, 3, 4, 5], None)
    assert len(planned) == 6


def test_batches_carry_one_key_per_row_and_plans_live_as_long_as_needed():
    ids = torch.arange(32).view(4, 8) // 4
    inner = CountingLoader(10, extra={"document_ids": ids})
    loader, planned = planning_loader(inner, 2, microbatches=2)
    engines = loader.planner().engines
    assert len(engines) == 2
    previous: list[int] = []
    for number, (inputs, _) in enumerate(loader, start=1):
        assert inputs.keys() == {"input", PLAN_KEYS}
        assert planned[-1].plans[0].layout.doc_lengths.tolist() == [4] * 4
        keys = inputs[PLAN_KEYS]
        assert isinstance(keys, HostTensor)
        # FSDP2 moves every tensor argument to its device
        assert keys.to("meta") is keys
        first, _, second, _ = keys.tolist()
        assert keys.tolist() == [first, first, second, second]
        assert first != second
        # this batch and the one before, which may be in the same step
        for key, engine in product((first, second, *previous), engines):
            assert engine.plan(key).keys.num_local == 16
        assert len(planned) == number
        previous = [first, second]
    assert number == 10
    for engine in engines:
        with refusal(error=RuntimeError):
            engine.plan(0)


class Documents(CountingLoader, IterableDataset):
    """Four batches of a worker, which is killed once it has ``killed_at`` of them."""

    def __init__(self, killed_at=0, fails_at=-1):
        super().__init__(4, fails_at)
        self.killed_at = killed_at

    def __iter__(self):
        for batch in super().__iter__():
            if self.next == self.killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch


@pytest.fixture
def worker_loader() -> Iterator[Callable[..., ParallelAwareDataloader]]:
    """Makes loaders, whose workers have ended with the test: torch may take 5 s for each after an error."""
    yield lambda **kwargs: ParallelAwareDataloader(
        Documents(**kwargs),
        0,
        1,
        num_workers=2,
        batch_size=None,
        prefetch_factor=3,
        persistent_workers=True,
    )
    for worker in multiprocessing.active_children():
        worker.kill()
        worker.join()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_state_with_workers_is_that_of_the_last_consumed_batch(
    worker_loader, accumulation
):
    loader, _ = planning_loader(worker_loader(), accumulation)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    loader.close()

    resumed, _ = planning_loader(worker_loader(), accumulation)
    resumed.load_state_dict(state)
    numbers = [0, 0, 1, 1, 2, 2, 3, 3]  # workers take turns
    assert drain(resumed) == (numbers[3 - 3 % accumulation :], None)


def test_error_of_a_worker_is_one_line_and_this_ranks_own(worker_loader, caplog):
    loader, _ = planning_loader(worker_loader(fails_at=2))
    _, error = drain(loader)
    assert isinstance(error, OSError)
    said = "Caught OSError in DataLoader worker process 0. OSError: disk on fire"
    assert first_sentence(error) == said
    assert not _may_be_caused_by_a_peer(error)
    assert caplog.messages == ["this rank has failed while loading a batch"]


def test_killed_worker_is_noticed_while_the_planning_thread_waits(worker_loader):
    """The worker may have written half of a message, for the rest of which that thread waits."""
    iterators = []
    release = threading.Event()

    def draw():
        iterators.append(iter(worker_loader(killed_at=1)))
        release.wait(60)

    ahead = _in_thread(draw)
    with refusal(error=RuntimeError) as raised:
        _result(ahead)
    release.set()
    ahead.result(10)
    assert not _may_be_caused_by_a_peer(raised.value)


def test_topology_follows_torchtitans_rank_order():
    """[pp, dp x cp, tp], tp fastest."""
    topology = Topology(pp=2, dp=3, cp=2, tp=2)
    grid = np.arange(24).reshape(2, 6, 2)
    for (stage, group_rank, tp_rank), rank in np.ndenumerate(grid):
        assert topology.group_rank(rank) == group_rank
        assert topology.group_ranks(rank) == grid[stage, :, tp_rank].tolist()


@pytest.mark.parametrize(
    ("degrees", "ranks_per_node", "expected"),
    [
        ((1, 8, 2, 1), 8, 8),
        ((1, 8, 2, 2), 8, 4),
        ((2, 2, 1, 2), 8, 4),  # two stages in one node: the whole group
        ((1, 6, 1, 1), 4, None),
        ((1, 4, 1, 4), 2, None),
        ((1, 4, 1, 1), 0, None),
    ],
)
def test_nodes_of_a_group(degrees, ranks_per_node, expected):
    """They follow from the nodes of global ranks; None: the group's ranks do not fall into equal nodes."""
    topology = Topology(*degrees)
    if expected is None:
        with refusal("cad.ranks_per_node", ranks_per_node):
            topology.group_ranks_per_node(ranks_per_node)
        return
    assert topology.group_ranks_per_node(ranks_per_node) == expected
