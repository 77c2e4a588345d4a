# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan's ``pipelining_fn`` for schedules in ticks; ``pipeline_llm`` stays in charge of all others."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
)
from torch.distributed.pipelining import PipelineStage
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import pipeline_module_split
from torchtitan.tools.logging import logger

from torchtitan_cad.integration.engines import Ticks
from torchtitan_cad.integration.pipeline.schedule import TickSchedule
from torchtitan_cad.integration.torchtitan_v0_2.blocks import (
    checkpointing,
    selects_operators,
)
from torchtitan_cad.integration.torchtitan_v0_2.model import build_engine
from torchtitan_cad.integration.torchtitan_v0_2.stages import stage_modules
from torchtitan_cad.planning.pipeline.program import make_program
from torchtitan_cad.planning.pipeline.ticks import tick_schedule
from torchtitan_cad.runtime.tick_engine import TickEngine

_LOOPED = "Interleaved1F1B"
"""A schedule of torch that assigns stages to ranks as ours do: stage s to rank s mod P."""


def pipeline_in_ticks(
    model: nn.Module,
    parallel_dims: ParallelDims,
    job_config: JobConfig,
    device: torch.device,
    model_args: Any,
    parallelize_fn: Callable[..., nn.Module],
    loss_fn: Callable[..., torch.Tensor],
) -> tuple[TickSchedule, list[nn.Module], bool, bool]:
    """Cut the model into stages and build their schedule; arguments and results as of torchtitan's ``pipeline_llm``."""
    parallelism = job_config.parallelism
    section = job_config.training
    pp_mesh = parallel_dims.get_mesh("pp")
    # The dtype of activations, which FSDP alone casts: torchtitan does not use its autocast with pipelines.
    dtype = TORCH_DTYPE_MAP[
        section.mixed_precision_param if parallel_dims.fsdp_enabled else section.dtype
    ]
    names = stage_modules(parallelism, model_args.n_layers)
    split, parts = pipeline_module_split(model, pp_mesh, _LOOPED, device, names)
    parts = [parallelize_fn(part, parallel_dims, job_config) for part in parts]
    stages = [
        _with_part(stage, part, job_config, model_args=model_args, dtype=dtype)
        for stage, part in zip(split, parts, strict=True)
    ]

    microbatches = (
        section.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    )
    ticks = tick_schedule(parallel_dims.pp, microbatches, len(stages))
    blocks = _recomputed_in_order(stages, job_config, pp_mesh.get_group("pp"))
    training = make_program(ticks, blocks)
    validation = make_program([tick for tick in ticks if tick.forward], blocks)
    of_rank = Ticks(training, validation, dtype)
    engine = build_engine(parts, parallel_dims, job_config, ticks=of_rank)
    assert isinstance(engine, TickEngine)
    schedule = TickSchedule(
        stages,
        microbatches,
        loss_fn,
        training=training,
        validation=validation,
        engine=engine,
        nano_batches=job_config.cad.nano_batches,
    )
    logger.info(
        f"Using pipeline schedule {parallelism.pipeline_parallel_schedule} with {microbatches} microbatches and "
        f"{len(names)} stages: {len(ticks)} ticks, blocks per stage {[len(stage) for stage in blocks]}"
    )
    return (
        schedule,
        parts,
        any(stage.is_first for stage in stages),
        any(stage.is_last for stage in stages),
    )


def _recomputed_in_order(
    stages: Sequence[PipelineStage], job_config: JobConfig, group: dist.ProcessGroup
) -> list[list[bool]]:
    """Return ``recomputed_blocks`` of all stages of a pipeline. Collective over its ranks, of which this has some."""
    own = [
        (stage.stage_index, recomputed_blocks(stage.submod, job_config))
        for stage in stages
    ]
    by_rank: list[Any] = [None] * group.size()
    dist.all_gather_object(by_rank, own, group=group)
    return [blocks for _, blocks in sorted(chain(*by_rank))]


def recomputed_blocks(part: nn.Module, job_config: JobConfig) -> list[bool]:
    """Tell of every block of a stage whether backward runs its attention again."""
    by_operator = selects_operators(checkpointing(job_config))
    stage: Any = part
    # With two nano-batches, whole blocks are checkpointed as units of their own.
    blocks = (stage.pingpong and stage.pingpong.units) or stage.layers.values()
    return [
        not by_operator
        and any(isinstance(module, CheckpointWrapper) for module in block.modules())
        for block in blocks
    ]


def _with_part(
    stage: PipelineStage,
    part: nn.Module,
    job_config: JobConfig,
    model_args: Any,
    *,
    dtype: torch.dtype,
) -> PipelineStage:
    """Return a stage of a parallelized part, whose rows are sharded over CP and TP between stages.

    Input and output are meta tensors.
    """
    parallelism = job_config.parallelism
    rows = parallelism.pipeline_parallel_microbatch_size
    tokens = job_config.training.seq_len // parallelism.context_parallel_degree
    with torch.device("meta"):
        shard = tokens // parallelism.tensor_parallel_degree
        hidden = torch.empty(
            rows, shard, model_args.dim, dtype=dtype, requires_grad=True
        )
        first = torch.empty(rows, tokens, dtype=torch.int64)
        last = torch.empty(
            rows, tokens, model_args.vocab_size, dtype=dtype, requires_grad=True
        )
    return PipelineStage(
        part,
        stage.stage_index,
        stage.num_stages,
        stage.device,
        first if stage.is_first else hidden,
        last if stage.is_last else hidden,
        group=stage.group,
    )
