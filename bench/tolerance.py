# SPDX-License-Identifier: BSD-3-Clause
"""Gains of ``tolerance = "auto"`` over a tolerance of 0.02: predicted time of a layer, and bytes.

    python -m bench.tolerance

Plans are real; times are ``planning/timed.py``'s, the ones by which "auto" decides, of a layer of Llama 3 8B at the
simulation's default rates (H100s), forward and backward. Every rank has 32,768 tokens, of documents that lie end to end
over the ranks. With ``nano_batches = 2`` that is one half of a microbatch of twice the tokens.
"""

import statistics
from itertools import product
from pathlib import Path

import tyro
from tqdm import tqdm

from bench.record import Record, conclude
from tests.lib.workloads import SEEDS, workload_layout
from torchtitan_cad.planning import PlannerConfig, TokenLayout, make_plan, warm_up
from torchtitan_cad.planning.placement.microbatch import plan_by_time
from torchtitan_cad.tools.simulation.costs import Costs
from torchtitan_cad.tools.simulation.inputs import MODELS, Cluster, Rates

WORKLOADS = ("lognormal", "one big", "uniform")
RANKS = (8, 64)
LINKS = (20e9, 50e9, 200e9)
"""Bytes per second into a rank."""


def measure(
    ranks: int,
    workload: str,
    link: float,
    nano_batches: int,
    layouts: list[TokenLayout],
) -> Record:
    """Means over some layouts: seconds of a layer by both tolerances, bytes of its forward, and what "auto" took."""
    costs = Costs(MODELS["llama-8b"], Cluster(ranks, net=link, node=link), Rates())
    times = costs.layer_times(ranks, overlaps=nano_batches == 2, kept_bytes=0.0)
    plans = {
        "fixed": [
            make_plan(layout, costs.shape, PlannerConfig()) for layout in layouts
        ],
        "auto": [
            plan_by_time([layout], costs.shape, PlannerConfig(), times)[0]
            for layout in layouts
        ],
    }
    case: Record = {
        "ranks": ranks,
        "workload": workload,
        "bytes_per_second": link,
        "nano_batches": nano_batches,
    }
    for name, made in plans.items():
        case[f"{name}_seconds"] = statistics.fmean(
            times.layer_seconds(plan) for plan in made
        )
        case[f"{name}_bytes"] = statistics.fmean(
            plan.stats.total_bytes for plan in made
        )
    case["gain"] = case["fixed_seconds"] / case["auto_seconds"] - 1
    case["bytes_saved"] = 1 - case["auto_bytes"] / case["fixed_bytes"]
    case["tolerances"] = [plan.config.tolerance for plan in plans["auto"]]
    return case


def table(cases: list[Record]) -> list[Record]:
    return [
        {
            "ranks": case["ranks"],
            "documents": case["workload"],
            "GB/s": case["bytes_per_second"] / 1e9,
            "nano_batches": case["nano_batches"],
            "ms by 0.02, by auto": [
                1e3 * case["fixed_seconds"],
                1e3 * case["auto_seconds"],
            ],
            "gain": f"{100 * case['gain']:.1f} %",
            "bytes saved": f"{100 * case['bytes_saved']:.0f} %",
            "auto took": sorted(set(case["tolerances"])),
        }
        for case in cases
    ]


def main(output: Path = Path("bench/results/tolerance.json"), seeds: int = 3) -> None:
    """Plan every case by 0.02 and by "auto", print a table, write JSON.

    Args:
        output: JSON file of results.
        seeds: Draws of documents, at most five.
    """
    warm_up()
    cases = []
    for ranks, workload in tqdm(
        list(product(RANKS, WORKLOADS)), unit="workload", leave=False
    ):
        layouts = [workload_layout(workload, ranks, s) for s in SEEDS[:seeds]]
        for link, nano_batches in product(LINKS, (1, 2)):
            cases.append(measure(ranks, workload, link, nano_batches, layouts))
    conclude(output, "bench.tolerance", cases, table(cases))


if __name__ == "__main__":
    tyro.cli(main)
