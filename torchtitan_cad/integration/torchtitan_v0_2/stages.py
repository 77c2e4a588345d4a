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

V_SCHEDULES = (ScheduleDualPipeV, ScheduleZBVZeroBubble)
"""Schedules of torch by which a rank has the first and the last stage of a V, so that stages 2s and 2s + 1 may meet."""


def stage_modules(parallelism: Any, num_layers: int) -> list[list[str]]:
    """Name the modules of every stage. Raises ValueError for stages that the schedule cannot assign to ranks."""
    names = parallelism.module_fqns_per_model_part
    per_stage = parallelism.pipeline_parallel_layers_per_stage
    first = parallelism.pipeline_parallel_first_stage_less_layers
    last = parallelism.pipeline_parallel_last_stage_less_layers
    pp = parallelism.pipeline_parallel_degree
    schedule = parallelism.pipeline_parallel_schedule
    # schedules in ticks assign stages as those of torch that they are named after
    schedule_cls = get_schedule_class(schedule.removeprefix("CAD"))
    is_single = issubclass(schedule_cls, PipelineScheduleSingle)
    fewest = pp if is_single else 2 * pp
    if names is not None:
        count = len(names)
    elif per_stage is not None:
        count = math.ceil((num_layers + first + last) / per_stage)
    else:
        count = fewest
    is_exact = is_single or schedule_cls in V_SCHEDULES
    fits = count == fewest if is_exact else count % pp == 0 and count >= fewest
    described = (
        f"parallelism.pipeline_parallel_schedule = {schedule!r} with pipeline_parallel_degree = {pp}, "
        f"module_fqns_per_model_part = {names}, pipeline_parallel_layers_per_stage = {per_stage}: {count} stages"
    )
    if not fits:
        needed = f"exactly {fewest}" if is_exact else f"two or more times {pp}"
        raise ValueError(
            f"{described}, but the schedule needs {needed}; leave module_fqns_per_model_part and "
            f"pipeline_parallel_layers_per_stage out, or choose them accordingly (embedding and output count as "
            f"{first} and {last} layers)"
        )
    if names is not None:
        _check_modules(names, num_layers)
        return names
    try:
        return generate_llm_fqn_per_model_part(count, num_layers, first, last)
    except ValueError as error:
        raise ValueError(
            f"{described} of {num_layers} layers, where pipeline_parallel_first_stage_less_layers = {first} and "
            f"pipeline_parallel_last_stage_less_layers = {last}: {error}; set fewer stages, or the latter two to 1"
        ) from error


def _check_modules(names: list[list[str]], num_layers: int) -> None:
    """Raise ValueError unless every module is in one stage: torchtitan would train a model without the others."""
    (expected,) = generate_llm_fqn_per_model_part(1, num_layers)
    if sorted(chain.from_iterable(names)) != sorted(expected):
        raise ValueError(
            f"parallelism.module_fqns_per_model_part = {names}: name each of {', '.join(expected)} once"
        )
