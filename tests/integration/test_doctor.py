# SPDX-License-Identifier: BSD-3-Clause
"""``torchtitan-cad doctor``: every check with a job that passes and one that fails; and a new user's first run."""

import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torchtitan.protocols.train_spec as titan_specs

from tests.lib.fake_flash_attn import install
from tests.lib.jobs.compositions import options
from tests.lib.sets import CONFIGS
from torchtitan_cad.runtime.transport import build
from torchtitan_cad.tools.doctor import examine as doctor
from torchtitan_cad.tools.doctor import sample
from torchtitan_cad.tools.doctor.examine import Finding, examine
from torchtitan_cad.tools.main import main
from torchtitan_cad.tools.prepare.tokenizer import prepare_tokenizer

DEBUG_TOML = Path(__file__).with_name("debug_model.toml")
SYNTHETIC = [
    "--training.dataset=synthetic",
    "--training.dataset_path=lognormal:median=500,sigma=1,max=2048,seed=1",
]
CHECKPOINT = "--checkpoint.enable"


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    return prepare_tokenizer(tmp_path_factory.mktemp("assets"), kind="bytes")


@pytest.fixture
def job(tmp_path) -> Path:
    """The debug job with the key and the switch, as the README says."""
    key = '[job]\ncustom_config_module = "torchtitan_cad.job_config"\n'
    text = DEBUG_TOML.read_text().replace("[job]\n", key)
    path = tmp_path / "job.toml"
    path.write_text(text.replace("[parallelism]\n", "[parallelism]\ncad = true\n"))
    return path


@pytest.fixture
def dump(tmp_path) -> Path:
    return tmp_path / "outputs"


@pytest.fixture
def good(job, assets, dump) -> list[str]:
    """Arguments of a job in which nothing fails."""
    return [
        f"--job.config_file={job}",
        f"--model.hf_assets_path={assets}",
        f"--job.dump_folder={dump}",
        *SYNTHETIC,
    ]


def report(
    args: list[str], ranks_per_host: int | None = 2, num_hosts: int = 1
) -> dict[str, Finding]:
    findings = list(examine(args, ranks_per_host, num_hosts))
    by_check = {finding.check: finding for finding in findings}
    assert len(by_check) == len(findings)
    assert all("\n" not in str(finding) for finding in findings)
    return by_check


def failed(findings: dict[str, Finding]) -> list[str]:
    return [name for name, finding in findings.items() if finding.level == "FAIL"]


def assert_says(findings: dict[str, Finding], check: str, text: str) -> None:
    """``text`` is an expression, in which the level comes first if it is not "ok"."""
    level = text if text.startswith(("FAIL", "note", "skip")) else f"ok.*{text}"
    assert re.match(level, str(findings[check])), findings[check]


def test_a_good_job_passes_every_check(good, dump):
    model_class = titan_specs.get_train_spec("llama3").model_cls
    findings = report([*good, CHECKPOINT])
    assert titan_specs.get_train_spec("llama3").model_cls is model_class
    assert list(findings) == list(doctor.CHECKS)
    assert failed(findings) == []
    assert findings["validation"].level == "skip"
    wanted = {
        "config": "llama3 debugmodel on 2 ranks, 10 steps of 8 x 2048 tokens",
        "cad": "1 x 2 ranks balance attention: pipeline parallel 1 x data parallel 2 x context parallel 1",
        "model": "6,163,712 parameters, 6 layers, 16 query heads; attention stays inside documents, which",
        "tokenizer": "257 tokens of the model's 2048, a document ends after EOS = 0",
        "dataset": "synthetic: documents in the first 16384 tokens of rank 0: ",
        "kernel": "cpu .cad.kernel = 'auto': the one for CPU ranks., torch.bfloat16, 16 query and 16 key heads of 16",
        "transport": "collective .cad.transport = 'auto': not symm_mem: it needs CUDA devices",
        "planner": "local_search, tolerance auto, shards of 128 tokens; nano_batches = 1, streams opaque",
        "checkpoint": "outputs/checkpoint: begins anew; a checkpoint takes about 74.0 MB",
    }
    for check, text in wanted.items():
        assert_says(findings, check, text)
    assert not dump.exists()


def test_without_measuring(good, monkeypatch):
    """Kernels are taken as the job will."""
    modes = []
    choose_kernel = doctor.choose_kernel

    def choose(*args, **options):
        modes.append(torch.are_deterministic_algorithms_enabled())
        return choose_kernel(*args, **options)

    monkeypatch.setattr(doctor, "choose_kernel", choose)
    findings = report([*good, "--debug.deterministic"])
    assert_says(findings, "planner", "tolerance 0.02, shards")
    assert modes == [True]
    assert not torch.are_deterministic_algorithms_enabled()


