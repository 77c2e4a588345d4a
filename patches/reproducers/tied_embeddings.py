# SPDX-License-Identifier: BSD-3-Clause
"""FSDP2 of torch 2.13 refuses qwen3's tied embeddings: a forward pass of one rank over gloo on CPU."""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.models.llama4.infra.parallelize import apply_fsdp
from torchtitan.models.qwen3 import Qwen3Model, qwen3_args

args = qwen3_args["debugmodel"]
assert args.enable_weight_tying
model = Qwen3Model(args)
with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
    )
    apply_fsdp(
        model,
        init_device_mesh("cpu", (1,)),
        torch.float32,
        torch.float32,
        pp_enabled=False,
    )
    try:
        with torch.no_grad():
            model.init_weights()
            model(torch.zeros(1, 8, dtype=torch.int64))
    except ValueError as error:
        sys.exit(f"ValueError: {error}")
    finally:
        dist.destroy_process_group()
