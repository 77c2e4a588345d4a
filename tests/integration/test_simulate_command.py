# SPDX-License-Identifier: BSD-3-Clause
"""``torchtitan-cad simulate``: jobs, numbers, and what is wrong with them."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.lib.jobs.simulated import read_job
from tests.lib.sets import CONFIGS, matrix
from torchtitan_cad.integration.report.steps_file import DOCUMENTS_NAME
from torchtitan_cad.tools.main import main
from torchtitan_cad.tools.options import Options, read_inputs
from torchtitan_cad.tools.simulated_job import build_on_meta
from torchtitan_cad.tools.simulation.inputs import OPEN

SMALL = [
    "--ranks=8", "--layers=2", "--hidden=512", "--heads=4", "--kv-heads=2", "--head-dim=128", "--ffn=1024",
    "--vocabulary=512", "--tokens-per-rank=8192", "--batches=2", "--documents=lognormal:median=2000,sigma=1",
]  # fmt: skip
JOB = CONFIGS / "llama3_8b_8gpus.toml"
LLAMA = str(CONFIGS / "llama3_8b.toml")


def simulate(folder: Path, *args: str) -> dict[str, Any]:
    """What the command writes to a file."""
    output = folder / "out.json"
    assert main(["simulate", *args, f"--output={output}"]) == 0
    return json.loads(output.read_text())


@pytest.mark.parametrize(
    ("name", "flavor", "kinds"),
    [
        ("llama4", "17bx16e_irope", {"full": 12, "chunked": 36}),
        ("deepseek_v3", "671B", {"full": 61}),
    ],
)
def test_every_model_is_known(name, flavor, kinds):
    """Its parameters, all and those of a token, are those that torchtitan counts, but for routers, norms and biases."""
    from torchtitan.protocols.train_spec import get_train_spec

    options = f"--model.name={name}", f"--model.flavor={flavor}"
    job = read_job("llama3_8b", *options, "--parallelism.expert_parallel_degree=8")
    model = job.inputs.model
    assert {kind.name: kind.layers for kind in model.attention} == kinds
    args = copy.deepcopy(get_train_spec(name).model_args[flavor])
    args.attn_type = "sdpa"
    args.moe_impl = "standard"
    every, flops = args.get_nparams_and_flops(build_on_meta(job.config, args), 0)
    active = model.layers * model.layer_parameters + model.hidden * model.vocabulary
    assert (model.parameters, 6 * active) == pytest.approx((every, flops), rel=0.01)
    assert model.expert_ranks == 4  # with TP's two: the 8 ranks of expert parallelism


WRITTEN = [
    "--cad.placement=balanced",
    "--cad.tolerance=0.05",
    "--cad.receive_buffer_gb=0.5",
    "--activation_checkpoint.mode=full",
    "--training.mixed_precision_param=float32",
]
OF_TRAINING = {"dtype_bytes": 4, "checkpointing": "full"}
DIVIDED = [
    "--parallelism.context_parallel_degree=2",
    "--parallelism.tensor_parallel_degree=2",
]
OF_JOB = {
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "dtype_bytes": 2,
    "pp": 1,
    "cp": 2,
    "checkpointing": "selective",
    "ranks": 64,
    "tp": 2,
    "fsdp": True,
    "replicas": 1,
    "row_tokens": 16384,
    "step_tokens": 16 * 16384,
}
UNSHARDED = "--parallelism.data_parallel_shard_degree=1"
REPLICATED = [UNSHARDED, "--parallelism.data_parallel_replicate_degree=64"]
# As FSDP2 does over both.
SHARDED_BY_CP = [UNSHARDED, "--parallelism.context_parallel_degree=64"]


@pytest.mark.parametrize(
    ("args", "options", "expected"),
    [
        ([], {}, {"placement": "balanced", "backward": "auto", "tolerance": "auto"}),
        (
            WRITTEN,
            {"placement": "loader", "backward": "resend"},
            {
                **OF_TRAINING,
                "placement": "loader",
                "tolerance": 0.05,
                "receive_buffer_gb": 0.5,
            },
        ),
        # Another model leaves what the job says of training.
        (WRITTEN, {"model": "llama-34b"}, {**OF_TRAINING, "layers": 48}),
        (DIVIDED, {}, OF_JOB),
        (REPLICATED, {}, {"fsdp": False}),
        (SHARDED_BY_CP, {}, {"fsdp": True, "replicas": 1}),
        ([], {"ranks": 8, "microbatches": 4}, {"step_tokens": 4 * 8 * 16384}),
    ],
)
def test_settings_come_from_the_job_and_options_replace_them(args, options, expected):
    inputs = read_inputs(JOB, args, Options(**options))[0]
    found = vars(inputs.model) | vars(inputs.configuration)
    found |= vars(inputs.cluster) | vars(inputs.documents)
    assert expected.items() <= found.items()


WITHOUT_JOB = Options(ranks=8, model="llama-8b", pp=1)


@pytest.mark.parametrize(
    ("job", "options", "expected"),
    [
        (JOB, Options(), OPEN - {"pp", "checkpointing"}),
        (JOB, Options(nano_batches=1, cp=1), {"microbatches", "schedule", "placement"}),
        (None, WITHOUT_JOB, OPEN - {"pp"}),
    ],
    ids=["job", "options", "no job"],
)
def test_systems_choose_what_neither_the_job_nor_an_option_says(job, options, expected):
    assert read_inputs(job, (), options)[0].open == expected


def test_a_job_is_told_how_to_take_the_best_settings(tmp_path, capsys):
    """By the last line, as in the file; another job with them has the settings of cad."""
    job = [str(JOB), "--ranks=8", "--batches=1"]
    written = simulate(tmp_path, *job)
    settings = written["settings"]
    assert settings
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    told = f"cad: the job takes these settings with {', '.join(lines)}"
    assert told in capsys.readouterr().out.splitlines()
    options = [f"--{key}={value}" for key, value in settings.items()]
    changed = vars(read_job(JOB.stem, *options, ranks=8).inputs.configuration)
    wanted = written["systems"]["cad"]["configuration"]
    assert wanted.items() <= changed.items()


def test_checkpointing_and_placement_are_set_by_keys_of_the_job():
    job = read_job("llama3_8b_8gpus", ranks=8)
    written = job.inputs.configuration
    assert job.settings(written) == {}
    other = replace(written, checkpointing="linear", placement="loader")
    assert job.settings(other) == {
        "activation_checkpoint.mode": "full",
        "cad.recompute_attention": False,
        "cad.placement": "loader",
    }
    linear = read_job("llama3_8b_long", "--cad.placement=loader", ranks=8)
    full = replace(
        linear.inputs.configuration, checkpointing="full", placement="balanced"
    )
    assert linear.settings(full) == {
        "cad.recompute_attention": True,
        "cad.placement": "auto",
    }


@pytest.mark.parametrize(("cp", "pp", "microbatches"), [(2, 1, 1), (4, 2, 8)])
def test_degrees_keep_the_tokens_of_a_step(cp, pp, microbatches):
    written = [
        "--training.local_batch_size=4",
        "--training.global_batch_size=64",
        "--parallelism.data_parallel_shard_degree=8",
    ]
    job = read_job("llama3_8b_8gpus", *written, ranks=8)
    asked = job.inputs.configuration
    choice = replace(asked, cp=cp, pp=pp, microbatches=microbatches)
    options = [f"--{key}={value}" for key, value in job.settings(choice).items()]
    other = read_job("llama3_8b_8gpus", *written, *options, ranks=8)
    assert other.config.parallelism.data_parallel_shard_degree * cp * pp == 8
    assert other.inputs.documents.step_tokens == job.inputs.documents.step_tokens
    found = other.inputs.configuration
    assert (found.cp, found.pp) == (cp, pp)
    if pp > 1:
        assert found.microbatches == microbatches


def test_synthetic_documents_are_the_jobs_own():
    data = ["--training.dataset=synthetic", "--training.dataset_path=fixed:300,200"]
    assert set(read_job("llama3_8b", *data).inputs.documents.lengths.tolist()) == {
        200,
        300,
    }


def test_numbers_without_a_job(tmp_path, capsys):
    inputs = simulate(tmp_path, *SMALL, "--cp=1", "--pp=1")["inputs"]
    assert inputs["cluster"]["ranks"] == 8
    assert inputs["configuration"]["placement"] == "balanced"
    assert inputs["configuration"]["tolerance"] == "auto"
    assert "of perfect" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "batches"),
    [([8192], 2), pytest.param([[[1024, 7168]] * 8], 1, marks=matrix)],
    ids=["lengths", "batches"],
)
def test_documents_from_a_file(content, batches, tmp_path):
    path = tmp_path / "documents.json"
    path.write_text(json.dumps(content))
    written = simulate(tmp_path, *SMALL, f"--documents={path}", "--placement=loader")
    assert written["inputs"]["documents"]["batches"] == batches
    assert written["step_tokens"] == 8 * 8192
    assert written["systems"]["cad"]["share_of_perfect"] == pytest.approx(1)


def recorded(folder: Path, *lines: object) -> Path:
    """A dump folder with these lines in its record."""
    path = folder / DOCUMENTS_NAME
    path.parent.mkdir()
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


STEP = {
    "version": 1, "step": 1, "ranks": 2, "row_tokens": 8192,
    "microbatches": [[[[8192]], [[4096, 4096]]], [[[8192]], [[4096, 4096]]]],
}  # fmt: skip
"""Two microbatches with a long document on the first rank and two short ones on the second."""


@pytest.mark.parametrize(("most", "count"), [(1, 1), (10, 2)])
def test_recorded_steps_are_simulated_as_they_were(most, count, tmp_path):
    """On the job's number of ranks and in its microbatches. The long document has 2080 tiles, the others 1056."""
    even = {**STEP, "step": 2, "microbatches": [[[[8192]], [[8192]]]] * 2}
    dump = recorded(tmp_path, even, STEP, {**STEP, "step": 2})
    _ranks, *small = SMALL
    options = [f"--documents={dump}", "--pp=1", "--cp=1", f"--batches={most}"]
    written = simulate(tmp_path, *small, *options)
    assert written["inputs"]["documents"]["batches"] == count
    assert written["inputs"]["cluster"]["ranks"] == 2
    assert written["step_tokens"] == 4 * 8192
    systems = written["systems"]
    imbalance = {name: system["max_over_mean"] for name, system in systems.items()}
    assert imbalance["packed"] == pytest.approx(2080 / ((2080 + 1056) / 2))
    assert imbalance["reorder"] == pytest.approx(1)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"ranks": "2"},
        {"row_tokens": 4096},
        {"microbatches": [[[[8193, -1]]]]},
        {"microbatches": [[[[8192]]], [[[8192]]] * 2]},
        {"microbatches": [[[[8192]]], []]},
    ],
)
def test_what_is_no_record_is_one_line(change, tmp_path, refused):
    dump = recorded(tmp_path, {**STEP, **change})
    refused("simulate", *SMALL, f"--documents={dump}")


