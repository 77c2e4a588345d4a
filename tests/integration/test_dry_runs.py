# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan's dry runs, in which one process plays a rank of a larger job, go as far with CAD as without."""

import pytest

from tests.lib.jobs.compositions import CAD, COMMON, PLACED, TOLERANCE, cad_summary
from tests.lib.jobs.harness import REPOSITORY, parse_job, run
from tests.lib.refusals import refusal

FAKE, LOCAL = "--comm.mode=fake_backend", "--comm.mode=local_tensor"
FOUR_RANKS = {"NGPU": "4"}


@pytest.mark.matrix
def test_fake_backend_trains_like_torchtitan():
    stock = run([*COMMON, FAKE], nranks=1, env=FOUR_RANKS)
    result = run([*COMMON, *CAD, FAKE], nranks=1, env=FOUR_RANKS)
    assert result.losses == pytest.approx(stock.losses, rel=TOLERANCE)
    assert len(result.losses) == 3


MANY = (
    "--cad.nano_batches=2",
    "--cad.backward=keep",
    "--cad.transport=symm_mem",
    "--validation.enable",
)


@pytest.mark.parametrize(
    "args",
    [(), pytest.param(MANY, marks=pytest.mark.matrix)],
    ids=["plain", "many options"],
)
def test_fake_backend_plans_and_exchanges_nothing(args):
    job = [
        *COMMON,
        *PLACED,
        FAKE,
        "--parallelism.context_parallel_degree=4",
        "--validation.steps=1",
        *args,
    ]
    result = run(job, nranks=1, env=FOUR_RANKS)
    assert len(result.losses) == 3
    assert cad_summary(result)["tasks_moved"] > 0
    assert "CAD exchanges nothing in a dry run" in result.logs[0]


@pytest.mark.matrix
@pytest.mark.parametrize("parallelism", ["tensor", "context"])
def test_local_tensor_builds_the_trainer(parallelism):
    args = [*COMMON, *CAD, LOCAL, f"--parallelism.{parallelism}_parallel_degree=2"]
    result = run(args, nranks=1, env={"NGPU": "2"})
    assert "Applied Core Attention Disaggregation to the model over" in result.logs[0]
    assert "skipping training execution" in result.logs[0]


LONG = REPOSITORY / "train_configs" / "qwen3_30b_a3b_long.toml"


@pytest.mark.matrix
def test_configuration_with_experts_runs_dry():
    job = [
        "--model.flavor=tiny_moe",
        "--training.dataset=packed_documents",
        "--training.steps=2",
        *COMMON,
        FAKE,
    ]
    job += ["--metrics.log_freq=1", "--training.mixed_precision_param=float32"]
    result = run(
        [*job, "--parallelism.expert_parallel_degree=1"],
        nranks=1,
        config=LONG,
        env={"NGPU": "64"},
    )
    assert result.ok, result.report()
    assert len(result.losses) == 2
    result = run(job, nranks=1, config=LONG, env={"NGPU": "64"})
    result.assert_refused("expert_parallel_degree", 8, remedy="1")


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
