# SPDX-License-Identifier: BSD-3-Clause
"""The table of rules over a job's keys, and whether doctor says what training does."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib.jobs.harness import tokenizer_folder
from tests.lib.refusals import refusal
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu

enable_cpu()

from torchtitan.config import JobConfig  # noqa: E402

from torchtitan_cad import job_config  # noqa: E402
from torchtitan_cad.integration.torchtitan_v0_2 import rules  # noqa: E402
from torchtitan_cad.integration.torchtitan_v0_2.manager import CadConfigManager  # noqa: E402
from torchtitan_cad.tools.doctor.examine import examine  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[2]
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


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.key)
def test_a_rule_accepts_its_default_and_refuses_something(rule):
    config = CadConfigManager._merge_configs(JobConfig, job_config.JobConfig)()
    default = rules.read_key(config, rule.key)
    assert rule.accepts(default) or not rule.applies(config)
    kind = type(default)
    comparable = [
        value
        for value in WRONG
        if kind in (type(value), type(None)) or isinstance(value, kind | int)
    ]
    refused = []
    for value in comparable:
        try:
            refused.append(not rule.accepts(value))
        except (
            TypeError,
            AttributeError,
        ):
            # of another type, which the config's types refuse
            refused.append(False)
    packaged = rule.remedy.startswith("needs the package")
    assert any(refused) or packaged, "no value of this key breaks the rule"


@pytest.mark.parametrize("cad", ["--parallelism.cad", "--parallelism.no-cad"])
@pytest.mark.parametrize("option", BROKEN)
def test_a_broken_rule_is_one_line_with_cad_and_without(
    option, cad, tmp_path, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    key, _, value = option.partition("=")
    with refusal(key, value if value != "x" else None) as error:
        parse_stock(cad, f"--{option}")
    assert "\n" not in str(error.value)


def parse_stock(*options: str) -> JobConfig:
    assets = f"--model.hf_assets_path={tokenizer_folder()}"
    return CadConfigManager().parse_args(
        [assets, "--training.local_batch_size=2", *options]
    )


@pytest.mark.matrix
def test_doctor_says_what_training_does():
    command = [
        sys.executable,
        "-m",
        "tests.doctor_against_training",
        "--count",
        "8",
        "--seed",
        "7",
    ]
    result = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=1200
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(("documents", "ranks"), [(1, 2), (3, 4), (2, 8)])
def test_fewer_documents_than_ranks_are_named(documents, ranks, tmp_path):
    (tmp_path / "text.json").write_text('{"text": "a document"}\n' * documents)
    assets = f"--model.hf_assets_path={tokenizer_folder()}"
    data = ["--training.dataset=c4_test", f"--training.dataset_path={tmp_path}", assets]
    options = [
        *data,
        "--parallelism.cad",
        f"--job.dump_folder={tmp_path}",
        "--training.local_batch_size=1",
    ]
    findings = {finding.check: finding for finding in examine(options, ranks)}
    wanted = f"it has fewer documents than the {ranks} data-parallel ranks, .*; set a larger one, or fewer ranks"
    assert findings["dataset"].level == "FAIL"
    assert re.search(
        rf"training\.dataset = 'c4_test' at training\.dataset_path = .*: {wanted}",
        findings["dataset"].text,
    )


def test_doctor_looks_at_a_part_of_a_large_batch():
    rows = ["--training.seq_len=1048576", "--training.local_batch_size=4"]
    data = ["--training.dataset=synthetic", "--training.dataset_path=fixed:5000"]
    options = [
        *data,
        *rows,
        f"--model.hf_assets_path={tokenizer_folder()}",
        "--parallelism.cad",
    ]
    findings = {finding.check: finding for finding in examine(options, 2)}
    text = findings["dataset"].text
    assert text.startswith(
        "synthetic: documents in the first 65536 tokens of rank 0: 14"
    )
    assert text.endswith("; a batch of its has 4194304")
