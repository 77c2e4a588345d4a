# SPDX-License-Identifier: BSD-3-Clause
"""How a session of training starts."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.lib.refusals import refusal
from torchtitan_cad.integration import machine, session
from torchtitan_cad.integration.engines import build_engines
from torchtitan_cad.integration.topology import Topology
from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.planning.model.kind import AttentionKind


def test_the_planner_is_compiled_before_ranks_watch_each_other(monkeypatch):
    """A rank that compiles for minutes on a busy machine must not look stalled to its neighbours."""
    calls = Mock()
    calls.begin.side_effect = RuntimeError("far enough")
    monkeypatch.setattr(session, "warm_up", calls.compile_planner)
    monkeypatch.setattr(session, "CadSession", calls.begin)
    with refusal(error=RuntimeError):
        session.open_session(None)
    assert [name for name, *_ in calls.mock_calls] == ["compile_planner", "begin"]


def test_exchanges_have_a_communicator_of_their_own():
    """The group may be the world, which FSDP's is then as well."""
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    try:
        topology = Topology(pp=1, dp=4, cp=1, tp=1, across_stages=False)
        group = session.cad_group(topology, 60)
        assert dist.get_process_group_ranks(group) == [0, 1, 2, 3]
        assert group is not dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("0011", 2),
        ("000011112222", 4),
        ("0000", None),
        ("0123", None),
        ("001", None),
        ("0101", None),
        ("0", None),
    ],
)
def test_nodes_are_hosts_with_as_many_neighbouring_ranks(hosts, expected):
    assert machine.ranks_per_host(list(map(int, hosts))) == expected


def test_kinds_cannot_attend_in_ticks():
    full = AttentionKind("full", 1, AttentionShape(2, 1, 8, 4))
    with refusal("parallelism.pipeline_parallel_schedule"):
        build_engines([full, replace(full, name="chunked", block=8)], object())
