# SPDX-License-Identifier: BSD-3-Clause
"""Which modules of a model are in which stage of a pipeline, as torchtitan assigns them, checked before it does."""

import math
from itertools import chain
from typing import Any

from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    ScheduleDualPipeV,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part

from torchtitan_cad.integration.topology import TICK_SCHEDULES

V_SCHEDULES = (ScheduleDualPipeV, ScheduleZBVZeroBubble)
"""Schedules of torch by which a rank has the first and the last stage of a V, so that stages 2s and 2s + 1 may meet."""


def stage_modules(parallelism: Any, num_layers: int) -> list[list[str]]:
    """Name the modules of every stage. Raises ValueError for stages that the schedule cannot assign to ranks."""
    names = parallelism.module_fqns_per_model_part
    first = parallelism.pipeline_parallel_first_stage_less_layers
    last = parallelism.pipeline_parallel_last_stage_less_layers
    per_stage = parallelism.pipeline_parallel_layers_per_stage
    if names is not None:
        count = len(names)
        _check_count(
            parallelism, count, f"module_fqns_per_model_part has {count} parts"
        )
        _check_names(names, num_layers)
        return names
    if per_stage is not None:
        count = math.ceil((num_layers + first + last) / per_stage)
        _check_count(
            parallelism,
            count,
            f"pipeline_parallel_layers_per_stage = {per_stage} makes {count} stages",
        )
    else:
        count = _fewest_stages(parallelism)
    pp = parallelism.pipeline_parallel_degree
    schedule = parallelism.pipeline_parallel_schedule
    if count > num_layers + first + last:
        raise ValueError(
            f"parallelism.pipeline_parallel_degree = {pp} with parallelism.pipeline_parallel_schedule = {schedule!r} "
            f"makes {count} stages of a model with {num_layers} layers (embedding and output count as {first} and "
            f"{last}); set the degree so that there are at most {num_layers + first + last} stages"
        )
    try:
        return generate_llm_fqn_per_model_part(count, num_layers, first, last)
    except ValueError as error:
        raise ValueError(
            f"parallelism.pipeline_parallel_first_stage_less_layers = {first} and pipeline_parallel_last_stage_less_"
            f"layers = {last}, for {count} stages of {num_layers} layers: {error}; set both to 1"
        ) from error


def _fewest_stages(parallelism: Any) -> int:
    """Return the stages of a pipeline that is told nothing: one a rank, or two."""
    pp = parallelism.pipeline_parallel_degree
    schedule = parallelism.pipeline_parallel_schedule
    return pp if _has_one_stage_a_rank(schedule) else 2 * pp


def _has_one_stage_a_rank(schedule: str) -> bool:
    if schedule in TICK_SCHEDULES:
        return schedule == "CAD1F1B"
    return issubclass(get_schedule_class(schedule), PipelineScheduleSingle)


def _has_two_stages_a_rank(schedule: str) -> bool:
    return (
        schedule not in TICK_SCHEDULES and get_schedule_class(schedule) in V_SCHEDULES
    )


def _check_count(parallelism: Any, count: int, cause: str) -> None:
    """Raise ValueError if the schedule cannot assign ``count`` stages to its ranks.

    ``cause`` tells which key makes them.
    """
    pp = parallelism.pipeline_parallel_degree
    schedule = parallelism.pipeline_parallel_schedule
    fewest = _fewest_stages(parallelism)
    if _has_one_stage_a_rank(schedule) or _has_two_stages_a_rank(schedule):
        is_right = count == fewest
        needed = f"exactly {fewest} stages"
    else:
        is_right = count % pp == 0 and count >= fewest
        needed = f"two or more times {pp} stages"
    if not is_right:
        first = parallelism.pipeline_parallel_first_stage_less_layers
        last = parallelism.pipeline_parallel_last_stage_less_layers
        raise ValueError(
            f"parallelism.{cause}, but parallelism.pipeline_parallel_schedule = {schedule!r} with "
            f"pipeline_parallel_degree = {pp} needs {needed}; leave the former out, or choose it accordingly "
            f"(embedding and output count as {first} and {last} layers)"
        )


def _check_names(parts: list[list[str]], num_layers: int) -> None:
    """Raise ValueError unless the parts have every module of the model once."""
    (expected,) = generate_llm_fqn_per_model_part(1, num_layers)
    found = list(chain.from_iterable(parts))
    wrong = sorted(set(found) ^ set(expected)) or [
        name for name in expected if found.count(name) > 1
    ]
    if wrong:
        raise ValueError(
            f"parallelism.module_fqns_per_model_part = {parts!r}: {wrong[0]!r} is missing, unknown or there twice; "
            f"name {expected[0]}, layers.0 to layers.{num_layers - 1}, {' and '.join(expected[-2:])} once each"
        )
