# SPDX-License-Identifier: BSD-3-Clause
"""Plans for models of several kinds of attention: bytes and balance of every kind, and a layer's predicted time.

    python -m bench.models

plans one microbatch of 64 ranks of 32,768 tokens, each of 8 TP ranks, for flavors of torchtitan: documents as in
tests/lib/workloads.py end to end in rows of ``SEQ_LEN`` tokens, homes and plans chosen by predicted time, as
``cad.tolerance = "auto"`` does. Times are forward and backward on H100s of as many nodes, by the rates that
``simulate`` assumes, without ping-pong; without CAD every rank attends for its own queries, and exchanges cost nothing.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tyro

from bench.record import Record, conclude
from tests.lib.workloads import TOKENS_PER_RANK, document_lengths
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu
from torchtitan_cad.planning.model.shape import RowBytes
from torchtitan_cad.planning.placement.place import warm_up_placement
from torchtitan_cad.tools.simulation.batches import Batch
from torchtitan_cad.tools.simulation.costs import Costs
from torchtitan_cad.tools.simulation.disaggregated import Disaggregated
from torchtitan_cad.tools.simulation.inputs import Rates
from torchtitan_cad.tools.simulation.step import Step

TP, CP = 8, 8
SEQ_LEN = CP * TOKENS_PER_RANK
JOB = Path(__file__).parents[1] / "train_configs/qwen3_30b_a3b_long.toml"
FLAVORS = {"gpt_oss": "20b", "llama4": "17bx16e_irope", "deepseek_v3": "671B"}


@dataclass(frozen=True)
class Options:
    ranks: int = 64
    workload: str = "lognormal"
    seed: int = 11
    output: Path = Path("bench/results/models.json")


def step_of(name: str, options: Options) -> Step:
    """A step of a flavor with the documents of the workload, cut where rows end."""
    from torchtitan_cad.tools.simulated_job import read_simulated_job

    settings = {
        "job.config_file": JOB,
        "model.name": name,
        "model.flavor": FLAVORS[name],
        "training.seq_len": SEQ_LEN,
        "training.local_batch_size": 1,
        "parallelism.tensor_parallel_degree": TP,
        "parallelism.context_parallel_degree": CP,
        "cad.nano_batches": 1,
    }
    job = read_simulated_job(
        [f"--{key}={value}" for key, value in settings.items()], options.ranks * TP
    ).inputs
    ends = np.cumsum(document_lengths(options.workload, options.ranks, options.seed))
    rows = np.arange(SEQ_LEN, ends[-1] + 1, SEQ_LEN)
    lengths = np.diff(cuts := np.union1d(ends, rows), prepend=0)
    batch = Batch(
        tuple(np.split(lengths, np.searchsorted(cuts, rows[:-1]) + 1)), SEQ_LEN
    )
    return Step(Costs(job.model, job.cluster, Rates()), batch, job.configuration)


def measure(name: str, options: Options) -> list[Record]:
    """A record for every kind of a model's attention, and one for all of its layers."""
    step = step_of(name, options)
    at_home = replace(step.configuration, placement="loader", planner="home")
    before = Disaggregated(replace(step, configuration=at_home))
    after = Disaggregated(step)
    times = step.costs.layer_times(options.ranks, overlaps=False, kept_bytes=0.0)
    records, total = [], np.zeros(2)
    for kind, (home,), (plan,) in zip(
        step.costs.kinds, before.plans((0,)), after.plans((0,)), strict=True
    ):
        seconds = np.array([times.layer_seconds(each) for each in (home, plan)])
        total += kind.layers * seconds
        records.append(
            {
                "model": f"{name} {FLAVORS[name]}",
                "kind": kind.name,
                "layers": kind.layers,
                "key row bytes": RowBytes.of(kind.shape).keys,
                "busiest over mean": f"{home.stats.max_over_mean:.3g} -> {plan.stats.max_over_mean:.4g}",
                "GB a layer": plan.stats.total_bytes / 1e9,
                "worst rank's GB": plan.stats.max_rank_bytes / 1e9,
                "layer ms without CAD": float(seconds[0]) * 1e3,
                "with": float(seconds[1]) * 1e3,
            }
        )
    every = {
        "kind": "all",
        "layers": step.layers,
        "layer ms without CAD": total[0] * 1e3,
        "with": total[1] * 1e3,
    }
    return [
        *records,
        dict.fromkeys(records[0], "") | {"model": records[0]["model"]} | every,
    ]


def main(options: Options) -> int:
    """Returns the exit code."""
    enable_cpu()
    warm_up_placement()
    records = [record for name in FLAVORS for record in measure(name, options)]
    return conclude(options.output, "bench.models", records, records)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
