# SPDX-License-Identifier: BSD-3-Clause
"""`cad/mfu(%)`: torchtitan's own count with a row's attention replaced by that of its documents."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.lib.jobs.simulated import read_job
from torchtitan_cad.integration.job import Job
from torchtitan_cad.integration.torchtitan_v0_2.job import attention_kinds
from torchtitan_cad.planning.model.work import attention_flops
from torchtitan_cad.tools.simulated_job import SimulatedJob, build_on_meta, model_args

ROW = 4096
MODELS = ("llama3", "qwen3", "deepseek_v3", "llama4", "gpt_oss")


def written(model: str, tp: int = 1) -> SimulatedJob:
    return read_job(
        "llama3_debug_cpu",
        f"--model.name={model}",
        "--model.flavor=debugmodel",
        f"--training.seq_len={ROW}",
        f"--parallelism.tensor_parallel_degree={tp}",
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


@pytest.mark.parametrize("tp", [1, 2])
def test_a_job_counts_all_heads(tp):
    config = written("llama3", tp).config
    whole = written("llama3").config
    args = model_args(config)
    fields: Any = dict.fromkeys(Job.__dataclass_fields__)
    fields["kinds"] = attention_kinds(config, args, torch.float32)
    fields["row_tokens"] = ROW
    fields["topology"] = SimpleNamespace(tp=tp)
    of_a_pair = attention_flops(attention_kinds(whole, args, torch.float32), [1])
    assert Job(**fields).flops_beside_rows([ROW / 2]) == -ROW / 2 * of_a_pair
