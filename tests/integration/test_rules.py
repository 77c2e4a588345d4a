# SPDX-License-Identifier: BSD-3-Clause
"""What the whole job refuses, and whether doctor says what training does."""

import subprocess
import sys

import pytest

from tests.lib.jobs.harness import REPOSITORY, parse_job
from tests.lib.refusals import refusal
from tests.lib.sets import matrix, params

BROKEN = [
    "training.global_batch_size=3",
    "training.global_batch_size=0",
    "training.gc_freq=0",
    "training.steps=-1",
    "training.max_norm=nan",
    "training.seq_len=-1",
    "lr_scheduler.total_steps=1",
    "activation_checkpoint.mode=memory_budget",
    "parallelism.expert_tensor_parallel_degree=0",
    "parallelism.data_parallel_shard_degree=-2",
    "model.name=x",
    "optimizer.name=x",
]
"""Options that the whole job refuses, with CAD and without."""


@pytest.mark.parametrize(
    "cad",
    params(["--parallelism.cad", "--parallelism.no-cad"], ["--parallelism.cad"]),
)
@pytest.mark.parametrize("option", BROKEN)
def test_a_broken_rule_is_one_line_with_cad_and_without(
    option, cad, tmp_path, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    key, _, value = option.partition("=")
    with refusal(key, None if value == "x" else value) as error:
        parse_job(tmp_path, cad, f"--{option}")
    assert "\n" not in str(error.value)


@matrix
def test_doctor_says_what_training_does():
    command = ["-m", "tests.doctor_against_training", "--count", "8", "--seed", "7"]
    subprocess.run([sys.executable, *command], cwd=REPOSITORY, timeout=1200, check=True)
