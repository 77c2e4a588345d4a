# SPDX-License-Identifier: BSD-3-Clause
"""How a session of training starts."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.lib.refusals import refusal
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu

enable_cpu()

from torchtitan_cad.integration import machine, session  # noqa: E402
from torchtitan_cad.integration.job import Job  # noqa: E402
from torchtitan_cad.integration.topology import Topology  # noqa: E402
from torchtitan_cad.planning import AttentionShape  # noqa: E402
from torchtitan_cad.planning.model.kind import AttentionKind  # noqa: E402


def test_the_planner_is_compiled_before_ranks_watch_each_other(monkeypatch):
    """A rank that compiles for minutes on a busy machine must not look stalled to its neighbours."""
    order: list[str] = []

    def begin_session(*_: object) -> None:
        order.append("session, with its monitor")
        raise RuntimeError("far enough")

    monkeypatch.setattr(
        session,
        "warm_up",
        lambda report: order.append(f"planner, reported to {report.__self__.name}"),
    )
    monkeypatch.setattr(session, "CadSession", begin_session)
    with refusal(error=RuntimeError):
        session.open_session(None)
    assert order == [
        f"planner, reported to {session.logger.name}",
        "session, with its monitor",
    ]


def test_exchanges_have_a_communicator_of_their_own():
    """The group may be the world, which FSDP's is then as well."""
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    try:
        world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
        fsdp = world._unflatten(
            0,
            (1, 4),
            ("dp_replicate", "fsdp"),
            backend_override={"dp_replicate": "fake"},
        )["fsdp"]
        assert fsdp.get_group() is dist.group.WORLD  # why it matters
        group = session.cad_mesh(
            world, Topology(pp=1, dp=4, cp=1, tp=1, across_stages=False)
        ).get_group()
        assert dist.get_process_group_ranks(group) == [0, 1, 2, 3]
        assert group is not dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ((0, 0, 1, 1), 2),
        ((0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2), 4),
        ((0, 0, 0, 0), None),
        ((0, 1, 2, 3), None),
        ((0, 0, 1), None),
        ((0, 1, 0, 1), None),
        ((0,), None),
    ],
)
def test_nodes_are_hosts_with_as_many_neighbouring_ranks(hosts, expected):
    assert machine.ranks_per_host(hosts) == expected


@pytest.mark.parametrize(
    "names", [[], ["chunked"], ["chunked", "full"], ["full", "full"]]
)
def test_a_job_has_each_kind_once_and_whole_documents_first(names):
    shape = AttentionShape(2, 1, 8, 4)
    kinds = [
        AttentionKind(name, 1, shape, 8 if name == "chunked" else None)
        for name in names
    ]
    with refusal():
        Job(
            **{name: None for name in Job.__dataclass_fields__}
            | {"kinds": tuple(kinds)}
        )
