"""Rows that travel in several trips, out and home: the same bits as in one, within receive buffers of any size."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from tests.plans import random_layout, random_plan
from tests.runtime.rows import CPU, SHAPES, TRANSPORTS, Tensors, assert_same_bits, execute
from tests.runtime.threaded import BUFFER_BYTES, needs_linux
from tests.sets import params
from torchtitan_cad.planning import AttentionShape, Plan, TokenLayout, make_plan
from torchtitan_cad.planning.exchange import calls
from torchtitan_cad.planning.exchange.messages import RowBytes
from torchtitan_cad.runtime.tables import PlanTables
from torchtitan_cad.runtime.transport import Route

SHAPE = SHAPES["gqa 8:2"]
RANKS = 6
ONE_HOME = TokenLayout.from_segments([[(0, 0, 1536)], *([] for _ in range(RANKS - 1))])
"""All rows live on one rank, which gets back more than any server receives."""


def trips_of(plan: Plan, buffer_bytes: int = BUFFER_BYTES) -> list[int]:
    """Numbers of trips of queries and keys out, and of their results home."""
    trips = plan.most_rows.trips(RowBytes.of(plan.shape, keep=False), buffer_bytes)
    return [len(each) for each in dataclasses.astuple(trips)]


@pytest.mark.parametrize("keep", [False, True], ids=["resend", "keep"])
@TRANSPORTS
def test_trips_change_no_bit(symmetric: bool, keep: bool) -> None:
    """A row's partials are combined in the order in which they arrive, in however many trips."""
    torch.manual_seed(0)
    tensors, plan = Tensors.random(ONE_HOME, SHAPE), make_plan(ONE_HOME, SHAPE)
    assert trips_of(plan) == [1, 1, 1, 1]
    assert min(trips_of(plan, 2**17)) > 1
    for two_rounds in (False, True):
        at_once = execute(plan, tensors, keep=keep, two_rounds=two_rounds)
        options = {"keep": keep, "symmetric": symmetric, "two_rounds": two_rounds}
        assert_same_bits(execute(plan, tensors, **options, buffer_bytes=2**17), at_once)


@pytest.mark.parametrize("seed", params([0, 1, 2, 4, 5], [0]))
@needs_linux
def test_trips_of_any_plan_change_no_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    layout = random_layout(rng, num_ranks=int(rng.integers(2, 5)), max_length=300)
    plan = random_plan(rng, layout, SHAPE, aligned=False, split_kv=True)
    tensors = Tensors.random(layout, SHAPE)
    at_once = execute(plan, tensors)
    buffer_bytes = 512 * int(rng.integers(4, 100))
    assert max(trips_of(plan, buffer_bytes)) > 2
    assert_same_bits(execute(plan, tensors, symmetric=True, buffer_bytes=buffer_bytes), at_once)


@pytest.mark.parametrize("trips", ["one", "several"])
@pytest.mark.parametrize("two_rounds", [False, True])
@needs_linux
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
    buffer_bytes = 2**14 if trips == "several" else BUFFER_BYTES
    assert_same_bits(execute(plan, tensors, symmetric=True, two_rounds=two_rounds, buffer_bytes=buffer_bytes), late)


@pytest.mark.parametrize("seed", range(5))
def test_routes_of_every_trip_fit_together(seed: int) -> None:
    """Ranks send in a trip the rows that others wait for, side by side from the beginning of their buffers."""
    rng = np.random.default_rng(seed)
    num_ranks, shape = 4, AttentionShape(2, 1, 8, 4)
    layout = random_layout(rng, num_ranks, 100)
    plan = random_plan(rng, layout, shape, aligned=False, split_kv=True)
    trips = plan.most_rows.trips(RowBytes.of(shape, keep=False), 128 * int(rng.integers(1, 60)))
    ranks = [PlanTables.from_exchange(plan.exchange(r), True, CPU, 1.0, trips=trips) for r in range(num_ranks)]
    for kind, way in itertools.product(("queries", "keys"), ("out", "home")):
        sent: list[list[int]] = [[] for _ in range(num_ranks)]
        for of_ranks in zip(*(getattr(getattr(tables, kind), way) for tables in ranks), strict=True):
            routes = [trip if isinstance(trip, Route) else trip.route for trip in of_ranks]
            assert len({(route.most_rows, route.buffer) for route in routes}) == 1
            for receiver, route in enumerate(routes):
                assert sum(route.recv_counts) <= route.most_rows
                assert route.recv_counts == [sender.send_counts[receiver] for sender in routes]
                places = [(sender.put_offsets[receiver], sender.send_counts[receiver]) for sender in routes]
                end = 0
                for place, count in places:
                    assert count == 0 or place == end
                    end += count
            for sender, route in enumerate(routes):
                rows = [*range(sum(route.send_counts))] if route.rows is None else route.rows.tolist()
                assert len(rows) == sum(route.send_counts)
                sent[sender] += rows
        for rank in range(num_ranks):
            exchange = plan.exchange(rank)
            rows = getattr(exchange, kind)
            wanted = rows.send_rows if way == "out" else np.arange(rows.num_received)
            assert sorted(sent[rank]) == sorted(wanted.tolist())
