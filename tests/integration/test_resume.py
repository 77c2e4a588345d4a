# SPDX-License-Identifier: BSD-3-Clause
"""Ranks that start again, and nodes that do not meet: a line that says what to do."""

import os
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from torchtitan_cad import launch


@pytest.fixture
def torchrun(monkeypatch) -> Mock:
    """Stand for torchrun, without the launcher's thread, which ends this process if one that it has started ends."""
    monkeypatch.setattr(launch, "_end_if_stuck", Mock())
    monkeypatch.setattr(launch.run, "run", Mock())
    return launch.run.run


def test_ranks_that_start_again_have_a_store_of_their_own(torchrun, monkeypatch):
    variable = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    monkeypatch.setenv(variable, "")  # so that it is removed afterwards
    monkeypatch.delenv(variable)
    assert launch.main(["--standalone", "train.py"]) == 0
    assert variable not in os.environ
    assert launch.main(["--max-restarts=2", "--standalone", "train.py"]) == 0
    assert os.environ[variable] == "1"


def test_torchrun_may_wait_for_ranks_to_end():
    assert launch.stuck_seconds(SimpleNamespace(shutdown_timeout=180)) > 180
    assert 30 < launch.stuck_seconds(SimpleNamespace()) < 60


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (RendezvousConnectionError, "its host or the link to it is gone"),
        (RendezvousTimeoutError, "--rdzv-conf join_timeout"),
        (RendezvousClosedError, "on all of --nnodes="),
    ],
)
def test_nodes_that_do_not_meet_are_one_line(error, remedy, torchrun, capsys):
    torchrun.side_effect = error
    meeting = ["--rdzv-backend=static", "--master-addr=node0", "--master-port=29501"]
    assert launch.main([*meeting, "train.py"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("launch: the rendezvous at node0:29501 ")
    assert remedy in line
