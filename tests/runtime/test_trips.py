"""Results that return in several trips: the same bits as in one, within slots of the size of what servers receive."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.plans import random_layout, random_plan
from tests.runtime.rows import CPU, SHAPES, TRANSPORTS, Tensors, execute
from tests.runtime.threaded import needs_compiler, run_ranks, symmetric_transports
from tests.sets import params
from torchtitan_cad.planning import AttentionShape, Plan, TokenLayout, make_plan
from torchtitan_cad.planning.exchange import calls, messages
from torchtitan_cad.planning.exchange.messages import MostRows, RowBytes, Trips
from torchtitan_cad.runtime.call import Saved
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.kernels.select import get_kernel
from torchtitan_cad.runtime.tables import PlanTables

SHAPE = SHAPES["gqa 8:2"]
RANKS = 6
ONE_HOME = TokenLayout.from_segments([[(0, 0, 1536)], *([] for _ in range(RANKS - 1))])
"""All rows live on one rank, which gets back more than any server receives."""


def most_trips(plan: Plan) -> tuple[int, int]:
    queries, keys = plan.most_rows.trips(RowBytes.of(plan.shape, keep=False))
    return queries.count, keys.count


def bring_at_most(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Makes every trip bring a home at most so many rows."""

    def trips(most: MostRows, _: RowBytes) -> tuple[Trips, Trips]:
        queries = messages._trips(most.sent_queries, [rows, rows], 0)
        return queries, messages._trips(most.sent_keys, [rows, rows], queries.count % 2)

    monkeypatch.setattr(MostRows, "trips", trips)


