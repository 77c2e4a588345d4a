# SPDX-License-Identifier: BSD-3-Clause
"""Ranks that load unequal rows, or unequal numbers of validation batches; batch keys of the loader's own."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.integration.test_loader_ranks import (
    RANKS,
    OneRank,
    ShorterFrom,
    connect,
    drain_at_once,
    on_all,
)
from tests.lib.jobs.harness import parse_job
from tests.lib.jobs.loaders import CountingLoader
from tests.lib.refusals import refusal
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu

enable_cpu()

# torchtitan must not be imported before enable_cpu().
from torchtitan.components.validate import Validator  # noqa: E402

from torchtitan_cad.integration.loading.loader import PLAN_KEYS  # noqa: E402
from torchtitan_cad.integration.torchtitan_v0_2 import inputs as titan_inputs  # noqa: E402
from torchtitan_cad.integration.torchtitan_v0_2 import plugin  # noqa: E402
from torchtitan_cad.integration.torchtitan_v0_2.validation import ValidationLoader  # noqa: E402
from torchtitan_cad.planning.model.batch import BatchShape, nano_layouts, step_layouts  # noqa: E402


@given(st.data())
def test_layouts_of_unequal_shapes_hold_what_every_rank_has_alone(data):
    cp, microbatches, nano_batches = (data.draw(st.integers(1, 2)) for _ in range(3))
    shapes, starts = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        rows, seq_len = (
            data.draw(st.integers(1, 3)),
            2 * cp * data.draw(st.integers(1, 3)),
        )
        shapes.append(BatchShape(rows * microbatches, seq_len, rows))
        size = rows * microbatches * seq_len
        drawn = data.draw(st.lists(st.integers(0, size - 1)))
        starts.append(np.union1d(np.arange(0, size, seq_len), drawn).astype(np.int64))
    joined = step_layouts(starts, shapes, cp, nano_batches)
    assert len(joined) == microbatches
    for number, nanos in enumerate(joined):
        next_doc = 0
        for place, (own, shape) in enumerate(zip(starts, shapes, strict=True)):
            for layout, alone in zip(
                nanos, nano_layouts([own], shape, number, cp, nano_batches), strict=True
            ):
                mine = layout.seg_rank // cp == place
                assert (
                    layout.seg_rank[mine] - place * cp
                ).tolist() == alone.seg_rank.tolist()
                assert (
                    layout.seg_doc[mine] - next_doc
                ).tolist() == alone.seg_doc.tolist()
                for name in ("seg_start", "seg_length", "seg_attends"):
                    assert (
                        getattr(layout, name)[mine].tolist()
                        == getattr(alone, name).tolist()
                    )
            next_doc += len(own)


def test_ranks_with_fewer_rows_are_planned_with_the_others():
    ranks = [
        OneRank(CountingLoader(3)),
        OneRank(ShorterFrom(1)),
        OneRank(CountingLoader(3)),
    ]
    loaders, seen = connect(ranks), list[list[int]]()
    for loader in loaders:
        loader.rows_per_microbatch = None
    loaders[0].on_batch = lambda planned: seen.append(
        planned.plans[0].layout.tokens_per_rank.tolist()
    )
    assert drain_at_once(loaders) == ([[0, 1, 2]] * 3, [None] * 3)
    assert seen == [[32, 32, 32], [32, 16, 32], [32, 16, 32]]


def validation(
    steps: int, lengths: list[int], **changes: Any
) -> list[ValidationLoader]:
    """The validation loaders of all ranks, over gloo, with batches of four rows but for ``rest`` in the last."""

    class Rows(CountingLoader):
        @property
        def dataset(self) -> Any:
            return self

        def __iter__(self) -> Iterator[Any]:
            for inputs, labels in super().__iter__():
                rows = rest if self.next == self.num_batches else 4
                yield {"input": inputs["input"][:rows]}, labels[:rows]

    parallelism, rest = (
        {"pipeline_parallel_degree": 1, "tensor_parallel_degree": 1},
        changes.pop("rest", 4),
    )
    config: Any = SimpleNamespace(
        validation=SimpleNamespace(steps=steps, local_batch_size=4, dataset="small"),
        parallelism=SimpleNamespace(**(parallelism | changes)),
        cad=SimpleNamespace(nano_batches=2),
    )

    def build(number: int) -> ValidationLoader:
        planner = planners[number].planner()

        def plan_now(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            rows, seq_len = batch["input"].shape
            (planned,), _ = planner.plan(
                np.arange(0, rows * seq_len, seq_len), BatchShape(rows, seq_len, rows)
            )
            return planned.keys

        session: Any = SimpleNamespace(
            validation=planner,
            plan_now=plan_now,
            ranks=RANKS[: len(lengths)],
            group_rank=number,
        )
        return ValidationLoader(Rows(lengths[number]), config, session)

    planners = connect([OneRank(CountingLoader(0)) for _ in lengths])
    return [build(number) for number in range(len(lengths))]


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
    (said,) = caplog.messages
    assert (
        "validation.steps = -1 ends after 2 batches, with the data of rank 4: other ranks have more"
        in said
    )


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, [4, 3]),
        ({"tensor_parallel_degree": 2}, [4]),
        ({"pipeline_parallel_degree": 2}, [4]),
    ],
    ids=str,
)
def test_rows_that_are_left_over_are_served_where_that_is_possible(
    changes, rows, caplog
):
    loaders = validation(-1, [2, 2], rest=3, **changes)
    assert on_all(loaders, batches_of) == [[*enumerate(rows)]] * 2
    assert caplog.text.count("validation leaves out the last 3 rows of this rank") == (
        2 if len(rows) == 1 else 0
    )


def test_a_number_of_validation_batches_is_that_of_torchtitan():
    loaders = validation(1, [3, 3])
    iterators = on_all(loaders, iter)
    assert all(PLAN_KEYS in batch for batch, _ in on_all(iterators, next))
    # torchtitan draws one more, for which peers need not be asked
    batch, labels = next(iterators[0])
    assert PLAN_KEYS not in batch
    assert int(labels[0, 0]) == 1


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
def test_document_ids_are_left_out_without_cad(switches, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("LOCAL_RANK", "0")
    titan_inputs._warn_of_other_masks.cache_clear()
    config = parse_job(tmp_path, *switches)
    tokens = torch.zeros(1, 4)
    model = SimpleNamespace(get_attention_masks=lambda **_: "masks")
    validator: Any = SimpleNamespace(
        tokenizer=None, parallel_dims=SimpleNamespace(cp_enabled=False)
    )
    try:
        plugin.on_config(config)
        for _ in range(2):
            batch = {"input": tokens, "document_ids": tokens, "pixels": tokens}
            _, _, extra, _ = Validator.post_dataloading_process(
                validator, batch, tokens, [model]
            )
            assert list(extra) == ["pixels"]
    finally:
        plugin.restore()
    assert (
        caplog.text.count("without CAD the batch key 'document_ids' is left out") == 1
    )
    batch = {"input": tokens, "document_ids": tokens}
    assert (
        "document_ids"
        in Validator.post_dataloading_process(validator, batch, tokens, [model])[2]
    )
