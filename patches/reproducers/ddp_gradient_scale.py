# SPDX-License-Identifier: BSD-3-Clause
"""DDP divides gradients by the number of ranks once too often: one backward on two ranks, over gloo on CPU."""

import contextlib
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3.infra.parallelize import apply_ddp
from torchtitan.train import Trainer

ROWS, TOKENS, VOCAB, RANKS = 4, 8, 16, 2


def backward(rank: int, folder: str, ratios: torch.Tensor) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(VOCAB, 8), torch.nn.Linear(8, VOCAB))
    batch, labels = torch.randint(VOCAB, (2, RANKS, ROWS, TOKENS))
    (
        cross_entropy_loss(model(batch.flatten(0, 1)), labels.flatten(0, 1))
        / labels.numel()
    ).backward()
    expected = model[1].weight.grad.norm()
    model.zero_grad()

    apply_ddp(model, init_device_mesh("cpu", (RANKS,)), enable_compile=False)
    trainer = object.__new__(Trainer)
    vars(trainer).update(
        model_args=None,
        parallel_dims=ParallelDims(RANKS, 1, 1, 1, 1, 1, 1, world_size=RANKS),
        model_parts=[model],
        loss_fn=cross_entropy_loss,
        train_context=contextlib.nullcontext,
        maybe_enable_amp=contextlib.nullcontext(),
    )
    trainer.forward_backward_step(
        input_dict={"input": batch[rank]},
        labels=labels[rank],
        global_valid_tokens=torch.tensor(labels.numel()),
    )
    ratios[rank] = model[1].weight.grad.norm() / expected


if __name__ == "__main__":
    ratios = torch.zeros(RANKS).share_memory_()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            backward, (folder, ratios), nprocs=RANKS, start_method="fork"
        )
    if not torch.allclose(ratios, torch.ones(RANKS)):
        sys.exit(
            f"gradients are {ratios.tolist()} times those of the whole batch on one rank, of {RANKS} DDP ranks"
        )
