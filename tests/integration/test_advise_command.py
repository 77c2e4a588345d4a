# SPDX-License-Identifier: BSD-3-Clause
"""``torchtitan-cad advise``: verdicts, settings that the job's own checks accept, and what is wrong with inputs."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.lib.sets import CONFIGS, every_config
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu
from torchtitan_cad.tools.main import main

enable_cpu()

from torchtitan_cad.integration.torchtitan_v0_2.checks import validate  # noqa: E402
from torchtitan_cad.tools.simulated_job import read_simulated_job  # noqa: E402

ONE_NODE = [str(CONFIGS / "llama3_8b_8gpus.toml"), "--ranks=8", "--batches=1"]


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
def test_every_configuration_gets_advice_that_validates(
    config: Path, tmp_path: Path, capsys
) -> None:
    advice = advise([str(config), "--batches=1", "--ranks=16"], tmp_path)
    job = read_simulated_job([f"--job.config_file={config}"], 16)
    values = pasted(advice)
    assert values == {
        key: value for key, value in advice["keys"].items() if value is not None
    }
    recommended = job.changed(values)
    if recommended.parallelism.cad:
        validate(recommended, job.cluster.ranks)
    printed = capsys.readouterr().out
    assert printed.startswith(advice["verdict"])
    assert "net: 4e+10 (default)" in printed
    assert (
        advice["recommended"]["memory_bytes"] <= advice["inputs"]["cluster"]["memory"]
    )
    # whose layers take less than an exchange
    assert advice["worth_it"] or config.stem == "llama3_debug_cpu"
    assert values.get("parallelism.cad", True) == advice["worth_it"]
    if advice["worth_it"]:
        assert (
            advice["recommended"]["seconds_per_step"]
            <= advice["job_as_written"]["seconds_per_step"]
        )


def test_keys_without_cad_are_those_of_the_verdict(tmp_path: Path) -> None:
    small = [
        "--ranks=8",
        "--batches=1",
        "--training.seq_len=2048",
        "--activation_checkpoint.mode=full",
    ]
    advice = advise(
        [str(CONFIGS / "llama3_debug_cpu.toml"), "--model.flavor=debugmodel", *small],
        tmp_path,
    )
    assert advice["recommended"] == advice["without_cad"]["at_its_best"]
    assert pasted(advice) == {
        "parallelism.cad": False,
        "activation_checkpoint.mode": "none",
    }


@pytest.mark.matrix
def test_all_batches_that_are_given_count(tmp_path: Path, capsys) -> None:
    documents = tmp_path / "batches.json"
    documents.write_text(json.dumps([[[2048]] * 2] * 4))
    job = str(CONFIGS / "llama3_debug_cpu.toml")
    advise(
        [
            job,
            "--model.flavor=debugmodel",
            "--ranks=2",
            "--training.seq_len=2048",
            f"--documents={documents}",
        ],
        tmp_path,
    )
    assert capsys.readouterr().out.splitlines()[0].endswith("means of 4 steps")


def test_what_fits_no_memory_is_not_recommended(tmp_path: Path, capsys) -> None:
    advice = advise([*ONE_NODE, "--memory=1e9"], tmp_path)
    assert "not worth it: nothing that was tried fits" in capsys.readouterr().out
    assert pasted(advice) == {"parallelism.cad": False}
    tight = advise([*ONE_NODE, "--memory=58e9"], tmp_path)
    assert tight["job_as_written"]["seconds_per_step"] is None
    assert tight["recommended"]["memory_bytes"] <= 58e9
    assert pasted(tight)["activation_checkpoint.mode"] == "full"


def test_degrees_keep_the_tokens_of_a_step() -> None:
    batch = ["--training.local_batch_size=4", "--training.global_batch_size=64"]
    args = [
        f"--job.config_file={ONE_NODE[0]}",
        *batch,
        "--parallelism.data_parallel_shard_degree=8",
    ]
    job = read_simulated_job(args, 8)
    now = job.configuration
    assert now.microbatches == 2
    assert job.keys(now) == {}
    kept = job.keys(replace(now, checkpointing="linear"))
    assert kept == {
        "activation_checkpoint.mode": "full",
        "cad.recompute_attention": False,
    }
    other = read_simulated_job(
        [f"--job.config_file={CONFIGS / 'llama3_8b_long.toml'}"], 8
    )
    assert other.configuration.checkpointing == "linear"
    assert other.keys(replace(other.configuration, checkpointing="full")) == {
        "cad.recompute_attention": True
    }
    for choice in (
        {"cp": 2},
        {"pp": 2, "microbatches": 4},
        {"cp": 4, "pp": 2, "microbatches": 8},
        {"cp": 2, "microbatches": 1},
    ):
        other = job.changed(job.keys(replace(now, **choice)))
        validate(other, 8)
        dp = other.parallelism.data_parallel_shard_degree
        assert dp * choice.get("cp", 1) * choice.get("pp", 1) == 8
        assert other.training.global_batch_size == 64
        assert 64 % (dp * other.training.local_batch_size) == 0
        if "pp" in choice:
            per_rank = (
                other.training.local_batch_size
                // other.parallelism.pipeline_parallel_microbatch_size
            )
            assert per_rank == choice["microbatches"]


@pytest.mark.parametrize("placement", ["auto", "balanced"])
def test_placement_is_a_setting_of_the_job(placement: str) -> None:
    job = read_simulated_job(
        [f"--job.config_file={ONE_NODE[0]}", f"--cad.placement={placement}"], 8
    )
    now = job.configuration
    assert now.placement == "balanced"
    other = job.keys(replace(now, placement="loader"))
    assert other == {"cad.placement": "loader"}
    kept = read_simulated_job(
        [f"--job.config_file={ONE_NODE[0]}", "--cad.placement=loader"], 8
    )
    assert kept.keys(now) == {"cad.placement": "auto"}
    assert job.changed(other).cad.placement == "loader"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "Missing from torchtitan-cad advise"),
        (
            [*ONE_NODE, "--cp=2"],
            "--cp: advice is for the job itself; set --parallelism.context_parallel_degree",
        ),
        (
            [*ONE_NODE, "--model=llama-8b"],
            "--model: advice is for the job itself; set --model.flavor instead",
        ),
        (
            [*ONE_NODE, "--kv-heads=8"],
            "--kv-heads: advice is for the job itself; set --model.flavor instead",
        ),
        (
            [*ONE_NODE, "--dtype-bytes=4"],
            "--dtype-bytes: advice is for the job itself; set --training.mixed_precis",
        ),
        ([*ONE_NODE, "--training.global_batch_size=12"], "global_batch_size"),
        ([*ONE_NODE, "--output=/"], "--output /: this is a folder"),
    ],
)
def test_mistakes_are_one_line(args: list[str], message: str, capsys) -> None:
    assert main(["advise", *args]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
