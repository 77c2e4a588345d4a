"""Plans for models of several kinds of attention: bytes and balance of every kind, and a step's predicted time.

    python -m bench.models

plans one microbatch of 64 ranks of 32,768 tokens, each of 8 TP ranks, for flavors of torchtitan: documents as in
bench/workloads.py end to end over the ranks, homes and plans chosen by predicted time, as ``cad.tolerance = "auto"``
does. Times are forward and backward of all layers on H100s of as many nodes, by the rates that ``simulate`` assumes,
without ping-pong; without CAD every rank attends for its own queries, and exchanges cost nothing.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

from bench.record import Record, conclude
from bench.workloads import document_lengths, spanning_layout
from torchtitan_cad.integration.titan022.cpu import enable_cpu
from torchtitan_cad.planning import LayerTimes, PlannerConfig, TileAreaCost
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.planning.model.shape import RowBytes
from torchtitan_cad.planning.placement.kinds import plan_kinds
from torchtitan_cad.planning.placement.place import warm_up_placement
from torchtitan_cad.simulation.costs import BACKWARD_ATTENTION, BACKWARD_LINEAR
from torchtitan_cad.simulation.inputs import Cluster, Rates

TP = 8
SEQ_LEN = 262_144
"""tokens that models are built for: rows of eight ranks"""
FLAVORS = {"gpt_oss": "20b", "llama4": "17bx16e_irope", "deepseek_v3": "671B"}


@dataclass(frozen=True)
class Options:
    ranks: int = 64
    workload: str = "lognormal"
    seed: int = 11
    tolerance: float | None = None
    """As ``cad.tolerance``; None: "auto"."""
    output: Path = Path("bench/results/models.json")


def model_kinds(name: str, flavor: str) -> tuple[tuple[AttentionKind, ...], float]:
    """Kinds of attention of a flavor, and the mean parameters of a layer's products per token."""
    enable_cpu()
    from torchtitan.protocols.train_spec import get_train_spec

    from torchtitan_cad.integration.titan022.models import ADAPTERS

    spec = get_train_spec(name)
    args: Any = spec.model_args[flavor]
    args.attn_type, args.moe_impl = "sdpa", "standard"
    with torch.device("meta"):
        layers: Any = spec.model_cls(args).layers
    passed = args.moe_args.top_k / args.moe_args.num_experts
    parameters = sum(
        each.numel() * (passed if ".experts." in key else 1) for key, each in layers.named_parameters() if each.ndim > 1
    )
    return ADAPTERS[name].kinds(args, SEQ_LEN, TP, dtype_bytes=2), parameters / args.n_layers


def layer_times(kind: AttentionKind, parameters: float, cluster: Cluster) -> LayerTimes:
    """Rates of a layer, forward and backward."""
    rates, shape, tile = Rates(), kind.shape, PlannerConfig.tile
    operations = 2 * shape.num_heads * (shape.head_dim + shape.out_dim) * tile**2
    return LayerTimes(
        unit=operations * (1 / rates.attention_flops + BACKWARD_ATTENTION / rates.backward_flops),
        linear=(1 + BACKWARD_LINEAR) * 2 * parameters / (cluster.tp * rates.linear_flops),
        bytes_per_second=cluster.node,
        between_hosts=cluster.net,
        exchange=cluster.latency,
        overlaps=False,
        hosts=tuple(range(cluster.ranks)),
    )


def measure(name: str, options: Options) -> list[Record]:
    """A record for every kind of a model's attention, and one for all of its layers."""
    kinds, parameters = model_kinds(name, FLAVORS[name])
    lengths = document_lengths(options.workload, options.ranks, options.seed)
    layout, columns = spanning_layout(lengths, options.ranks), np.cumsum([0, *lengths[:-1]]) % SEQ_LEN
    cost, cluster = TileAreaCost(PlannerConfig.tile), Cluster(options.ranks, tp=TP)
    config, times = PlannerConfig(), layer_times(kinds[0], parameters, cluster)
    if options.tolerance is not None:
        config, times = PlannerConfig(tolerance=options.tolerance), None
    steps = plan_kinds([[layout]], kinds, columns, config, times, cost)
    records, before, after = [], 0.0, 0.0
    for kind, ((placed,),) in zip(kinds, steps, strict=True):
        rates, stats, given = layer_times(kind, parameters, cluster), placed.plan.stats, placed.given.stats
        without = rates.linear_seconds(layout) + rates.unit * given.mean_load * given.max_over_mean_before
        with_cad = rates.layer_seconds(placed.plan)
        before, after = before + kind.layers * without, after + kind.layers * with_cad
        records.append(
            {
                "model": f"{name} {FLAVORS[name]}",
                "kind": kind.name,
                "layers": kind.layers,
                "key row bytes": RowBytes.of(kind.shape).keys,
                "busiest over mean": f"{given.max_over_mean_before:.3g} -> {stats.max_over_mean:.4g}",
                "GB a layer": stats.total_bytes / 1e9,
                "worst rank's GB": stats.max_rank_bytes / 1e9,
                "layer ms without CAD": without * 1e3,
                "with": with_cad * 1e3,
            }
        )
    total = {"kind": "all", "layers": sum(kind.layers for kind in kinds)}
    times_of_all = {"layer ms without CAD": before * 1e3, "with": after * 1e3}
    return [*records, dict.fromkeys(records[0], "") | {"model": records[0]["model"]} | total | times_of_all]


def main(options: Options) -> int:
    """Returns the exit code."""
    warm_up_placement()
    records = [record for name in FLAVORS for record in measure(name, options)]
    return conclude(options.output, "bench.models", records, records)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
