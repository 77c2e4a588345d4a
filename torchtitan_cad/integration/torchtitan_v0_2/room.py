# SPDX-License-Identifier: BSD-3-Clause
"""What a job of torchtitan 0.2.2 says of the memory that it leaves for rows that servers keep."""

from collections.abc import Sequence
from typing import Any

from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

from torchtitan_cad.integration.job import Job
from torchtitan_cad.integration.room import RankParts
from torchtitan_cad.planning.keeping import Checkpointing


def checkpointing_kind(config: JobConfig) -> Checkpointing:
    """Return what activation checkpointing computes again; what is neither all nor nothing counts as "selective"."""
    mode = config.activation_checkpoint.mode
    if mode == "full":
        return "full" if config.cad.recompute_attention else "linear"
    return "none" if mode == "none" else "selective"


def of_layers(config: JobConfig) -> Sequence[Checkpointing]:
    """Return what is computed again of layers, in turn: of every n-th one all, with ``selective_ac_option = "n"``."""
    kind = checkpointing_kind(config)
    option = config.activation_checkpoint.selective_ac_option
    if kind != "selective" or not option.isdigit():
        return [kind]
    kept: list[Checkpointing] = ["none"] * (int(option) - 1)
    return ["full", *kept]


def read_parts(
    parts: Sequence[Any], parallel_dims: ParallelDims, config: JobConfig, job: Job
) -> RankParts:
    """Return what this rank runs.

    Args:
        parts: of the model, parallelized, that this rank runs.
        parallel_dims: degrees of parallelism.
        config: of the job.
        job: the same as CAD sees it.
    """
    model_args = parts[0].model_args
    in_flight = job.microbatches  # of schedules but 1F1B, as if all were
    if config.parallelism.pipeline_parallel_schedule == "1F1B":
        in_flight = min(in_flight, job.topology.pp)
    return RankParts(
        modules=parts,
        hidden=model_args.dim,
        vocabulary=model_args.vocab_size,
        shards=parallel_dims.dp_shard * parallel_dims.cp,
        row_tokens=config.training.seq_len,
        checkpointing=of_layers(config),
        compiles_loss=config.compile.enable and "loss" in config.compile.components,
        microbatches_in_flight=in_flight,
    )
