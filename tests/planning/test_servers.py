# SPDX-License-Identifier: BSD-3-Clause
"""Plans with joined servers: valid, all their tasks at one home, the same exchanges, and nobody later than before."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.layouts import shapes
from tests.planning.test_properties import problems
from torchtitan_cad.planning import (
    AttentionShape,
    CostModel,
    Plan,
    PlannerConfig,
    TokenLayout,
    make_plan,
    validate_plan,
)
from torchtitan_cad.planning.model.tasks import HOME
from torchtitan_cad.planning.servers import (
    MOST_SERVERS,
    JoinedServer,
    assign_to_servers,
    link_bytes,
)

SHAPE = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=64, dtype_bytes=2)
UNIT = 1e-3
"""seconds of attention per unit of cost"""
NEAR = 1e15
"""bytes per second of a link that takes no time"""

joined = st.lists(
    st.builds(
        JoinedServer,
        number=st.integers(0, 50),
        speed=st.sampled_from([0.01, 0.5, 1.0, 3.0]),
        bytes_per_second=st.sampled_from([1e6, 1e9, NEAR]),
    ),
    max_size=7,
    unique_by=lambda server: server.number,
)


@given(problem=problems(), shape=shapes, servers=joined)
def test_every_layout(
    problem: tuple[TokenLayout, PlannerConfig, CostModel | None],
    shape: AttentionShape,
    servers: list[JoinedServer],
) -> None:
    layout, config, cost = problem
    plan = make_plan(layout, shape, config, cost)
    given_away = assign_to_servers(plan, servers, UNIT)
    validate_plan(given_away)
    assert given_away.stats.loads.tolist() == plan.stats.loads.tolist()
    assert given_away.stats.total_bytes == plan.stats.total_bytes
    if given_away.stand_ins is None:
        assert given_away is plan
        return
    check_homes(given_away)
    check_ends(plan, given_away, servers)
    again = assign_to_servers(plan, servers, UNIT)
    assert again.fingerprint() == given_away.fingerprint() != plan.fingerprint()


def check_homes(plan: Plan) -> None:
    """Every token of a task that a server gets lies on the task's own rank."""
    assert plan.stand_ins is not None
    held = [set(plan.layout.rank_positions(r)) for r in range(plan.layout.num_ranks)]
    tasks = plan.tasks[plan.stand_ins.server != HOME]
    assert len(tasks) == plan.stand_ins.num_tasks > 0
    base = plan.layout.doc_offsets[plan.layout.doc_index(tasks["doc"])]
    for first, task in zip(base.tolist(), tasks, strict=True):
        rows = {*range(first + task["q_start"], first + task["q_end"])}
        rows |= {*range(first + task["kv_start"], first + task["kv_end"])}
        assert rows <= held[task["server"]]


def check_ends(plan: Plan, given_away: Plan, servers: list[JoinedServer]) -> None:
    """No rank and no server ends after the slowest rank without servers, and few stand in for one rank."""
    stand_ins = given_away.stand_ins
    assert stand_ins is not None
    speeds = np.array(plan.config.rank_speeds or [1.0] * plan.layout.num_ranks)
    slowest = (UNIT * plan.stats.loads / speeds).max()
    cost = given_away.cost.cost(given_away.tasks)
    num_bytes = link_bytes(plan.shape, given_away.tasks)
    for server in servers:
        is_given = stand_ins.server == server.number
        seconds = UNIT / server.speed * cost[is_given].sum()
        seconds += num_bytes[is_given].sum() / server.bytes_per_second
        assert seconds <= slowest
        assert seconds == pytest.approx(stand_ins.seconds.get(server.number, 0.0))
    for rank in range(plan.layout.num_ranks):
        of_rank = stand_ins.server[given_away.tasks["server"] == rank]
        assert len({*of_rank.tolist()} - {HOME}) <= MOST_SERVERS


def test_equal_servers_take_their_part() -> None:
    """Two ranks and two servers as fast: each has a quarter of the work, but for the last shards."""
    layout = TokenLayout.from_segments([[(0, 0, 16384)], [(1, 0, 16384)]])
    plan = make_plan(layout, SHAPE)
    servers = [JoinedServer(number, 1.0, NEAR) for number in (3, 5)]
    stand_ins = assign_to_servers(plan, servers, UNIT).stand_ins
    assert stand_ins is not None
    assert stand_ins.share == pytest.approx(0.5, abs=0.01)
    assert [*stand_ins.seconds] == [3, 5]


@pytest.mark.parametrize("rate", [1e3, 1e4])
def test_a_slow_link_is_left_alone(rate: float) -> None:
    layout = TokenLayout.from_segments([[(0, 0, 4096)]])
    plan = make_plan(layout, SHAPE)
    servers = [JoinedServer(0, 100.0, rate)]
    assert assign_to_servers(plan, servers, 1e-6) is plan