def test_folders_without_a_record(tmp_path, refused):
    refused("simulate", *SMALL, f"--documents={tmp_path}")
    dump = tmp_path / "job"
    dump.mkdir()
    refused("simulate", *SMALL, f"--documents={recorded(dump)}")


@pytest.mark.parametrize(
    "args",
    [
        ["nothing.toml"],
        [],
        ["--ranks=8"],
        ["--ranks=8", "--model=gpt"],
        [*SMALL, "--net=40"],
        [*SMALL, "--latency=20"],
        [*SMALL, "--memory=141"],
        [*SMALL, "--memory-bandwidth=3.35"],
        [*SMALL, "--linear-flops=615"],
        [*SMALL, "--documents=zipf"],
        [*SMALL, "--documents=lognormal:mean=3"],
        [*SMALL, "--documents=none.json"],
        [*SMALL, "--row-tokens=1000"],
        [LLAMA, "--ranks=3"],
        [LLAMA, "--training.seqlen=3"],
    ],
)
def test_mistakes_are_one_line(args, refused):
    refused("simulate", *args)


@pytest.mark.parametrize(
    "content", ["[]", '[5, "abc"]', "[[5, -1]]", "[[8192], [4096]]"]
)
def test_lengths_that_are_none_are_named(content, tmp_path, refused):
    path = tmp_path / "lengths.json"
    path.write_text(content)
    refused("simulate", *SMALL, f"--documents={path}")
