# SPDX-License-Identifier: BSD-3-Clause
"""A gpt_oss from scratch has the routers' biases that memory held: NaN, where torch fills empty memory with it."""

import sys

import torch
from torchtitan.models.gpt_oss import GptOssModel, gptoss_configs

torch.use_deterministic_algorithms(True)  # as debug.deterministic does
with torch.device("meta"):
    model = GptOssModel(gptoss_configs["debugmodel"])
model.to_empty(device="cpu")
with torch.no_grad():
    model.init_weights(buffer_device=torch.device("cpu"))
names = [
    name for name, parameter in model.named_parameters() if parameter.isnan().any()
]
if names:
    sys.exit(
        f"NaN after init_weights, from which a job would train: {', '.join(names)}"
    )
