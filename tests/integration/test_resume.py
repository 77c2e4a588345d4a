# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of another job, or of an earlier part of this one, that cannot go on: a line that says how they can."""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch.distributed.checkpoint as dcp
from torch import Tensor, zeros
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
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
        ([FULL], 3, [], "as many as then"),
        ([FULL], 1, [], "checkpoint.exclude_from_loading"),
        ([FULL, MODEL], 2, ["--checkpoint.load_step=1"], None),
        ([MODEL], 2, [WITHOUT, ALL_BUT_MODEL], None),
    ],
)
def test_what_a_checkpoint_lacks_is_said_before_training(
    saved, ranks, options, remedy, tmp_path, monkeypatch
):
    for step, state in enumerate(saved, start=1):
        save(tmp_path, state, step)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    expected = nullcontext() if remedy is None else refusal(remedy=remedy)
    with expected:
        parse_job(tmp_path, "--checkpoint.enable", *options)


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


@pytest.mark.parametrize(("saved", "loaded"), [(0, 1), (1, 0)])
def test_state_of_another_number_of_workers(saved, loaded):
    first, resumed = (
        ParallelAwareDataloader(Rows(), 0, 1, num_workers=count)
        for count in (saved, loaded)
    )
    next(iter(first))
    check_workers_when_loaded(resumed)
    with refusal("num_workers", loaded, remedy=str(saved)):
        resumed.load_state_dict(first.state_dict())


@pytest.fixture
def torchrun(monkeypatch) -> Mock:
    """Stand for torchrun, without the launcher's thread, which ends this process if one that it has started ends."""
    monkeypatch.setattr(launch, "_end_if_stuck", Mock())
    monkeypatch.setattr(launch.run, "run", Mock())
    return launch.run.run


@pytest.mark.parametrize(
    ("rendezvous", "is_warned"),
    [("--rdzv-backend=static", True), ("--standalone", False)],
)
def test_ranks_that_start_again_have_a_store_of_their_own(
    rendezvous, is_warned, torchrun, monkeypatch, capsys
):
    """A static rendezvous has one store for all starts, which is said."""
    variable = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    monkeypatch.setenv(variable, "")  # so that it is removed afterwards
    monkeypatch.delenv(variable)
    assert launch.main([rendezvous, "train.py"]) == 0
    assert variable not in os.environ
    assert launch.main(["--max-restarts=2", rendezvous, "train.py"]) == 0
    assert os.environ[variable] == "1"
    assert ("set --standalone" in capsys.readouterr().err) == is_warned


def test_torchrun_may_wait_for_ranks_to_end():
    assert launch.stuck_seconds(SimpleNamespace(shutdown_timeout=180)) > 180
    assert 30 < launch.stuck_seconds(SimpleNamespace()) < 60


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (RendezvousConnectionError, "its host or the link to it is gone"),
        (RendezvousTimeoutError, "--rdzv-conf join_timeout"),
        (RendezvousClosedError, "start all of them again"),
    ],
)
def test_nodes_that_do_not_meet_are_one_line(error, remedy, torchrun, capsys):
    torchrun.side_effect = error
    meeting = ["--rdzv-backend=static", "--master-addr=node0", "--master-port=29501"]
    assert launch.main([*meeting, "train.py"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("launch: the rendezvous at node0:29501 ")
    assert remedy in line


class Rows(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        yield from zeros(8, 1)
