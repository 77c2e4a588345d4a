# SPDX-License-Identifier: BSD-3-Clause
"""The settings of arXiv 2510.18121 in the simulation: what CAD gains over packing there, by this model.

    python -m bench.paper

prints the table of docs/results.md and writes bench/results/paper.json. CAD places and plans by time, as jobs do by
default. Llama 8B and 34B, TP 8, 64 to 512 H200s in nodes of 8 with 50 GB/s per GPU between nodes, documents of up to
512K tokens. Where the paper's settings are not known (document lengths after up-sampling, tokens per step, rates), the
ones taken are those of ``Options``.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from tqdm import tqdm

from bench.record import Record, conclude
from torchtitan_cad.planning import warm_up
from torchtitan_cad.tools.simulation.inputs import (
    MODELS,
    OPEN,
    Cluster,
    Configuration,
    Documents,
    Inputs,
)
from torchtitan_cad.tools.simulation.systems import simulate

NET, MEMORY = 50e9, 135e9
"""Bytes a second and GPU between nodes; nine tenths of the 150e9 bytes of an H200."""
SAMPLES = 20_000
LONG = 65_536
"""tokens: least of the documents that ``Options.long`` is the share of"""
PRETRAIN = {
    0: 1, 1: 63, 5: 324, 10: 646, 25: 1606, 50: 3227, 75: 4832, 90: 5784, 95: 6110, 97.5: 7482, 99: 26058,
    99.5: 69098, 99.8: 99303, 99.9: 119794, 100: 124913,
}  # fmt: skip
"""Percentiles of the "Pretrain" lengths of arXiv 2510.18121, before long documents are drawn more often."""


@dataclass(frozen=True)
class Options:
    cases: tuple[str, ...] = (
        "llama-8b:64", "llama-8b:128", "llama-8b:256", "llama-8b:512",
        "llama-34b:128", "llama-34b:256", "llama-34b:512",
        "llama-8b:256:4", "llama-8b:512:4", "llama-34b:256:4", "llama-34b:512:4",
    )  # fmt: skip
    """Model, GPUs and pipeline ranks, by default 1."""
    scale: float = 4.0
    """The documents of ``PRETRAIN`` are so many times as long."""
    long: float = 0.5
    """Share of tokens in documents of 64K tokens and more, which are drawn more often to reach it."""
    row_tokens: int = 524_288
    tokens_per_gpu: int = 16_384
    """tokens of a step; twice as many with pipelines"""
    batches: int = 3
    output: Path = Path("bench/results/paper.json")


def pretrain_lengths(options: Options) -> np.ndarray:
    """Samples of the paper's documents, int64, the same in every call."""
    share = (np.arange(SAMPLES) + 0.5) / SAMPLES
    logarithms = np.log(list(PRETRAIN.values()))
    of_paper = np.exp(np.interp(100 * share, list(PRETRAIN), logarithms))
    lengths = more_long(of_paper * options.scale, options.long)
    lengths = np.minimum(lengths, options.row_tokens)
    return np.clip(np.rint(lengths), 1, None).astype(np.int64)


def more_long(lengths: np.ndarray, share: float) -> np.ndarray:
    """As many samples, of which those from 64K tokens on hold ``share`` of the tokens if they held less, but some."""
    long = lengths >= LONG
    tokens = lengths[long].sum()
    if not 0 < tokens < share * lengths.sum():
        return lengths
    weight = np.where(long, share * lengths[~long].sum() / ((1 - share) * tokens), 1.0)
    ends = np.cumsum(weight) / weight.sum()
    sample = (np.arange(len(lengths)) + 0.5) / len(lengths)
    return lengths[np.searchsorted(ends, sample)]


def run(options: Options) -> list[Record]:
    """One record per case."""
    warm_up()
    lengths = pretrain_lengths(options)
    records = []
    for case in tqdm(options.cases, unit="case"):
        model, gpus, *pp = case.split(":")
        cluster = Cluster(int(gpus), tp=8, net=NET, memory=MEMORY, fsdp=False)
        step = options.tokens_per_gpu * cluster.ranks * (2 if pp else 1)
        documents = Documents(
            lengths, options.row_tokens, step, options.batches, seed=0
        )
        stages = int(pp[0]) if pp else 1
        inputs = Inputs(
            model=MODELS[model],
            cluster=cluster,
            documents=documents,
            configuration=Configuration(pp=stages),
            open=OPEN - {"pp"},
        )
        report = simulate(inputs)
        records.append(
            {"model": model, "gpus": cluster.ranks, "pp": stages, **report.to_dict()}
        )
    return records


def table(records: list[Record]) -> list[Record]:
    """Seconds per step, share of perfect, speed-up over packing."""
    rows = []
    for record in records:
        row: Record = {
            "model": record["model"],
            "GPUs": record["gpus"],
            "PP": record["pp"],
        }
        systems = record["systems"]
        row |= {
            f"{name}, s": system.get("seconds_per_step", "does not fit")
            for name, system in systems.items()
        }
        cad = systems["cad"].get("speedup_over", {}).get("packing_cp") or {}
        row["perfect / cad"] = systems["cad"].get("share_of_perfect", "-")
        row["cad over packing: min, mean, max"] = [
            cad.get(key, "-") for key in ("min", "mean", "max")
        ]
        rows.append(row)
    return rows


def main(options: Options) -> None:
    records = run(options)
    conclude(options.output, "bench.paper", records, table(records))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
