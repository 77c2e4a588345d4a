# SPDX-License-Identifier: BSD-3-Clause
"""Document boundaries, group layouts and the planning loader, in one process."""

import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from tests.lib.refusals import check_refusal, refusal
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu

enable_cpu()

# torchtitan must not be imported before enable_cpu().
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402

from tests.lib.jobs.loaders import CPU, EOS, CountingLoader  # noqa: E402
from torchtitan_cad.integration.failure import _may_be_caused_by_a_peer  # noqa: E402
from torchtitan_cad.integration.host_tensor import HostTensor  # noqa: E402
from torchtitan_cad.integration.loading.batch_planner import BatchPlanner, PlanRules  # noqa: E402
from torchtitan_cad.integration.loading.documents import (  # noqa: E402
    DocumentRule,
    cut_for_nano_batches,
    document_starts,
)
from torchtitan_cad.integration.loading.loader import (  # noqa: E402
    PLAN_KEYS,
    TRAINED,
    WATCHED,
    PlanningLoader,
    _Pace,
    _Producer,
)
from torchtitan_cad.integration.topology import Topology  # noqa: E402
from torchtitan_cad.planning import AttentionShape, PlannerConfig  # noqa: E402
from torchtitan_cad.planning.model.batch import (  # noqa: E402
    BatchShape,
    divides_by_row,
    group_layout,
    nano_layouts,
    slots_of_nano_batches,
)
from torchtitan_cad.planning.model.kind import AttentionKind  # noqa: E402
from torchtitan_cad.runtime.engine import CoreAttentionEngine  # noqa: E402
from torchtitan_cad.runtime.errors import first_sentence  # noqa: E402
from torchtitan_cad.runtime.kernels.select import get_kernel  # noqa: E402


class TestDocumentStarts:
    def test_a_document_ends_after_its_eos(self):
        tokens = torch.tensor([[1, EOS, 2, 3], [EOS, EOS, 4, EOS]])
        assert document_starts(tokens, EOS).tolist() == [0, 2, 4, 5, 6]

    def test_misshapen_ids_are_refused(self):
        with refusal():
            document_starts(torch.zeros(2, 4), EOS, torch.zeros(2, 3))

    def test_documents_by_positions_that_restart(self):
        rule, tokens = DocumentRule(by_positions=True), torch.full((2, 4), EOS)
        positions = torch.tensor([[0, 1, 0, 1], [5, 6, 0, 0]])
        assert rule.starts({"input": tokens, "positions": positions}).tolist() == [
            0,
            2,
            4,
            6,
            7,
        ]
        ids = torch.tensor([[1, 1, 1, 2], [2, 2, 2, 2]])
        assert rule.starts(
            {"input": tokens, "positions": positions, "document_ids": ids}
        ).tolist() == [0, 3, 4]
        assert DocumentRule(EOS).starts(
            {"input": tokens, "positions": positions}
        ).tolist() == list(range(8))
        for inputs in (
            {"input": tokens},
            {"input": tokens, "positions": positions[:1]},
        ):
            with refusal("cad.documents", "positions"):
                rule.starts(inputs)


