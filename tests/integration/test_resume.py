# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of another job, or of an earlier part of this one, that cannot go on: a line that says how they can."""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed.checkpoint as dcp
from torch import Tensor, zeros
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.utils.data import IterableDataset

from tests.lib.jobs.harness import parse_job
from tests.lib.jobs.loaders import ParallelAwareDataloader
from tests.lib.refusals import refusal
from torchtitan_cad import launch
from torchtitan_cad.integration.torchtitan_v0_2.resume import check_workers_when_loaded

MODEL = {"norm.weight": zeros(2)}
FULL = {
    **MODEL,
    "optimizer": {"lr": 1.0},
    "train_state": {"step": 2},
    "dataloader": {"dp_rank_0": b"", "dp_rank_1": b"", "world_size": 2},
}


def save(folder: Path, state: dict, step: int) -> None:
    dcp.save(state, checkpoint_id=folder / "checkpoint" / f"step-{step}", no_dist=True)


WITHOUT = "--checkpoint.exclude_from_loading"
ALL_BUT_MODEL = "optimizer,lr_scheduler,dataloader,train_state"


@pytest.mark.parametrize(
    ("saved", "ranks", "options", "remedy"),
    [
        ([FULL, MODEL], 2, [], "checkpoint.load_step"),
        ([MODEL], 2, [], "checkpoint.initial_load_path"),
        ([FULL], 3, [], "start as many as then"),
        ([FULL], 1, [], "checkpoint.exclude_from_loading"),
        ([FULL, MODEL], 2, ["--checkpoint.load_step=1"], None),
        ([FULL], 3, [WITHOUT, "dataloader"], None),
        ([MODEL], 2, [WITHOUT, ALL_BUT_MODEL], None),
    ],
)
def test_what_a_checkpoint_lacks_is_said_before_training(
    saved, ranks, options, remedy, tmp_path, monkeypatch
):
    for step, state in enumerate(saved, start=1):
        save(tmp_path, state, step)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    expected = nullcontext() if remedy is None else refusal()
    with expected as raised:
        parse_job(tmp_path, "--checkpoint.enable", *options)
    if remedy is not None:
        assert "\n" not in str(raised.value)
        assert remedy in str(raised.value)


def test_initial_checkpoint_with_the_model_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    save(tmp_path, MODEL, 5)
    first = f"--checkpoint.initial_load_path={tmp_path / 'checkpoint' / 'step-5'}"
    options = ["--checkpoint.enable", "--checkpoint.folder=other", first]
    parse_job(tmp_path, *options)
    with refusal(remedy="checkpoint.initial_load_model_only"):
        parse_job(tmp_path, *options, "--checkpoint.no-initial-load-model-only")


def test_checkpoint_that_cannot_be_read(tmp_path):
    step = tmp_path / "checkpoint" / "step-3"
    step.mkdir(parents=True)
    (step / ".metadata").touch()
    with refusal():
        parse_job(tmp_path, "--checkpoint.enable")


@pytest.mark.parametrize(("saved", "loaded"), [(0, 1), (1, 0), (1, 1)])
def test_state_of_another_number_of_workers(saved, loaded):
    first, resumed = (
        ParallelAwareDataloader(Rows(), 0, 1, num_workers=count)
        for count in (saved, loaded)
    )
    next(iter(first))
    check_workers_when_loaded(resumed)
    refused = refusal("num_workers", loaded, remedy=str(saved))
    with nullcontext() if saved == loaded else refused:
        resumed.load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("restarts", "rendezvous", "value"),
    [
        ("0", "--rdzv-backend=static", None),
        ("2", "--rdzv-backend=static", "1"),
        ("2", "--standalone", "1"),
    ],
)
def test_ranks_that_start_again_have_a_store_of_their_own(
    restarts, rendezvous, value, monkeypatch, capsys
):
    """A static rendezvous has one store for all starts, which is said."""
    variable = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    found = list[str | None]()
    monkeypatch.setenv(variable, "")  # so that it is removed afterwards
    monkeypatch.delenv(variable)
    look = lambda options: found.append(os.environ.get(variable))  # noqa: E731
    monkeypatch.setattr(launch.run, "run", look)
    arguments = [f"--max-restarts={restarts}", rendezvous, "train.py"]
    assert launch.main(arguments) == 0
    assert found == [value]
    is_warned = restarts == "2" and "static" in rendezvous
    assert ("set --standalone" in capsys.readouterr().err) == is_warned


def test_torchrun_may_wait_for_ranks_to_end(monkeypatch):
    variable = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    monkeypatch.delenv(variable, raising=False)
    asked = SimpleNamespace(shutdown_timeout=180)
    assert launch.stuck_seconds(asked) > 180
    assert 30 < launch.stuck_seconds(SimpleNamespace()) < 60
    monkeypatch.setenv(variable, "90")
    assert launch.stuck_seconds(SimpleNamespace(shutdown_timeout=None)) > 90


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (RendezvousConnectionError, "its host or the link to it is gone"),
        (RendezvousTimeoutError, "--rdzv-conf join_timeout"),
        (RendezvousClosedError, "start all of them again"),
        (RendezvousStateError, "start all nodes again"),
    ],
)
def test_nodes_that_do_not_meet_are_one_line(error, remedy, monkeypatch, capsys):
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(launch.run, "run", fail)
    meeting = ["--rdzv-backend=static", "--master-addr=node0", "--master-port=29501"]
    assert launch.main([*meeting, "train.py"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("launch: the rendezvous at node0:29501 ")
    assert remedy in line


class Rows(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        yield from zeros(8, 1)
