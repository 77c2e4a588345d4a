# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan's dry runs, in which one process plays a rank of a larger job, go as far with CAD as without."""

from functools import partial

import pytest

from tests.lib.jobs.compositions import (
    CAD,
    COMMON,
    CP2,
    HALVES,
    PLACED,
    TOLERANCE,
    TP2,
    VALIDATION,
    cad_summary,
    dp,
)
from tests.lib.jobs.harness import parse_job, run
from tests.lib.refusals import refusal
from tests.lib.sets import CONFIGS, matrix, params

FAKE = "--comm.mode=fake_backend"
LOCAL = "--comm.mode=local_tensor"
FOUR_RANKS = {"NGPU": "4"}


@matrix
def test_fake_backend_trains_like_torchtitan():
    stock = run([*COMMON, FAKE], nranks=1, env=FOUR_RANKS)
    result = run([*COMMON, *CAD, FAKE], nranks=1, env=FOUR_RANKS)
    assert result.losses == pytest.approx(stock.losses, rel=TOLERANCE)
    assert len(result.losses) == 3


MANY = (*HALVES, "--cad.backward=keep", "--cad.transport=symm_mem", *VALIDATION)


@pytest.mark.parametrize("args", params([(), MANY], [()]), ids=["plain", "many"])
def test_fake_backend_plans_and_exchanges_nothing(args):
    job = [*COMMON, *PLACED, FAKE, *dp(context_parallel=4), *args]
    result = run(job, nranks=1, env=FOUR_RANKS)
    assert len(result.losses) == 3
    assert cad_summary(result)["tasks_moved"] > 0
    assert "CAD exchanges nothing in a dry run" in result.logs[0]


@matrix
@pytest.mark.parametrize("parallelism", [TP2, CP2], ids=["tensor", "context"])
def test_local_tensor_builds_the_trainer(parallelism):
    job = [*COMMON, *CAD, LOCAL, *parallelism]
    (log,) = run(job, nranks=1, env={"NGPU": "2"}).logs
    assert "Applied Core Attention Disaggregation to the model over" in log
    assert "skipping training execution" in log


@matrix
def test_configuration_with_experts_runs_dry():
    config = CONFIGS / "qwen3_30b_a3b_long.toml"
    train = partial(run, nranks=1, config=config, env={"NGPU": "64"}, may_fail=True)
    job = [
        "--model.flavor=tiny_moe",
        "--training.dataset=packed_documents",
        "--training.steps=2",
        "--metrics.log_freq=1",
        "--training.mixed_precision_param=float32",
        *COMMON,
        FAKE,
    ]
    train(job).assert_refused("expert_parallel_degree", 8, remedy="1")
    result = train([*job, *dp(expert_parallel=1)])
    assert result.ok, result.report()
    assert len(result.losses) == 2


@pytest.mark.parametrize("mode", [FAKE, LOCAL])
@pytest.mark.parametrize(
    ("args", "ngpu"),
    [
        (["--parallelism.pipeline_parallel_degree=2"], "4"),
        ([], ""),
        (["--parallelism.context_parallel_degree=3"], "4"),
    ],
)
def test_what_cannot_run_dry_is_a_value_error(mode, args, ngpu, tmp_path, monkeypatch):
    monkeypatch.setenv("NGPU", ngpu)
    with refusal():
        parse_job(tmp_path, mode, *args)
