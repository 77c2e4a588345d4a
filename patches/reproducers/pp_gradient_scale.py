# SPDX-License-Identifier: BSD-3-Clause
"""Pipeline parallelism leaves gradients undivided by the number of tokens: one step of two stages, over gloo on CPU."""

import contextlib
import sys
import tempfile
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
import torch.distributed.pipelining
import torch.multiprocessing as mp
import torchtitan.distributed.parallel_dims
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import JobConfig
from torchtitan.distributed.pipeline_parallel import build_pipeline_schedule
from torchtitan.train import Trainer

torchtitan.distributed.parallel_dims.device_type = "cpu"
ROWS, TOKENS, VOCAB, STAGES = 4, 8, 16, 2


def train_step(rank: int, folder: str, ratios: torch.Tensor) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=STAGES
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(VOCAB, 8), torch.nn.Linear(8, VOCAB))
    batch, labels = torch.randint(VOCAB, (2, ROWS, TOKENS))
    (cross_entropy_loss(model(batch), labels) / labels.numel()).backward()
    expected = model[rank].weight.grad.norm()
    model.zero_grad()

    config = JobConfig()
    config.training.local_batch_size, config.parallelism.pipeline_parallel_degree = (
        ROWS,
        STAGES,
    )
    stage = torch.distributed.pipelining.PipelineStage(
        model[rank], rank, STAGES, torch.device("cpu")
    )
    trainer = object.__new__(Trainer)
    vars(trainer).update(
        job_config=config,
        model_args=None,
        parallel_dims=torchtitan.distributed.ParallelDims(
            1, 1, 1, 1, STAGES, 1, 1, world_size=STAGES
        ),
        device=torch.device("cpu"),
        model_parts=[model[rank]],
        pp_schedule=build_pipeline_schedule(config, [stage], cross_entropy_loss),
        pp_has_first_stage=rank == 0,
        pp_has_last_stage=rank == STAGES - 1,
        gradient_accumulation_steps=1,
        train_context=contextlib.nullcontext,
        metrics_processor=MagicMock(**{"should_log.return_value": False}),
        **{
            name: MagicMock()
            for name in ("optimizers", "lr_schedulers", "checkpointer")
        },
    )
    config.training.max_norm = float("inf")  # no clipping
    trainer.step = 1
    trainer.train_step(iter([({"input": batch}, labels)]))
    ratios[rank] = model[rank].weight.grad.norm() / expected


if __name__ == "__main__":
    ratios = torch.zeros(STAGES).share_memory_()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            train_step, (folder, ratios), nprocs=STAGES, start_method="fork"
        )
    if not torch.allclose(ratios, torch.ones(STAGES)):
        sys.exit(
            f"gradients of both stages are {ratios.tolist()} times those without PP, of {ROWS * TOKENS} tokens"
        )
