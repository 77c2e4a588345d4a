# SPDX-License-Identifier: BSD-3-Clause
"""Checks of jobs whose models have experts, made with the other checks before anything is built."""

from typing import Any

from torchtitan.config import JobConfig

from torchtitan_cad.integration.topology import TICK_SCHEDULES


def check_experts(config: JobConfig, model_args: Any, world_size: int | None) -> None:
    """Raise ValueError, naming key, value and remedy, for what experts cannot do, or not with these degrees.

    ``world_size`` None: ranks are not known yet, and what depends on them is skipped.
    """
    parallelism = config.parallelism
    flavor = config.model.flavor
    schedule = parallelism.pipeline_parallel_schedule
    ranks = parallelism.expert_parallel_degree
    etp = parallelism.expert_tensor_parallel_degree
    experts = model_args.moe_args.num_experts
    if config.cad.streams == "traced":
        raise ValueError(
            f"cad.streams = 'traced' cannot trace the experts of model.flavor = {flavor!r}; set cad.streams to 'auto'"
        )
    if schedule in TICK_SCHEDULES and parallelism.pipeline_parallel_degree > 1:
        raise ValueError(
            f"parallelism.pipeline_parallel_schedule = {schedule!r} has not been tested with the experts of "
            f"model.flavor = {flavor!r}; set the schedule to '1F1B' or 'Interleaved1F1B'"
        )
    key = f"parallelism.expert_parallel_degree = {ranks}"
    if experts % ranks:
        raise ValueError(
            f"{key} does not divide the {experts} experts of a layer; set it to a divisor"
        )
    if ranks == 1:
        return
    if world_size is not None:
        sharded = world_size // (
            parallelism.pipeline_parallel_degree
            * parallelism.data_parallel_replicate_degree
        )
        if sharded % (ranks * etp):
            raise ValueError(
                f"{key} x expert_tensor_parallel_degree = {etp} does not divide the {sharded} ranks of a pipeline "
                f"stage and replica; set parallelism.expert_parallel_degree to a divisor of {sharded // etp}"
            )