SAID: list[tuple[str, tuple[int | None, int], dict[str, str]]] = [
    (
        "--cad.planner=foo --model.hf_assets_path=none --training.dataset=c5",
        (2, 1),
        {
            "config": r"FAIL.*cad\.planner = 'foo'.*set",
            "tokenizer": r"FAIL.*model\.hf_assets_path = 'none': no such folder; .*`torchtitan-cad prepare",
            "dataset": r"FAIL.*training\.dataset = 'c5' is not a dataset; set .* one of c4, .*python_stdlib.*, synth",
        },
    ),
    (
        "--model.hf_assets_path={big} --training.dataset=c4_test --training.dataset_path=no/such/data "
        "--validation.enable --validation.dataset=c4_test --cad.kernel=flash_attn "
        "--checkpoint.enable --checkpoint.load_step=7",
        (2, 1),
        {
            "tokenizer": "FAIL.*has 2100 tokens, model.flavor = 'debugmodel' only 2048",
            "dataset": r"FAIL.*training\.dataset = 'c4_test' at no/such/data: .*; set .*_path to",
            "validation": r"FAIL.*validation\.dataset = 'c4_test' at tests/assets/c4_test: .*python_stdlib_validation",
            "kernel": r"FAIL.*cad\.kernel = 'flash_attn' does not run on cpu tensors; set",
            "checkpoint": r"FAIL.*checkpoint\.load_step = 7: there is no .*step-7",
        },
    ),
    (
        "stages2 cad1f1b --parallelism.pipeline_parallel_layers_per_stage=1 "
        "--checkpoint.enable --checkpoint.initial_load_path=none --checkpoint.folder=new",
        (2, 1),
        {
            "config": "FAIL.*layers_per_stage = 1: 8 stages.*needs exactly 2",
            "checkpoint": r"FAIL.*checkpoint\.initial_load_path = 'none': there is no .metadata",
        },
    ),
    # Heads over ranks, and checkpoints into a folder.
    (
        "--model.flavor=debugmodel_cpu tp4 --checkpoint.enable --job.dump_folder={big}/tokenizer.json/outputs",
        (4, 1),
        {
            "model": "FAIL.*tensor_parallel_degree = 4 does not divide the . key heads",
            "checkpoint": "FAIL.*cannot write to",
        },
    ),
    (
        "cp2",
        (None, 1),
        {
            "config": "FAIL +config +--nproc: set it to the ranks per node, as torchrun's"
        },
    ),
    (
        "tp2 stages2",
        (8, 2),
        {"cad": "4 x 4 ranks.*: pipeline parallel 1 x data parallel 4"},
    ),
    (
        "tp2 stages2 cad1f1b",
        (8, 2),
        {"cad": "2 x 8 ranks.*: pipeline parallel 2 x data parallel 4"},
    ),
    (
        "--parallelism.no-cad",
        (2, 1),
        {"cad": "note", "kernel": "skip", "transport": "skip", "planner": "skip"},
    ),
    ("--parallelism.no-cad tp2", (3, 1), {"config": "FAIL"}),
    (
        "--cad.shadow compile tp2",
        (4, 1),
        {
            "model": "attention stays inside rows$",
            "cad": "note.*torchtitan attends",
            "kernel": "skip",
        },
    ),
    # CAD does what torchtitan does not.
    (
        "--cad.shadow --model.flavor=debugmodel_varlen_attn cp2",
        (4, 1),
        {"model": "FAIL"},
    ),
]
"""Options, ranks of a host and hosts, and what checks say: all that fail, each for reasons of its own, and some others.
test_mistakes.py has what reading the config finds."""


@pytest.fixture(scope="module")
def big(tmp_path_factory) -> Path:
    """A tokenizer with more tokens than the model has."""
    text = " ".join(f"word{i}" for i in range(9000))
    return prepare_tokenizer(tmp_path_factory.mktemp("big"), 2100, texts=[text])


@pytest.mark.parametrize(("words", "machines", "said"), SAID)
def test_what_is_said_of_a_job(good, dump, big, words, machines, said):
    (dump / "checkpoint").mkdir(parents=True)
    findings = report([*good, *options(words.format(big=big))], *machines)
    for check, text in said.items():
        assert_says(findings, check, text)
    expected = [check for check, text in said.items() if text.startswith("FAIL")]
    assert failed(findings) == expected


