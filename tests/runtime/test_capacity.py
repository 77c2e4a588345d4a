"""What the planner accepts with capacities, buffers of that fixed size hold: prepared, sent, received and returned."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from bench.workloads import document_lengths, spanning_layout
from tests.plans import random_layout
from tests.runtime.exchanges import start
from tests.runtime.rows import CPU
from tests.runtime.threaded import ThreadAllocations, needs_compiler, run_ranks
from torchtitan_cad.planning import AttentionShape, CapacityError, Plan, PlannerConfig, make_plan
from torchtitan_cad.planning.exchange import messages
from torchtitan_cad.planning.exchange.messages import RowBytes
from torchtitan_cad.runtime.tables import PlanTables
from torchtitan_cad.runtime.transport import Capacity, Route, SymmetricTransport

SHAPE = AttentionShape(num_heads=4, num_kv_heads=1, head_dim=4, dtype_bytes=4)
"""Of rows small enough to send many; the proportions are those of Llama 3 8B."""


@pytest.fixture(autouse=True)
def no_room_for_ordinary_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which buffers otherwise have, however little servers receive."""
    monkeypatch.setattr(messages, "MIN_TRIP_BYTES", 0)


def exchange_all(plan: Plan) -> tuple[int, int]:
    """Every exchange of a layer's forward and backward through buffers that just hold what the plan's config allows.

    Returns the numbers of trips in which results for queries and for keys return.
    """
    num_ranks, row_bytes = plan.layout.num_ranks, RowBytes.of(SHAPE, keep=False)
    queries, keys = plan.config.max_recv_queries, plan.config.max_recv_keys
    assert isinstance(queries, int)
    assert isinstance(keys, int)
    capacity = Capacity(queries, keys, row_bytes.received(queries, keys))
    allocations, trips = ThreadAllocations(num_ranks), plan.most_rows.trips(row_bytes)

    def body(rank: int) -> None:
        transport = SymmetricTransport(
            range(num_ranks), rank, partial(allocations.allocate, rank), lambda: 60.0, capacity, fixed=True
        )
        tables = PlanTables.from_exchange(plan.exchange(rank), True, CPU, 1.0, trips=trips)
        transport.prepare(tables.exchanges)
        outputs, gradients = ([trip.route for trip in way] for way in (tables.q_home, tables.kv_home))
        for exchanges in (
            [("q", [tables.q_out]), ("kk", [tables.kv_out]), ("ql", outputs)],
            [("qqll", [tables.q_out]), ("kk", [tables.kv_out]), ("q", outputs), ("kk", gradients)],
        ):
            call = transport.begin(0)
            for kinds, routes in exchanges:
                for route in routes:
                    pending = start(transport, parts_of(kinds, route), route, "exchange", call)
                    assert len(pending.take()[0]) == sum(route.recv_counts)

    run_ranks(num_ranks, body)
    return trips[0].count, trips[1].count


def parts_of(kinds: str, route: Route) -> list[torch.Tensor]:
    """Parts with the rows that the route names: queries, keys, or log-sum-exps."""
    rows = sum(route.send_counts) if route.rows is None else int(route.rows.max()) + 1 if len(route.rows) else 0
    return [torch.zeros(rows, *{"q": (4, 4), "k": (1, 4), "l": (4,)}[kind]) for kind in kinds]


@needs_compiler
def test_a_home_may_get_back_more_than_servers_may_receive() -> None:
    """A document of 256K tokens over 16 ranks; servers' rows are the capacities exactly."""
    layout = spanning_layout(document_lengths("one big", 16, seed=11), 16)
    free = make_plan(layout, SHAPE)
    queries, keys = free.rows_in.max(axis=1).tolist()
    plan = make_plan(layout, SHAPE, PlannerConfig(max_recv_queries=queries, max_recv_keys=keys))
    assert plan.most_rows.sent_queries > 1.5 * queries
    assert plan.most_rows.sent_keys > 1.5 * keys
    assert max(exchange_all(plan)) > 1


@needs_compiler
@settings(max_examples=15)
@example(seed=3, num_ranks=4, share_of_queries=1.0, share_of_keys=1.0)
@given(
    seed=st.integers(0, 10**6),
    num_ranks=st.integers(2, 5),
    share_of_queries=st.floats(0.9, 1.3),
    share_of_keys=st.floats(0.9, 1.3),
)
def test_buffers_hold_whatever_the_planner_accepts(
    seed: int, num_ranks: int, share_of_queries: float, share_of_keys: float
) -> None:
    """Capacities are shares of what the busiest ranks receive without."""
    layout, config = random_layout(np.random.default_rng(seed), num_ranks, 3000), PlannerConfig(min_shard=32)
    queries, keys = make_plan(layout, SHAPE, config).rows_in.max(axis=1).tolist()
    limits = {"max_recv_queries": int(share_of_queries * queries), "max_recv_keys": int(share_of_keys * keys)}
    try:
        plan = make_plan(layout, SHAPE, PlannerConfig(min_shard=32, **limits))
    except CapacityError:
        assume(False)
    exchange_all(plan)
