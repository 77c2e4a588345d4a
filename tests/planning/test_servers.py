# SPDX-License-Identifier: BSD-3-Clause
"""Plans with joined servers: valid, all their tasks at one home, the same exchanges, and nobody later than before."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.layouts import shapes
from tests.lib.refusals import refusal
from tests.lib.tables import check_plan
from tests.planning.test_properties import problems
from torchtitan_cad.planning import (
    AttentionShape,
    PlannerConfig,
    TokenLayout,
    make_plan,
)
from torchtitan_cad.planning.model.tasks import HOME
from torchtitan_cad.planning.servers import (
    DIRECTIONS,
    MOST_SERVERS,
    JoinedServer,
    assign_to_servers,
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


@settings(max_examples=settings.default.max_examples // 2)
@given(problem=problems(), shape=shapes, servers=joined)
def test_every_layout(problem, shape, servers):
    layout, config = problem
    plan = make_plan(layout, shape, config)
    shared = assign_to_servers(plan, servers, UNIT)
    check_plan(shared)
    assert shared.stats.loads.tolist() == plan.stats.loads.tolist()
    assert shared.stats.total_bytes == plan.stats.total_bytes
    if shared.stand_ins is None:
        assert shared is plan
        return
    assert (shared.stand_ins.server != HOME).any()
    check_ends(plan, shared, servers)
    again = assign_to_servers(plan, servers, UNIT)
    assert again.fingerprint() == shared.fingerprint() != plan.fingerprint()


def check_ends(plan, shared, servers):
    """No rank and no server ends after the slowest rank without servers, and few stand in for one rank."""
    stand_ins = shared.stand_ins
    slowest = (UNIT * plan.stats.loads).max()
    cost = shared.cost.cost(shared.tasks)
    tasks = shared.tasks
    num_bytes = plan.shape.query_bytes * (tasks["q_end"] - tasks["q_start"])
    num_bytes += plan.shape.kv_bytes * (tasks["kv_end"] - tasks["kv_start"])
    for server in servers:
        is_its = stand_ins.server == server.number
        seconds = UNIT / server.speed * cost[is_its].sum()
        seconds += DIRECTIONS * num_bytes[is_its].sum() / server.bytes_per_second
        predicted = stand_ins.seconds.get(server.number, 0.0)
        assert seconds * (1 - 1e-9) <= predicted <= slowest
    for rank in range(plan.layout.num_ranks):
        of_rank = stand_ins.server[shared.tasks["server"] == rank]
        assert len({*of_rank.tolist()} - {HOME}) <= MOST_SERVERS


def test_equal_servers_take_their_part():
    """Two ranks and two servers as fast: each has a quarter of the work, but for the last shards."""
    layout = TokenLayout.from_segments([[(0, 0, 16384)], [(1, 0, 16384)]])
    servers = [JoinedServer(number, 1.0, NEAR) for number in (3, 5)]
    served = assign_to_servers(make_plan(layout, SHAPE), servers, UNIT)
    assert served.stand_ins.share == pytest.approx(0.5, abs=0.01)
    assert [*served.stand_ins.seconds] == [3, 5]
    with refusal("stand_ins"):
        served.to_json()


def test_thousands_of_short_tasks_are_given_away_in_time():
    """Padding of end-of-document tokens, of which a server can take nearly all."""
    padding = [(1 + number, 0, 1) for number in range(8192)]
    layout = TokenLayout.from_segments([padding, [(0, 0, 1000)]])
    plan = make_plan(layout, SHAPE, PlannerConfig(planner="home"))
    servers = [JoinedServer(0, 1.0, NEAR), JoinedServer(1, 0.5, NEAR)]
    begin = time.process_time()
    shared = assign_to_servers(plan, servers, UNIT)
    # 0.1 s; 5 s where tasks are given away one by one
    assert time.process_time() - begin < 1
    assert np.count_nonzero(shared.stand_ins.server != HOME) > 4000
    check_ends(plan, shared, servers)


def test_a_slow_link_is_left_alone():
    layout = TokenLayout.from_segments([[(0, 0, 4096)]])
    plan = make_plan(layout, SHAPE)
    for bytes_per_second in (1e3, 1e4):
        server = JoinedServer(0, 100.0, bytes_per_second)
        assert assign_to_servers(plan, [server], 1e-6) is plan