def assert_equal(mine: list[list[Tensor]], theirs: list[list[Tensor]]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("keep", [False, True], ids=["resend", "keep"])
@TRANSPORTS
def test_trips_change_no_bit(monkeypatch: pytest.MonkeyPatch, symmetric: bool, keep: bool) -> None:
    """A row's partials are combined in the order in which they arrive, in however many trips."""
    torch.manual_seed(0)
    tensors, plan = Tensors.random(ONE_HOME, SHAPE), make_plan(ONE_HOME, SHAPE)
    assert most_trips(plan) == (1, 1)
    at_once = [execute(plan, tensors, keep=keep, two_rounds=two_rounds) for two_rounds in (False, True)]
    bring_at_most(monkeypatch, 400)
    assert most_trips(plan) == (5, 10)
    for two_rounds, results in enumerate(at_once):
        assert_equal(execute(plan, tensors, keep=keep, symmetric=symmetric, two_rounds=bool(two_rounds)), results)


@pytest.mark.parametrize("seed", params([0, 1, 2, 4, 5], [0]))
@needs_compiler
def test_trips_of_any_plan_change_no_bit(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    layout = random_layout(rng, num_ranks=int(rng.integers(2, 5)), max_length=300)
    plan = random_plan(rng, layout, SHAPE, aligned=False, split_kv=True)
    tensors = Tensors.random(layout, SHAPE)
    at_once = execute(plan, tensors)
    bring_at_most(monkeypatch, int(rng.integers(1, 100)))
    assert max(most_trips(plan)) > 2
    assert_equal(execute(plan, tensors, symmetric=True), at_once)


@pytest.mark.parametrize("trips", ["one", "several"])
@pytest.mark.parametrize("two_rounds", [False, True])
@needs_compiler
def test_combining_own_results_early_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, two_rounds: bool, trips: str
) -> None:
    """They wait for those that return in fp32, whatever the dtype."""
    rng = np.random.default_rng(3)
    torch.manual_seed(3)
    layout = random_layout(rng, num_ranks=4, max_length=300)
    plan = random_plan(rng, layout, SHAPE, aligned=False, split_kv=True)
    tensors = Tensors.random(layout, SHAPE, torch.bfloat16)
    monkeypatch.setattr(calls, "MOST_UNCOMBINED", 1000)
    late = execute(plan, tensors, symmetric=True, two_rounds=two_rounds)
    monkeypatch.setattr(calls, "MOST_UNCOMBINED", 0)
    if trips == "several":
        bring_at_most(monkeypatch, 40)
    assert_equal(execute(plan, tensors, symmetric=True, two_rounds=two_rounds), late)


@needs_compiler
def test_slots_do_not_grow_with_what_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MIN_TRIP_BYTES", 0)
    plan, row_bytes = make_plan(ONE_HOME, SHAPE), RowBytes.of(SHAPE, keep=False)
    received = row_bytes.received(*plan.rows_in.max(axis=1).tolist())
    assert plan.most_rows.sent_keys * row_bytes.key_gradients > 1.5 * max(received)
    transports = symmetric_transports(RANKS)
    monkeypatch.setattr("tests.runtime.rows.symmetric_transports", lambda _: transports)
    execute(plan, Tensors.random(ONE_HOME, SHAPE), symmetric=True)
    rounded = [-(-int(num_bytes * messages.HEADROOM) // 512) * 512 for num_bytes in received]
    assert {transport.slot_bytes for transport in transports} == {tuple(rounded)}


@needs_compiler
def test_two_nano_batches_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of ping-pong; the trips of one half pass while rows of the other have arrived and wait."""
    torch.manual_seed(1)
    layouts = ONE_HOME, TokenLayout.from_segments([*([] for _ in range(RANKS - 1)), [(0, 0, 1000)]])
    plans = [make_plan(layout, SHAPE) for layout in layouts]
    tensors = [Tensors.random(layout, SHAPE) for layout in layouts]
    expected = [execute(plan, x) for plan, x in zip(plans, tensors, strict=True)]
    bring_at_most(monkeypatch, 300)
    assert all(min(most_trips(plan)) > 2 for plan in plans)
    transports = symmetric_transports(RANKS)

    def body(rank: int) -> None:
        engine = CoreAttentionEngine(
            get_kernel("cpu", CPU), transports[rank], rank=rank, device=CPU, scale=SHAPE.head_dim**-0.5
        )
        for key, plan in enumerate(plans):
            engine.add_plan(key, plan)
        rows = [(x.q[rank], x.k[rank], x.v[rank]) for x in tensors]
        for layer in range(3):
            forwards = [engine.start_forward(*qkv, key) for key, qkv in enumerate(rows)]
            for call in forwards:
                engine.attend_forward(call)
            done = [engine.finish_forward(call) for call in forwards]
            back = {}
            for key in (1, 0):
                back[key] = engine.start_backward(tensors[key].dout[rank], Saved(*rows[key], *done[key]), key)
            for call in back.values():
                engine.attend_backward(call)
            # Finishing starts no exchange: each rank may do it in its own order.
            gradients = {key: engine.finish_backward(back[key]) for key in sorted(back, reverse=(rank + layer) % 2 > 0)}
            for key, want in enumerate(expected):
                assert_equal([[*done[key][:2], *gradients[key]]], [want[rank]])

    run_ranks(RANKS, body)


@pytest.mark.parametrize("seed", range(5))
def test_routes_of_every_trip_fit_together(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """What servers send in a trip are the rows that homes wait for, side by side from their buffers' beginning."""
    rng = np.random.default_rng(seed)
    bring_at_most(monkeypatch, int(rng.integers(1, 60)))
    num_ranks, shape = 4, AttentionShape(2, 1, 8, 4)
    layout = random_layout(rng, num_ranks, 100)
    plan = random_plan(rng, layout, shape, aligned=False, split_kv=True)
    trips = plan.most_rows.trips(RowBytes.of(shape, keep=False))
    ranks = [PlanTables.from_exchange(plan.exchange(r), True, CPU, 1.0, trips=trips) for r in range(num_ranks)]
    for name in ("q_home", "kv_home"):
        sent: list[list[int]] = [[] for _ in range(num_ranks)]
        for ways in zip(*(getattr(tables, name) for tables in ranks), strict=True):
            routes = [trip.route for trip in ways]
            assert len({route.most_rows for route in routes}) == 1
            for home, route in enumerate(routes):
                assert sum(route.recv_counts) <= route.most_rows
                assert route.recv_counts == [server.send_counts[home] for server in routes]
                places = [(server.put_offsets[home], server.send_counts[home]) for server in routes]
                end = 0
                for place, count in places:
                    assert count == 0 or place == end
                    end += count
            for server, route in enumerate(routes):
                rows = [*range(sum(route.send_counts))] if route.rows is None else route.rows.tolist()
                assert len(rows) == sum(route.send_counts)
                sent[server] += rows
        for server, tables in enumerate(ranks):
            received = (tables.q_out if name == "q_home" else tables.kv_out).num_received
            assert sorted(sent[server]) == [*range(received)]