def test_a_dataset_that_does_not_answer_and_too_little_space(good, monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(sample, "PATIENCE_S", 0.01)
    monkeypatch.setattr(sample, "open_dataset", lambda *_, **__: answer.wait())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    findings = report([*good, CHECKPOINT])
    answer.set()
    assert_says(findings, "dataset", "note.*no answer")
    text = "FAIL.*a checkpoint takes 74.0 MB, 1.0 MB are free"
    assert_says(findings, "checkpoint", text)


def test_fewer_documents_than_ranks_are_named(good, tmp_path):
    (tmp_path / "text.json").write_text('{"text": "a document"}\n' * 3)
    data = ["--training.dataset=c4_test", f"--training.dataset_path={tmp_path}"]
    text = "FAIL.*(fewer documents than data-parallel ranks|dataset of size 3); set .*_path to where enough"
    assert_says(report([*good, *data], 4), "dataset", text)


def test_where_training_resumes(good, dump):
    step = dump / "checkpoint" / "step-30"
    state = {"norm.weight": torch.zeros(2), "train_state": {"step": 30}}
    dcp.save(state, checkpoint_id=step, no_dist=True)
    # an unfinished one does not count
    (dump / "checkpoint" / "step-40").mkdir()
    (dump / "job.json").touch()
    args = [*good, CHECKPOINT, "--job.save_config_file=job.json"]
    assert_says(report(args), "checkpoint", f"resumes from {step}")


@pytest.fixture
def gpus(monkeypatch) -> None:
    """Let the examination find four GPUs."""
    module = SimpleNamespace(
        device_count=lambda: 4, get_device_name=lambda _: "NVIDIA H100"
    )
    monkeypatch.setattr(doctor.utils, "device_type", "cuda")
    monkeypatch.setattr(doctor.utils, "device_module", module)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: name)
    install(monkeypatch, capability=(9, 0))


CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
LOADING = "CUDA_MODULE_LOADING"


@pytest.mark.usefixtures("gpus")
def test_variables_that_hold_back_a_job_on_gpus(good, monkeypatch):
    job = [*good, *options("stages2")]
    monkeypatch.setenv(CONNECTIONS, "32")
    monkeypatch.setenv(LOADING, "EAGER")
    assert_says(report(job, 4), "environment", "no variable")
    monkeypatch.delenv(LOADING)
    assert_says(report(good, 4), "environment", "no variable")
    monkeypatch.setenv(CONNECTIONS, "1")
    text = "note.*_CONNECTIONS = 1: .* or set it to 32; .*LAZY, the default, with .* = 2: .* set it to EAGER"
    assert_says(report(job, 4), "environment", text)


@pytest.mark.usefixtures("gpus")
def test_on_gpus(good, monkeypatch):
    """As far as it can be seen without one."""
    findings = report(good, ranks_per_host=4)
    assert failed(findings) == []
    assert_says(findings, "device", "4 x NVIDIA H100; torch ")
    text = r"note.*varlen \(cad.kernel = 'auto': FlashAttention-4 .* compute capability 9.0 can do: install"
    assert_says(findings, "kernel", text)
    text = (
        r"expected: symm_mem \(cad.transport = 'auto': .* 2 receive buffers of 325.0 MB"
    )
    assert_says(findings, "transport", text)
    monkeypatch.setattr(build, "_check", lambda name, device: None)
    words = "--cad.transport=nvshmem --training.mixed_precision_param=float32"
    job = [*good, *options(words)]
    findings = report(job, ranks_per_host=8)
    assert_says(findings, "transport", "expected: nvshmem .* 2 receive buffers")
    assert failed(findings) == ["device", "kernel"]
    text = "FAIL.*--nproc 8: this machine has 4 devices; set it to 4 or less$"
    assert_says(findings, "device", text)
    text = "FAIL.*takes bf16 or fp16 queries, got torch.float32; set"
    assert_says(findings, "kernel", text)


def test_a_config_must_be_readable(good, job):
    job.write_text("[cad\n")
    findings = report(good)
    assert list(findings) == ["config"]
    text = "FAIL.*correct that line; every .table. may appear once"
    assert_says(findings, "config", text)


NODES = {"llama3_debug_cpu": (4, 1), "llama3_8b": (8, 8), "llama3_8b_8gpus": (8, 1)}
"""Ranks on each node, and nodes; four nodes of eight ranks suit the other configurations."""


@pytest.mark.parametrize("path", sorted(CONFIGS.iterdir()), ids=lambda path: path.stem)
def test_every_configuration_gets_a_report(path, assets, tmp_path):
    job = [
        f"--job.config_file={path}",
        f"--job.dump_folder={tmp_path}",
        f"--model.hf_assets_path={assets}",
    ]
    findings = report([*job, *SYNTHETIC], *NODES.get(path.stem, (8, 4)))
    assert failed(findings) == []


def test_from_the_command_line(good, job, capsys, refused):
    command = ["doctor", str(job), "--nproc", "2"]
    assert main([*command, *good[1:]]) == 0
    *lines, _ = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == list(doctor.CHECKS)
    assert main([*command, "--", *good[1:], "--cad.planner", "foo"]) == 1
    assert "1 of these would fail" in capsys.readouterr().out
    refused("doctor", "none.toml")
    refused(*command, "--nnodes", "0")
