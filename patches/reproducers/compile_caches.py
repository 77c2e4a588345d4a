# SPDX-License-Identifier: BSD-3-Clause
"""A rank takes another's compiled loss from the cache: the second start of two ranks of TP, over gloo on CPU."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchtitan.distributed.parallel_dims
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torchtitan.components.loss import build_cross_entropy_loss, cross_entropy_loss
from torchtitan.config import JobConfig

torchtitan.distributed.parallel_dims.device_type = "cpu"
TOKENS, VOCAB, RANKS, STARTS = 32, 16, 2, 2


def start(rank: int, folder: str, ratios: torch.Tensor) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    parallel_dims = torchtitan.distributed.ParallelDims(
        1, 1, 1, RANKS, 1, 1, 1, world_size=RANKS
    )
    torch.manual_seed(0)
    logits, labels = torch.randn(1, TOKENS, VOCAB), torch.randint(VOCAB, (1, TOKENS))
    sharded = distribute_tensor(logits, parallel_dims.get_mesh("tp"), [Shard(2)])
    config = JobConfig()
    config.compile.enable = True
    with loss_parallel():
        loss = build_cross_entropy_loss(config)(sharded, labels).to_local()
    ratios[rank] = loss / cross_entropy_loss(logits, labels)
    dist.barrier()  # until both have stored what they have compiled


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        for _ in range(STARTS):
            ratios = torch.zeros(RANKS).share_memory_()
            with tempfile.TemporaryDirectory() as folder:
                mp.start_processes(
                    start, (folder, ratios), nprocs=RANKS, start_method="fork"
                )
    if not torch.allclose(ratios, torch.ones(RANKS)):
        sys.exit(
            f"the compiled loss of {RANKS} ranks of TP is {ratios.tolist()} times the loss, started a second time"
        )
