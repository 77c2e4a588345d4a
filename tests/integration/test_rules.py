# SPDX-License-Identifier: BSD-3-Clause
"""The table of rules over a job's keys, and whether doctor says what training does."""

import math
import subprocess
import sys
from contextlib import suppress

import pytest

from tests.lib.jobs.harness import REPOSITORY, parse_job
from tests.lib.refusals import refusal
from tests.lib.sets import matrix
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu

enable_cpu()

from torchtitan.config import JobConfig  # noqa: E402

from torchtitan_cad import job_config  # noqa: E402
from torchtitan_cad.integration.torchtitan_v0_2 import rules  # noqa: E402
from torchtitan_cad.integration.torchtitan_v0_2.manager import CadConfigManager  # noqa: E402

WRONG = (0, 1, -1, -2, 2.0, math.nan, math.inf, "x", "deepep", ["x"], True, False)
"""Values of which at least one is wrong for every key that has a rule."""
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
    "validation.steps=0",
    "model.name=x",
    "optimizer.name=x",
]
"""Options that the whole job refuses, with CAD and without."""


def is_refused(rule: rules.Rule, value: object) -> bool:
    """False as well for values of another type, which the config's types refuse."""
    with suppress(TypeError, AttributeError):
        return not rule.accepts(value)
    return False


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.key)
def test_a_rule_accepts_its_default_and_refuses_something(rule):
    config = CadConfigManager._merge_configs(JobConfig, job_config.JobConfig)()
    default = rules.read_key(config, rule.key)
    assert rule.accepts(default) or not rule.applies(config)
    packaged = rule.remedy.startswith("needs the package")
    comparable = [value for value in WRONG if is_comparable(value, type(default))]
    assert packaged or any(is_refused(rule, value) for value in comparable)


def is_comparable(value: object, kind: type) -> bool:
    return kind in (type(value), type(None)) or isinstance(value, kind | int)


@pytest.mark.parametrize("cad", ["--parallelism.cad", "--parallelism.no-cad"])
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
