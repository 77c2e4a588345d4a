"""Checks of plans: the first and the last of those that a planner has balanced, the others of all plans."""

from dataclasses import asdict
from fractions import Fraction

import numpy as np

from torchtitan_cad.planning import Plan, TileAreaCost, validate_plan
from torchtitan_cad.planning.model.tasks import make_tasks


def check_guarantee(plan: Plan, home: Plan) -> None:
    """Every load <= max((1 + tolerance) share, share + cost of the longest document's last min_shard rows)."""
    layout, config, cost = plan.layout, plan.config, plan.cost
    loads = np.zeros(layout.num_ranks, dtype=np.int64)
    np.add.at(loads, plan.tasks["server"], cost.cost(plan.tasks))
    assert plan.stats.loads.tolist() == loads.tolist()
    total, longest = int(cost.cost(home.tasks).sum()), int(layout.doc_lengths.max(initial=0))
    if isinstance(cost, TileAreaCost):  # others charge for the cuts along keys, too
        assert loads.sum() <= total
    shard = make_tasks([0], max(0, longest - config.min_shard), longest, 0, longest, 0)
    shard_cost = int(cost.cost(shard)[0]) if longest else 0
    speeds = [Fraction(speed) for speed in config.rank_speeds or [1] * layout.num_ranks]
    for load, limit, speed in zip(loads.tolist(), plan.stats.load_limits.tolist(), speeds, strict=True):
        share = total * speed / sum(speeds)
        assert load <= limit <= max((1 + Fraction(config.tolerance)) * share, share + shard_cost)


def check_bounds(plan: Plan) -> None:
    """The certificate of a plan lies below the plan."""
    stats = plan.stats
    assert 0 <= stats.lower_bound_bytes <= stats.total_bytes
    assert 0 <= stats.forced_export_bytes <= stats.bytes_out.max()
    assert stats.forced_export_bytes <= stats.lower_bound_rank_bytes <= stats.max_rank_bytes
    assert stats.lower_bound_rank_bytes * len(stats.loads) >= stats.lower_bound_bytes


def check_json(plan: Plan) -> None:
    """A plan that is written and read again is the same, with the same tables in whatever order ranks ask for them."""
    again = Plan.from_json(plan.to_json())
    validate_plan(again)
    assert again.fingerprint() == plan.fingerprint()
    assert again.stats.to_dict() == plan.stats.to_dict()
    assert (again.config, again.shape) == (plan.config, plan.shape)
    tables = [plan.exchange(rank) for rank in range(plan.layout.num_ranks)]
    for rank in reversed(range(plan.layout.num_ranks)):
        np.testing.assert_equal(asdict(again.exchange(rank)), asdict(tables[rank]))


def check_cuts(plan: Plan, home: Plan) -> None:
    """Documents are cut at multiples of min_shard or where residency cuts them, never elsewhere."""
    tasks, grid = plan.tasks, plan.config.min_shard
    for side in ("q_start", "q_end"):
        given_cuts = set(zip(home.tasks["doc"].tolist(), home.tasks[side].tolist(), strict=True))
        for doc, cut in zip(plan.tasks["doc"].tolist(), plan.tasks[side].tolist(), strict=True):
            assert cut % plan.config.min_shard == 0 or (doc, cut) in given_cuts
    assert (tasks["kv_start"] % grid == 0).all()
    assert ((tasks["kv_end"] == tasks["q_end"]) | (tasks["kv_end"] % grid == 0)).all()
    if plan.config.planner == "greedy" or not plan.config.split_kv:
        assert (tasks["kv_start"] == 0).all()
        assert (tasks["kv_end"] == tasks["q_end"]).all()
