# SPDX-License-Identifier: BSD-3-Clause
"""FLOPs by which `compare` and `simulate` count: torchtitan's own, with a row's attention replaced."""

import pytest
import torch

from tests.lib.jobs.simulated import read_job
from torchtitan_cad.integration.torchtitan_v0_2.job import attention_kinds
from torchtitan_cad.planning.model.work import attention_flops
from torchtitan_cad.tools.simulated_job import SimulatedJob, build_on_meta, model_args

ROW = 4096
MODELS = ("llama3", "qwen3", "deepseek_v3", "llama4", "gpt_oss")


def written(model: str) -> SimulatedJob:
    return read_job(
        "llama3_debug_cpu",
        f"--model.name={model}",
        "--model.flavor=debugmodel",
        f"--training.seq_len={ROW}",
        ranks=2,
    )


@pytest.mark.parametrize("name", MODELS)
def test_linear_work_is_what_torchtitan_counts_for_rows_of_no_tokens(name):
    job = written(name)
    args = model_args(job.config)
    model = build_on_meta(job.config, args)
    _, with_rows = args.get_nparams_and_flops(model, ROW)
    _, linear = args.get_nparams_and_flops(model, 0)
    kinds = attention_kinds(job.config, args, torch.float32)
    assert with_rows - attention_flops(kinds, [ROW] * len(kinds)) == linear
