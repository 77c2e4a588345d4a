# SPDX-License-Identifier: BSD-3-Clause
"""`cad/mfu(%)`: torchtitan's own count with a row's attention replaced by that of its documents."""

from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu

enable_cpu()

from tests.lib.sets import CONFIGS  # noqa: E402
from torchtitan_cad.integration.job import Job  # noqa: E402
from torchtitan_cad.integration.report.metrics import CadMetrics  # noqa: E402
from torchtitan_cad.integration.torchtitan_v0_2.job import attention_kinds  # noqa: E402
from torchtitan_cad.planning.model.work import attention_flops  # noqa: E402
from torchtitan_cad.tools.simulated_job import (  # noqa: E402
    build_on_meta,
    model_args,
    read_simulated_job,
)

ROW = 4096
MODELS = ("llama3", "qwen3", "deepseek_v3", "llama4", "gpt_oss")


def written(model: str, tp: int = 1) -> Any:
    return read_simulated_job(
        [
            f"--job.config_file={CONFIGS / 'llama3_debug_cpu.toml'}",
            f"--model.name={model}",
            "--model.flavor=debugmodel",
            f"--training.seq_len={ROW}",
            f"--parallelism.tensor_parallel_degree={tp}",
        ],
        2,
    )


@pytest.mark.parametrize("name", MODELS)
def test_linear_work_is_what_torchtitan_counts_for_rows_of_no_tokens(name: str) -> None:
    job = written(name)
    args = model_args(job.config)
    model = build_on_meta(job.config, args)
    with_rows, linear = (
        args.get_nparams_and_flops(model, tokens)[1] for tokens in (ROW, 0)
    )
    kinds = attention_kinds(job.config, args)
    of_rows = attention_flops(kinds, [ROW] * len(kinds))
    assert with_rows - of_rows == linear
    if name == "llama3":  # no experts: the simulation counts the same, but for norms
        simulated = job.model.flops(1, [0] * len(job.model.kinds(1)))
        assert simulated == pytest.approx(linear, rel=1e-3)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_job_counts_all_heads(tp: int) -> None:
    job = written("llama3", tp)
    kinds = attention_kinds(job.config, model_args(job.config))
    fields = dict.fromkeys(Job.__dataclass_fields__)
    one: Any = Job(  # type: ignore[arg-type]
        **fields
        | {"kinds": kinds, "row_tokens": ROW, "topology": SimpleNamespace(tp=tp)}
    )
    whole = attention_flops(
        attention_kinds(written("llama3").config, model_args(job.config)), [1]
    )
    assert one.flops_beside_rows([ROW / 2]) == -ROW / 2 * whole


def test_the_share_of_the_peak() -> None:
    metrics: Any = CadMetrics()
    metrics.parallel_dims = SimpleNamespace(non_data_parallel_size=2)
    metrics.ntokens_since_last_log = 1000
    metrics.num_flops_per_token = 6e9
    metrics.gpu_peak_flops = 1e13
    figures = metrics._utilisation(-2e9, elapsed=5.0)
    assert figures == {"tokens_per_second": 100.0, "mfu_percent": pytest.approx(4.0)}
