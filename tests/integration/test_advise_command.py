# SPDX-License-Identifier: BSD-3-Clause
"""``torchtitan-cad advise``: verdicts, settings that the job's own checks accept, and what is wrong with inputs."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.lib.jobs.simulated import read_job
from tests.lib.sets import CONFIGS, every_config
from torchtitan_cad.integration.torchtitan_v0_2.checks import validate
from torchtitan_cad.tools.main import main

ONE_NODE = [str(CONFIGS / "llama3_8b_8gpus.toml"), "--ranks=8", "--batches=1"]
SMALL = [
    str(CONFIGS / "llama3_debug_cpu.toml"),
    "--model.flavor=debugmodel",
    "--training.seq_len=2048",
]


def advise(args: list[str], folder: Path) -> dict[str, Any]:
    output = folder / "advice.json"
    assert main(["advise", f"--output={output}", *args]) == 0
    return json.loads(output.read_text())


def pasted(advice: dict[str, Any]) -> dict[str, Any]:
    """What the printed TOML sets, by key."""
    tables = tomllib.loads(advice["toml"])
    return {
        f"{table}.{key}": value
        for table, values in tables.items()
        for key, value in values.items()
    }


@every_config
def test_every_configuration_gets_advice_that_validates(config, tmp_path, capsys):
    advice = advise([str(config), "--batches=1", "--ranks=16"], tmp_path)
    job = read_job(config.stem, ranks=16)
    values = pasted(advice)
    assert values == {
        key: value for key, value in advice["keys"].items() if value is not None
    }
    recommended = job.changed(values)
    if recommended.parallelism.cad:
        validate(recommended, job.cluster.ranks)
    assert capsys.readouterr().out.startswith(advice["verdict"])
    assert (
        advice["recommended"]["memory_bytes"] <= advice["inputs"]["cluster"]["memory"]
    )
    # whose layers take less than an exchange
    assert advice["worth_it"] or config.stem == "llama3_debug_cpu"
    assert values.get("parallelism.cad", True) == advice["worth_it"]


def test_keys_without_cad_are_those_of_the_verdict(tmp_path, capsys):
    """Of all batches that are given."""
    documents = tmp_path / "batches.json"
    documents.write_text(json.dumps([[[2048]] * 2] * 4))
    job = [*SMALL, "--ranks=2", "--activation_checkpoint.mode=full"]
    advice = advise([*job, f"--documents={documents}"], tmp_path)
    assert capsys.readouterr().out.splitlines()[0].endswith("means of 4 steps")
    assert advice["recommended"] == advice["without_cad"]["at_its_best"]
    assert pasted(advice) == {
        "parallelism.cad": False,
        "activation_checkpoint.mode": "none",
    }


def test_what_fits_no_memory_is_not_recommended(tmp_path, capsys):
    advice = advise([*SMALL, "--ranks=2", "--batches=1", "--memory=1e6"], tmp_path)
    assert "not worth it: nothing that was tried fits" in capsys.readouterr().out
    assert pasted(advice) == {"parallelism.cad": False}
    tight = advise([*ONE_NODE, "--memory=58e9"], tmp_path)
    assert tight["job_as_written"]["seconds_per_step"] is None
    assert tight["recommended"]["memory_bytes"] <= 58e9
    assert pasted(tight)["activation_checkpoint.mode"] == "full"


def test_checkpointing_and_placement_are_set_by_keys_of_the_job():
    job = read_job("llama3_8b_8gpus", ranks=8)
    written = job.configuration
    assert job.keys(written) == {}
    other = replace(written, checkpointing="linear", placement="loader")
    assert job.keys(other) == {
        "activation_checkpoint.mode": "full",
        "cad.recompute_attention": False,
        "cad.placement": "loader",
    }
    linear = read_job("llama3_8b_long", "--cad.placement=loader", ranks=8)
    full = replace(linear.configuration, checkpointing="full", placement="balanced")
    assert linear.keys(full) == {
        "cad.recompute_attention": True,
        "cad.placement": "auto",
    }


@pytest.mark.parametrize(("cp", "pp", "microbatches"), [(2, 1, 1), (4, 2, 8)])
def test_degrees_keep_the_tokens_of_a_step(cp, pp, microbatches):
    job = read_job(
        "llama3_8b_8gpus",
        "--training.local_batch_size=4",
        "--training.global_batch_size=64",
        "--parallelism.data_parallel_shard_degree=8",
        ranks=8,
    )
    changed = replace(job.configuration, cp=cp, pp=pp, microbatches=microbatches)
    other = job.changed(job.keys(changed))
    validate(other, 8)
    local = other.training.local_batch_size
    assert other.parallelism.data_parallel_shard_degree * cp * pp == 8
    assert other.training.global_batch_size == 64
    if pp > 1:
        rows = other.parallelism.pipeline_parallel_microbatch_size
        assert local // rows == microbatches


@pytest.mark.parametrize(
    "args",
    [
        [],
        [*ONE_NODE, "--cp=2"],
        [*ONE_NODE, "--model=llama-8b"],
        [*ONE_NODE, "--dtype-bytes=4"],
        [*ONE_NODE, "--training.global_batch_size=12"],
    ],
)
def test_mistakes_are_one_line(args, refused):
    refused("advise", *args)
