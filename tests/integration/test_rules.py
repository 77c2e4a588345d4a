# SPDX-License-Identifier: BSD-3-Clause
"""What the whole job refuses, and whether doctor says what training does."""

import re

import pytest

from tests.lib.jobs.compositions import options
from tests.lib.jobs.harness import job_files, parse_job
from tests.lib.jobs.launched import CONFIG, SMALL, launched
from tests.lib.refusals import refusal
from tests.lib.sets import matrix, params
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
    "checkpoint.initial_load_in_hf_quantized",
    "checkpoint.create_seed_checkpoint",
    "job.save_config_file=/dev/null/x",
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
        parse_job(tmp_path, cad, "--checkpoint.enable", f"--{option}")
    assert "\n" not in str(error.value)


SHORT = (
    "--training.dataset=synthetic --training.dataset_path=lognormal:median=100,sigma=1,max=256,seed=1 "
    "--training.seq_len=256 --training.steps=2 --lr_scheduler.warmup_steps=1"
)
SAVED = (
    "--checkpoint.enable --checkpoint.interval=1 validate_often --validation.dataset=python_stdlib_validation "
    "--validation.seq_len=256 --validation.local_batch_size=2"
)
STOCK = f"{SAVED} --parallelism.no-cad"
PIPELINE = "stages2 cad1f1b rows4"
TENSORS = "tp2 ac_op halves"
EXPERTS = (
    "ep2 --model.name=deepseek_v3 --model.flavor=debugmodel --profiling.enable_profiling --profiling.profile_freq=2 "
    "--profiling.profiler_warmup=1"
)
CHANGED = [
    "--parallelism.expert_tensor_parallel_degree=-1",
    "--cad.planner=foo",
    "--training.dataset=c4_test",
    f"{SAVED} --profiling.save_memory_snapshot_folder={'a' * 300}",
    f"{SAVED} --optimizer.lr=2.0",
    f"{STOCK} --validation.dataloader.persistent_workers",
    f"{STOCK} --metrics.save_for_all_ranks",
    f"{PIPELINE} --validation.dataloader.no-pin_memory",
    f"{PIPELINE} --training.global_batch_size=-2",
    f"{TENSORS} --compile.components op",
    f"{TENSORS} --model.name=",
    f"{EXPERTS} --compile.no-enable",
    f"{EXPERTS} --checkpoint.create_seed_checkpoint",
]
"""Jobs that train, of which one key has another value, drawn at random from all keys."""


@matrix
@pytest.mark.parametrize("words", CHANGED)
def test_doctor_says_what_training_does(words, tmp_path):
    """What doctor fails ends training in one line, of the same key."""
    args = options(f"{SHORT} {words}")
    findings = examine([*job_files(CONFIG, tmp_path), *SMALL, *args], ranks_per_host=2)
    keys = [finding.text.split()[0] for finding in findings if finding.level == "FAIL"]
    with launched(args, tmp_path) as training:
        returncode, _ = training.finish(240)
    said = "\n".join(training.lines)
    assert returncode == (2 if keys else 0), said
    assert re.findall(r"^error: ([\w.]+)", said, re.MULTILINE) == keys, said
    assert "Traceback" not in said
    assert len(training.lines) < 15 or not keys, said
