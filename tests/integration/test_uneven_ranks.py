# SPDX-License-Identifier: BSD-3-Clause
"""Ranks that load unequal rows, or unequal numbers of validation batches; batch keys of the loader's own."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from tests.lib.jobs.harness import parse_job
from tests.lib.jobs.loaders import (
    RANKS,
    CountingLoader,
    OneRank,
    ParallelAwareDataloader,
    ShorterFrom,
    connect,
    drain_at_once,
    on_all,
)
from tests.lib.refusals import refusal
from torchtitan_cad.integration.loading.loader import PLAN_KEYS
from torchtitan_cad.integration.torchtitan_v0_2 import plugin
from torchtitan_cad.integration.torchtitan_v0_2.validation import ValidationLoader
from torchtitan_cad.planning.model.batch import BatchShape


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
    config: Any = SimpleNamespace(
        validation=SimpleNamespace(steps=steps, local_batch_size=4, dataset="small"),
        parallelism=SimpleNamespace(
            pipeline_parallel_degree=pp, tensor_parallel_degree=tp
        ),
        cad=SimpleNamespace(nano_batches=2),
    )
    loaders = []
    for number, loader in enumerate(
        connect([OneRank(CountingLoader(0)) for _ in lengths])
    ):
        planner = loader.planner()

        def plan_now(batch: dict[str, torch.Tensor], planner=planner) -> torch.Tensor:
            rows, seq_len = batch["input"].shape
            starts = np.arange(0, rows * seq_len, seq_len)
            (planned,), _ = planner.plan(starts, BatchShape(rows, seq_len, rows))
            return planned.keys

        session: Any = SimpleNamespace(
            validation=planner,
            plan_now=plan_now,
            ranks=RANKS[: len(lengths)],
            group_rank=number,
        )
        length = lengths[number]
        inner: Any = ShorterFrom(length - 1, length, last_rows)
        inner.dataset = inner
        loaders.append(ValidationLoader(inner, config, session))
    return loaders


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


class EightRows(IterableDataset):
    """Eight rows, whose tokens are their numbers."""

    next = 0

    def __iter__(self) -> Iterator[Any]:
        while self.next < 8:
            tokens = torch.full((8,), self.next)
            self.next += 1
            yield {"input": tokens}, tokens

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.next = state_dict["next"]


def test_validation_of_a_whole_set_begins_anew_in_workers_that_persist():
    options = {"num_workers": 1, "batch_size": 4, "persistent_workers": True}
    inner = ParallelAwareDataloader(EightRows(), 0, 1, **options)
    (loader,) = validation(-1, [2])
    loader = replace(loader, inner=inner)
    for _ in range(2):
        assert batches_of(loader) == [(0, 4), (4, 4)]


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
    model = SimpleNamespace(get_attention_masks=lambda **_: "masks")
    dims = SimpleNamespace(cp_enabled=False)
    validator: Any = SimpleNamespace(tokenizer=None, parallel_dims=dims)
    try:
        plugin.on_config(parse_job(tmp_path, *switches))
        _, _, others, _ = Validator.post_dataloading_process(
            validator, batch, tokens, [model]
        )
        assert list(others) == ["pixels"]
    finally:
        plugin.restore()