@given(st.data())
def test_layouts_and_slots_follow_the_halves_of_every_ranks_rows(data):
    """Cuts rows of token numbers as the loop and context parallelism cut batches, and looks every token up."""
    dp, cp, microbatches = (data.draw(st.integers(1, 3)) for _ in range(3))
    rows, nano_batches = (
        data.draw(st.integers(1, 4)),
        data.draw(st.sampled_from([1, 2])),
    )
    shape = BatchShape(rows * microbatches, 2 * cp * data.draw(st.integers(1, 4)), rows)
    size = shape.rows * shape.seq_len
    starts = [
        np.union1d(
            np.arange(0, size, shape.seq_len),
            data.draw(st.lists(st.integers(0, size - 1))),
        ).astype(np.int64)
        for _ in range(dp)
    ]
    numbers = torch.arange(size).view(shape.rows, shape.seq_len)
    in_the_middle = nano_batches == 2 and not divides_by_row(rows)
    for microbatch, batch in enumerate(numbers.split(rows)):
        batch = cut_for_nano_batches(batch, cp) if in_the_middle else batch
        slots = slots_of_nano_batches(shape, microbatch, cp, nano_batches)
        layouts = nano_layouts(starts, shape, microbatch, cp, nano_batches)
        if nano_batches == 1:
            assert (
                layouts[0].segments()
                == group_layout(starts, shape, microbatch, cp).segments()
            )
        documents: list[dict[tuple[int, int], int]] = [{} for _ in layouts]
        for rank in range(dp * cp):
            mine, first = batch.chunk(cp, 1)[rank % cp], starts[rank // cp]
            attending = [
                half.flatten().tolist()
                for half in mine.chunk(nano_batches, int(in_the_middle))
            ]
            known = (
                [attending[0], attending[0] + attending[1]]
                if in_the_middle
                else attending
            )
            assert [slot[rank % cp].tolist() for slot in slots] == (
                known[1:] if in_the_middle else attending
            )
            for layout, keys, queries, seen in zip(
                layouts, known, attending, documents, strict=True
            ):
                begins = [int(first[first <= token].max()) for token in keys]
                own = layout.seg_rank == rank
                runs = (
                    x[own].tolist()
                    for x in (
                        layout.seg_doc,
                        layout.seg_start,
                        layout.seg_length,
                        layout.seg_attends,
                    )
                )
                local = [
                    (d, start + i, flag)
                    for d, start, n, flag in zip(*runs, strict=True)
                    for i in range(n)
                ]
                flags = [False] * (len(keys) - len(queries)) + [True] * len(queries)
                wanted = [
                    (token - begin, flag)
                    for token, begin, flag in zip(keys, begins, flags, strict=True)
                ]
                assert [rest for _, *rest in local] == [list(each) for each in wanted]
                for (doc, *_), begin in zip(local, begins, strict=True):
                    assert seen.setdefault((rank // cp, begin), doc) == doc
        assert all(len({*seen.values()}) == len(seen) for seen in documents), (
            "documents share an id"
        )


def planning_loader(
    inner: Any, accumulation: int = 1, rows_per_microbatch: int | None = None
) -> Any:
    engine = CoreAttentionEngine(
        get_kernel("cpu", CPU), None, rank=0, device=CPU, scale=1.0
    )
    rules = PlanRules(
        PlannerConfig(), [AttentionKind("full", 1, AttentionShape(2, 2, 8, 4))]
    )
    planner = BatchPlanner(None, [0], Topology(1, 1, 1, 1), rules, [engine])
    batches: list[Any] = []
    loader = PlanningLoader(
        inner,
        lambda: planner,
        documents=DocumentRule(EOS),
        rows_per_microbatch=rows_per_microbatch,
        accumulation=accumulation,
        snapshot=True,
        on_batch=batches.append,
    )
    return loader, engine, batches


@pytest.mark.parametrize("accumulation", [1, 4])
def test_state_is_that_of_the_last_consumed_batch(accumulation):
    """In the middle of a step it is that of the step's beginning, and how many batches follow it."""
    loader, _, _ = planning_loader(CountingLoader(8), accumulation)
    assert loader.state_dict() == {"next": 0}
    iterator = iter(loader)
    for number in range(3):
        inputs, labels = next(iterator)
        assert int(inputs["input"][0, 0]) == number == int(labels[0, 0])
        in_a_step = {"next": 0, TRAINED: number + 1}
        assert loader.state_dict() == (
            in_a_step if accumulation > 1 else {"next": number + 1}
        )
    state = loader.state_dict()
    loader.close()

    resumed, _, planned = planning_loader(CountingLoader(8), accumulation)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert [int(inputs["input"][0, 0]) for inputs, _ in resumed] == [3, 4, 5, 6, 7]
    assert resumed.state_dict() == {"next": 8}
    assert len(planned) == 5


def test_a_step_without_enough_data_is_not_begun():
    """torchtitan would draw its batches and train on none of them."""
    loader, _, planned = planning_loader(CountingLoader(8), accumulation=3)
    assert [int(labels[0, 0]) for _, labels in loader] == [0, 1, 2, 3, 4, 5]
    assert len(planned) == 6


def test_batches_carry_one_key_per_row_and_plans_live_as_long_as_needed():
    loader, engine, planned = planning_loader(
        CountingLoader(10), accumulation=2, rows_per_microbatch=2
    )
    previous: list[int] = []
    for index, (inputs, _) in enumerate(loader):
        keys = inputs[PLAN_KEYS]
        assert isinstance(keys, HostTensor)
        # FSDP2 moves every tensor argument to its device
        assert keys.to("meta") is keys
        first, second = keys.tolist()[0], keys.tolist()[2]
        assert keys.tolist() == [first, first, second, second]
        assert first != second
        # this batch and the one before, which may be in the same step
        for key in {
            first,
            second,
            *previous,
        }:
            assert engine.plan(key).keys.num_local == 16
        assert len(planned) == index + 1
        previous = [first, second]
    assert index == 9
    with refusal(error=RuntimeError):
        engine.plan(0)


@pytest.mark.parametrize(
    ("waited", "planned", "told"),
    [(0.03, 0.5, False), (0.1, 0.5, True), (0.5, 0.1, False)],
    ids=["little", "much", "for something else"],
)
def test_waits_that_are_short_or_not_for_plans_are_not_told(
    waited, planned, told, caplog, monkeypatch
):
    """Batches of a second each, of the same kind from the second on."""
    clock = itertools.count(step=WATCHED)
    fake = SimpleNamespace(perf_counter=lambda: next(clock))
    monkeypatch.setattr("torchtitan_cad.integration.loading.loader.time", fake)
    pace = _Pace("wait")
    for _ in range(WATCHED):
        pace.add(1.0, 1.0)
    assert not caplog.records
    for _ in range(2 * WATCHED):
        pace.add(waited, planned)
    expected = [
        "training waits for plans 10 % of the time: planning a batch takes 500 ms, training on it 1000 ms; wait"
    ]
    assert [record.message for record in caplog.records] == expected * told


def test_explicit_document_ids_are_used_and_not_passed_on():
    ids = torch.arange(32).view(4, 8) // 4
    loader, _, planned = planning_loader(CountingLoader(1, extra={"document_ids": ids}))
    ((inputs, _),) = list(loader)
    assert inputs.keys() == {"input", PLAN_KEYS}
    assert planned[0].plans[0].layout.doc_lengths.tolist() == [4] * 8


class Documents(IterableDataset):
    """A worker is killed when it comes to the document ``killed_at``, and cannot read the document ``fails_at``."""

    UNREADABLE = "cannot be read"

    def __init__(self, killed_at: int = -1, fails_at: int = -1) -> None:
        self.killed_at, self.fails_at, self.next = killed_at, fails_at, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            if self.next == self.killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.next == self.fails_at:
                raise OSError(self.UNREADABLE)
            self.next += 1
            yield (
                {"input": torch.tensor([self.next])},
                torch.tensor([get_worker_info().id]),
            )

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.next = state_dict["next"]


@pytest.fixture
def worker_loader() -> Iterator[Callable[..., ParallelAwareDataloader]]:
    """Makes loaders, whose workers have ended with the test: torch may take 5 s for each after an error."""
    yield lambda **kwargs: ParallelAwareDataloader(
        Documents(**kwargs),
        0,
        1,
        num_workers=2,
        batch_size=2,
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
    loader, _, _ = planning_loader(worker_loader(), accumulation)
    iterator = iter(loader)
    first = [next(iterator) for _ in range(3)]
    state = loader.state_dict()
    second = [next(iterator) for _ in range(3)]
    loader.close()

    resumed, _, _ = planning_loader(worker_loader(), accumulation)
    resumed.load_state_dict(state)
    iterator = iter(resumed)
    again = [next(iterator) for _ in range(3)]
    resumed.close()
    assert [
        (inputs["input"].tolist(), labels.tolist()) for inputs, labels in first + again
    ] == [
        ([[2 * n + 1], [2 * n + 2]], [[worker], [worker]])
        for n in range(3)
        for worker in (0, 1)
    ]
    assert all(
        torch.equal(a["input"], b["input"])
        for (a, _), (b, _) in zip(second, again, strict=True)
    )


def test_error_of_a_worker_is_one_line_and_this_ranks_own(worker_loader, caplog):
    loader, _, _ = planning_loader(worker_loader(fails_at=5))
    with pytest.raises(OSError, match=Documents.UNREADABLE) as raised:
        list(loader)
    check_refusal(first_sentence(raised.value), Documents.UNREADABLE)
    assert not _may_be_caused_by_a_peer(raised.value)
    assert caplog.messages == ["this rank has failed while loading a batch"]


def test_killed_worker_is_noticed_while_the_planning_thread_waits(worker_loader):
    """The worker may have written half of a message, for the rest of which that thread waits."""
    iterators, release = [], threading.Event()

    def produce(_: Any) -> None:
        iterators.append(iter(worker_loader(killed_at=0)))
        release.wait(60)

    producer = _Producer(produce, 1)
    with refusal(error=RuntimeError) as raised:
        producer.get()
    release.set()
    assert producer.close(10)
    assert not _may_be_caused_by_a_peer(raised.value)


class BlockingLoader(CountingLoader):
    """Blocks before its batch number 1 until released."""

    def __init__(self) -> None:
        super().__init__(6)
        self.blocks, self.release = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            if int(batch[1][0, 0]) == 1:
                self.blocks.set()
                assert self.release.wait(30)
            yield batch


def test_a_thread_that_outlives_close_is_not_revived():
    """A new iteration is refused while the old thread runs; once it ended, it alone draws."""
    inner = BlockingLoader()
    loader, _, planned = planning_loader(inner)
    stale = iter(loader)
    next(stale)
    assert inner.blocks.wait(30)
    loader.close(timeout_s=0.05)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "close", partial(loader.close, 0.05))
        with refusal(error=RuntimeError):
            next(iter(loader))
        with refusal(error=RuntimeError):
            loader.load_state_dict({"next": 0})
    inner.release.set()
    # Batch 1 was drawn by the old thread, which had been told to stop.
    assert [int(labels[0, 0]) for _, labels in loader] == [2, 3, 4, 5]
    assert len(planned) == 5
    with refusal(error=RuntimeError):
        next(stale)


def test_topology_follows_torchtitans_rank_order():
    """[pp, dp, cp, tp], tp fastest: compare with numpy's own unravelling."""
    topology = Topology(pp=2, dp=3, cp=2, tp=2)
    grid = np.arange(24).reshape(2, 6, 2)
    for rank in range(24):
        stage, group_rank, tp_rank = (int(i[0]) for i in np.where(grid == rank))
        assert topology.group_rank(rank) == group_rank
        assert topology.group_ranks(rank) == grid[stage, :, tp_rank].tolist()


@pytest.mark.parametrize(
    ("degrees", "ranks_per_node", "expected"),
    [
        ({"pp": 1, "dp": 8, "cp": 2, "tp": 1}, 8, 8),
        ({"pp": 1, "dp": 8, "cp": 2, "tp": 2}, 8, 4),
        (
            {"pp": 2, "dp": 2, "cp": 1, "tp": 2},
            8,
            4,
        ),  # two stages in one node: the whole group
        ({"pp": 1, "dp": 6, "cp": 1, "tp": 1}, 4, None),
        ({"pp": 1, "dp": 4, "cp": 1, "tp": 4}, 2, None),
        ({"pp": 1, "dp": 4, "cp": 1, "tp": 1}, 0, None),
    ],
)
def test_nodes_of_a_group(degrees, ranks_per_node, expected):
    """They follow from the nodes of global ranks; None: the group's ranks do not fall into equal nodes."""
    topology = Topology(**degrees)
    if expected is None:
        with refusal("cad.ranks_per_node", ranks_per_node):
            topology.group_ranks_per_node(ranks_per_node)
        return
    assert topology.group_ranks_per_node(ranks_per_node) == expected
    world = topology.pp * topology.group_size * topology.tp
    for rank in range(world):
        nodes = np.array(topology.group_ranks(rank)) // ranks_per_node
        assert np.array_equal(
            nodes - nodes[0], np.arange(topology.group_size) // expected
        )
