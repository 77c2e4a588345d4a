# SPDX-License-Identifier: BSD-3-Clause
"""What the whole job refuses, and whether doctor says what training does."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from random import Random
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import pytest

from tests.lib.jobs.compositions import options
from tests.lib.jobs.harness import job_files, parse_job
from tests.lib.jobs.launched import CONFIG, SMALL, launched
from tests.lib.refusals import refusal
from tests.lib.sets import matrix, params
from torchtitan_cad.integration.torchtitan_v0_2.manager import CadConfigManager
from torchtitan_cad.tools.doctor.examine import examine

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


SAVED = (
    "--checkpoint.enable --checkpoint.interval=1 validate_often --validation.dataset=python_stdlib_validation "
    "--validation.seq_len=256 --validation.local_batch_size=2"
)
BASES = (
    "",
    SAVED,
    "stages2 cad1f1b rows4",
    "tp2 ac_op halves",
    "ep2 --model.name=deepseek_v3 --model.flavor=debugmodel --profiling.enable_profiling --profiling.profile_freq=2 "
    "--profiling.profiler_warmup=1",
    f"{SAVED} --parallelism.no-cad",
)
SHORT = (
    "--training.dataset=synthetic --training.dataset_path=lognormal:median=100,sigma=1,max=256,seed=1 "
    "--training.seq_len=256 --training.steps=2 --lr_scheduler.warmup_steps=1"
)
VALUES: dict[Any, Sequence[Any]] = {
    bool: (True, False),
    int: (-7, -2, -1, 0, 1, 2, 3, 5, 64, 1000, 2**31, 2**63),
    float: (-1.0, 0.0, 0.5, 1.0, 2.0, 1e30, math.inf, math.nan),
    str: ("", "x", "none/none", "/proc/none", "a" * 300, "2", "0", "op", "fixed:64"),
}
LARGEST = {
    "num_workers": 5,
    "steps": 5,
    "seq_len": 1000,
    "local_batch_size": 64,
    "global_batch_size": 64,
}
"""By the last part of a key: values above it are right, and take a test's time or the machine's memory."""
LEFT_OUT = (
    "job.config_file",
    "job.custom_config_module",
    "experimental.custom_args_module",
    "quantize.",
)


def job_keys(config_cls, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key with its type, but for those that name the file or modules."""
    for field in dataclasses.fields(config_cls):
        key = prefix + field.name
        if dataclasses.is_dataclass(field.type):
            yield from job_keys(field.type, f"{key}.")
        elif not key.startswith(LEFT_OUT):
            yield key, field.type


def draw_value(rng: Random, kind):
    """Draw a value of a type, which is at times out of bounds."""
    kinds = [kind for kind in get_args(kind) if kind is not NoneType]
    if get_origin(kind) is Literal:
        return rng.choice([*kinds, "x"])
    if get_origin(kind) is list:
        return [draw_value(rng, kinds[0]) for _ in range(rng.randrange(3))]
    return draw_value(rng, rng.choice(kinds)) if kinds else rng.choice(VALUES[kind])


def draw_option(rng: Random) -> list[str]:
    config_cls = CadConfigManager()._maybe_add_custom_config([], None)
    key, kind = rng.choice(list(job_keys(config_cls)))
    section, _, name = key.rpartition(".")
    value = draw_value(rng, kind)
    while name in LARGEST and value > LARGEST[name]:
        value = draw_value(rng, kind)
    if isinstance(value, bool):
        return [f"--{key}" if value else f"--{section}.no-{name}"]
    if isinstance(value, list):
        return [f"--{key}", *map(str, value)]
    return [f"--{key}={value}"]


RNG = Random(4)
CASES = [(base, *draw_option(RNG)) for base in BASES]
CASES += [("", "--cad.planner=foo"), ("", "--training.dataset=c4_test")]


@matrix
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_doctor_says_what_training_does(case, tmp_path, monkeypatch):
    """Of jobs of which one key is changed, at random: what doctor fails ends training in one line."""
    monkeypatch.chdir(tmp_path)
    base, *changed = case
    args = [*options(f"{SHORT} {base}"), *changed]
    findings = examine([*job_files(CONFIG, tmp_path), *SMALL, *args], ranks_per_host=2)
    fails = any(finding.level == "FAIL" for finding in findings)
    with launched(args, tmp_path) as training:
        returncode, _ = training.finish(240)
    said = "\n".join(training.lines)
    assert returncode == (2 if fails else 0), said
    assert sum(line.startswith("error: ") for line in training.lines) == fails, said
    assert "Traceback" not in said
    assert len(training.lines) < 15 or not fails, said
