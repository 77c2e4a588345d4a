"""What holds for every plan of a planner that balances."""

from __future__ import annotations

import numpy as np

from torchtitan_cad.planning import Plan, TileAreaCost
from torchtitan_cad.planning.model.tasks import make_tasks


def loads_of(plan: Plan) -> np.ndarray:
    cost = TileAreaCost(plan.config.cost_tile)
    loads = np.zeros(plan.layout.num_ranks, dtype=np.int64)
    np.add.at(loads, plan.tasks["server"], cost.cost(plan.tasks))
    return loads


def check_guarantee(plan: Plan, home: Plan) -> None:
    """Every load <= max((1 + tolerance) * mean, mean + cost of the longest document's last min_shard rows)."""
    loads, mean = loads_of(plan), loads_of(home).sum() / plan.layout.num_ranks
    longest = int(plan.layout.doc_lengths.max(initial=0))
    shard = make_tasks([0], max(0, longest - plan.config.min_shard), longest, 0, longest, 0)
    shard_cost = int(TileAreaCost(plan.config.cost_tile).cost(shard)[0]) if longest else 0
    bound = max((1 + plan.config.tolerance) * mean, mean + shard_cost)
    assert loads.max() <= bound * (1 + 1e-12)
    assert loads.max() <= plan.stats.load_limit <= bound * (1 + 1e-12)
    assert plan.stats.loads.tolist() == loads.tolist()
    assert loads.sum() <= loads_of(home).sum()


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
