# SPDX-License-Identifier: BSD-3-Clause
"""``torchtitan-cad doctor``: every check with a job that passes and one that fails; and a new user's first run."""

import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.integration.test_resume import FULL, save
from tests.lib.fake_flash_attn import install
from tests.lib.profiles import make_profile
from tests.lib.refusals import refusal
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu
from torchtitan_cad.tools.main import main

enable_cpu()

import torchtitan.distributed.context_parallel as titan_cp  # noqa: E402
import torchtitan.protocols.train_spec as titan_specs  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402

from torchtitan_cad.integration.torchtitan_v0_2 import plugin  # noqa: E402
from torchtitan_cad.planning import AttentionShape  # noqa: E402
from torchtitan_cad.runtime.transport import build  # noqa: E402
from torchtitan_cad.tools.doctor import defects  # noqa: E402
from torchtitan_cad.tools.doctor import examine as doctor  # noqa: E402
from torchtitan_cad.tools.doctor.examine import Finding, examine  # noqa: E402
from torchtitan_cad.tools.prepare.tokenizer import prepare_tokenizer  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[2]
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
    path, text = tmp_path / "job.toml", DEBUG_TOML.read_text()
    for section, line in (
        ("job", 'custom_config_module = "torchtitan_cad.job_config"'),
        ("parallelism", "cad = true"),
    ):
        text = text.replace(f"[{section}]\n", f"[{section}]\n{line}\n")
    path.write_text(text)
    return path


@pytest.fixture
def good(job, assets) -> list[str]:
    """Arguments of a job in which nothing fails."""
    dump = f"--job.dump_folder={job.parent / 'outputs'}"
    return [
        f"--job.config_file={job}",
        f"--model.hf_assets_path={assets}",
        dump,
        *SYNTHETIC,
    ]


def report(
    args: list[str], ranks_per_host: int = 2, num_hosts: int = 1
) -> dict[str, Finding]:
    findings = list(examine(args, ranks_per_host, num_hosts))
    assert all("\n" not in str(finding) for finding in findings)
    assert len({finding.check for finding in findings}) == len(findings)
    return {finding.check: finding for finding in findings}


def failed(findings: dict[str, Finding]) -> list[str]:
    return [name for name, finding in findings.items() if finding.level == "FAIL"]


def test_a_good_job_passes_every_check(good):
    findings = report([*good, CHECKPOINT])
    assert list(findings) == list(doctor.CHECKS)
    assert failed(findings) == []
    wanted = {
        "config": "llama3 debugmodel on 2 ranks, 10 steps of 8 x 2048 tokens",
        "cad": "1 group of 2 ranks balance attention: data parallel 2 x context parallel 1",
        "model": "6,163,712 parameters, 6 layers, 16 query and 16 key heads; attention stays inside documents, which",
        "stock": "cad makes up for the known defects of torchtitan 0.2.2",
        "tokenizer": "257 tokens of the model's 2048, a document ends after EOS = 0",
        "dataset": "synthetic: documents in the first 16384 tokens of rank 0: ",
        "kernel": "cpu (cad.kernel = 'auto': the one for CPU ranks), torch.bfloat16, 16 query and 16 key heads of 16",
        "transport": "collective (cad.transport = 'auto': not symm_mem: for ranks on CPU",
        "planner": "local_search, tolerance auto, shards of 128 tokens; nano_batches = 1: no overlap",
        "profile": "none: plans balance tiles",
        "checkpoint": "outputs/checkpoint: begins anew; a checkpoint takes about 74.0 MB",
    }
    for name, text in wanted.items():
        assert text in findings[name].text, findings[name]
    assert findings["validation"].level == "skip"
    assert not (Path(good[2].split("=")[1])).exists()


def test_without_measuring(good):
    planner = report([*good, "--debug.deterministic"])["planner"].text
    assert (
        "local_search, tolerance 0.02 (not measured, as debug.deterministic is true), shards"
        in planner
    )
    planner = report([*good, "--debug.deterministic", "--cad.tolerance=0.02"])[
        "planner"
    ].text
    assert "local_search, tolerance 0.02, shards" in planner


FAILING: list[tuple[list[str], dict[str, str]]] = [
    (
        ["--cad.planner=foo", "--model.hf_assets_path=none", "--training.dataset=c5"],
        {
            "config": r"cad\.planner = 'foo'.*set",
            "tokenizer": r"model\.hf_assets_path = 'none': no such folder; .*`torchtitan-cad prepare",
            "dataset": r"training\.dataset = 'c5' is not a dataset; set .* one of c4, .*python_stdlib.*, synthetic",
        },
    ),
    (
        [
            "--training.dataset=c4_test",
            "--training.dataset_path=no/such/data",
            CHECKPOINT,
            "--checkpoint.load_step=7",
        ],
        {
            "dataset": r"training\.dataset = 'c4_test' at training\.dataset_path = 'no/such/data': .*; set .*_path to",
            "checkpoint": r"checkpoint\.load_step = 7: there is no .*step-7",
        },
    ),
    (
        [
            "--training.dataset=python_stdlib",
            "--training.dataset_path=none",
            CHECKPOINT,
            "--checkpoint.keep_latest_k=1",
        ],
        {
            "config": r"keep_latest_k = 1: .*2 or more",
            "dataset": r'^training\.dataset_path = "none" is not a folder',
        },
    ),
    (
        [CHECKPOINT, "--checkpoint.initial_load_path=none", "--checkpoint.folder=new"],
        {
            "checkpoint": r"checkpoint\.initial_load_path = 'none': there is no such folder"
        },
    ),
    (
        [
            *(
                "--parallelism.pipeline_parallel_degree=2",
                "--parallelism.pipeline_parallel_schedule=CAD1F1B",
            ),
            "--parallelism.pipeline_parallel_layers_per_stage=1",
        ],
        {"config": "layers_per_stage = 1 makes 8 stages.*needs exactly 2"},
    ),
    (
        ["--comm.mode=fake_backend"],
        {"config": r"comm\.mode = 'fake_backend' .*set the environment variable NGPU"},
    ),
    (
        [
            "--validation.enable",
            "--validation.dataset=c4_test",
            "--cad.kernel=flash_attn",
        ],
        {
            "validation": r"validation\.dataset = 'c4_test' at 'tests/assets/c4_test': .*python_stdlib_validation",
            "kernel": r"cad\.kernel = 'flash_attn' does not run on cpu tensors; set",
        },
    ),
]
"""Every check, and reasons to fail that are its own; test_mistakes.py has those that reading the config finds."""


@pytest.mark.parametrize(("args", "messages"), FAILING, ids=lambda x: ", ".join(x))
def test_what_would_fail_is_named(good, args, messages):
    Path(good[2].split("=")[1], "checkpoint").mkdir(parents=True)
    findings = report([*good, *args])
    assert failed(findings) == list(messages)
    for check, message in messages.items():
        assert re.search(message, findings[check].text), findings[check]


def test_without_nproc_it_is_nproc_that_is_named(good):
    (finding, *_) = examine(
        [*good, "--parallelism.context_parallel_degree=2"], ranks_per_host=None
    )
    assert finding.level == "FAIL"
    assert finding.text.startswith(
        "--nproc: set it to the ranks per node, as torchrun's --nproc_per_node"
    )
    (finding, *_) = examine(good, ranks_per_host=None)
    assert "on 1 ranks" in finding.text


def test_what_does_not_fit_is_named(good, tmp_path):
    """Heads over ranks, tokens into the vocabulary, and checkpoints into a folder."""
    (tmp_path / "file").write_text("")
    big = prepare_tokenizer(
        tmp_path / "big",
        vocab_size=2100,
        texts=[" ".join(f"word{i}" for i in range(9000))],
    )
    for args, check, message in (
        (
            ["--model.flavor=debugmodel_cpu", "--parallelism.tensor_parallel_degree=4"],
            *("model", "tensor_parallel_degree = 4 does not divide the 2 query heads"),
        ),
        (
            [f"--model.hf_assets_path={big}"],
            "tokenizer",
            "has 2100 tokens, model.flavor = 'debugmodel' only 2048",
        ),
        (
            [f"--job.dump_folder={tmp_path / 'file' / 'outputs'}", CHECKPOINT],
            "checkpoint",
            "cannot write to",
        ),
    ):
        findings = report([*good, *args], ranks_per_host=4)
        assert failed(findings) == [check]
        assert message in findings[check].text


def test_a_dataset_that_does_not_answer_and_too_little_space(good, monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(doctor, "PATIENCE_S", 0.01)
    monkeypatch.setattr(doctor, "open_dataset", lambda *_, **__: answer.wait())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    findings = report([*good, CHECKPOINT])
    answer.set()
    assert findings["dataset"].level == "note"
    assert "no answer" in findings["dataset"].text
    assert failed(findings) == ["checkpoint"]
    assert "a checkpoint takes 74.0 MB, 1.0 MB are free" in findings["checkpoint"].text


def test_where_training_resumes(good):
    step = Path(good[2].split("=")[1], "checkpoint", "step-30")
    step.mkdir(parents=True)
    # an unfinished one does not count
    assert "begins anew" in report([*good, CHECKPOINT])["checkpoint"].text
    save(step.parents[1], FULL, 30)
    assert f"resumes from {step}" in report([*good, CHECKPOINT])["checkpoint"].text


def test_a_profile_of_other_heads_and_of_another_device(good, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(make_profile().to_json())
    args = [*good, f"--cad.profile={path}"]
    findings = report(args)
    assert failed(findings) == ["profile"]
    assert "measured for head_dim = 128, not 16" in findings["profile"].text
    path.write_text(make_profile(AttentionShape(16, 16, 16, dtype_bytes=2)).to_json())
    finding = report(args)["profile"]
    assert finding.level == "note"
    assert "was measured on 'paper', this is 'cpu, " in finding.text


def pretend_gpus(monkeypatch):
    """Let the examination find four GPUs."""
    module = SimpleNamespace(
        device_count=lambda: 4, get_device_name=lambda _: "NVIDIA H100"
    )
    monkeypatch.setattr(doctor.utils, "device_type", "cuda")
    monkeypatch.setattr(doctor.utils, "device_module", module)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: name)
    install(monkeypatch, capability=(9, 0))


@pytest.mark.parametrize(
    ("stages", "variables", "said"),
    [
        (1, {}, []),
        (1, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, []),
        (
            1,
            {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
            ["CUDA_DEVICE_MAX_CONNECTIONS = 1: .* leave it out, or set it to 32"],
        ),
        (
            2,
            {},
            [
                "CUDA_MODULE_LOADING = LAZY, the default, with pipeline_parallel_degree = 2: .* set it to EAGER"
            ],
        ),
        (2, {"CUDA_MODULE_LOADING": "EAGER"}, []),
        (
            2,
            {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_MODULE_LOADING": "LAZY"},
            ["CUDA_DEVICE_MAX_CONNECTIONS = 1: ", "CUDA_MODULE_LOADING = LAZY, with"],
        ),
    ],
)
def test_variables_that_hold_back_a_job_on_gpus(
    good, monkeypatch, stages, variables, said
):
    pretend_gpus(monkeypatch)
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    finding = report(
        [*good, f"--parallelism.pipeline_parallel_degree={stages}"], ranks_per_host=4
    )["environment"]
    assert finding.level == ("note" if said else "ok")
    assert all(re.search(words, finding.text) for words in said)


def test_on_gpus(good, monkeypatch):
    """As far as it can be seen without one."""
    pretend_gpus(monkeypatch)
    findings = report(good, ranks_per_host=4)
    assert failed(findings) == []
    assert findings["device"].text.startswith("4 x NVIDIA H100; torch ")
    assert findings["kernel"].level == "note"
    assert findings["kernel"].text.startswith(
        "varlen (cad.kernel = 'auto': no other can be used; flash_attention_3: "
    )
    assert (
        "FlashAttention-2, far below what a device of compute capability 9.0 can do: install"
        in findings["kernel"].text
    )
    wanted = "expected: symm_mem (cad.transport = 'auto': decided at start by a trial on all ranks of the group); "
    assert (
        findings["transport"].text
        == f"{wanted}a rank has 2 receive buffers of 325.0 MB (cad.receive_buffer_gb)"
    )
    monkeypatch.setattr(build, "_check_nvshmem", lambda device: None)
    monkeypatch.setattr(doctor, "lacks_between_hosts", lambda: ["InfiniBand"])
    finding = report([*good, "--cad.transport=nvshmem"], ranks_per_host=4)["transport"]
    assert finding.level == "note"
    assert "it ends the process); a rank has 2 receive buffers" in finding.text
    assert finding.text.endswith("; this machine lacks InfiniBand")
    findings = report(
        [*good, "--training.mixed_precision_param=float32"], ranks_per_host=8
    )
    assert failed(findings) == ["device", "kernel"]
    assert (
        findings["device"].text
        == "--nproc 8: this machine has 4 devices; set it to 4 or less"
    )
    assert (
        "takes bf16 or fp16 queries, got torch.float32; set" in findings["kernel"].text
    )
    install(monkeypatch, capability=(9, 0), with_cudnn=True)
    findings = report([*good, "--cad.kernel=varlen"])
    assert (
        "slower than stock attention, which is cuDNN's with this torch: install"
        in findings["kernel"].text
    )
    install(monkeypatch, capability=(8, 0))
    assert report([*good, "--cad.kernel=varlen"])["kernel"].level == "ok"


def test_groups_of_pipelines_and_nodes(good):
    args = [
        *good,
        "--parallelism.tensor_parallel_degree=2",
        "--parallelism.pipeline_parallel_degree=2",
    ]
    findings = report(args, ranks_per_host=8, num_hosts=2)
    assert failed(findings) == []
    assert "4 groups of 4 ranks" in findings["cad"].text
    assert (
        "for each of 2 pipeline stages and 2 tensor-parallel ranks"
        in findings["cad"].text
    )
    findings = report(
        [*args, "--parallelism.pipeline_parallel_schedule=CAD1F1B"],
        ranks_per_host=8,
        num_hosts=2,
    )
    assert (
        "2 groups of 8 ranks balance attention: pipeline parallel 2 x data parallel 4"
        in findings["cad"].text
    )


def test_without_cad_only_what_is_torchtitans_own_is_checked(good):
    findings = report([*good, "--parallelism.no-cad"])
    assert failed(findings) == []
    assert findings["cad"].level == "note"
    assert {
        findings[name].level for name in ("kernel", "transport", "planner", "profile")
    } == {"skip"}
    findings = report(
        [*good, "--parallelism.no-cad", "--parallelism.tensor_parallel_degree=3"]
    )
    assert failed(findings) == ["config"]


GPT_OSS = ["--model.name=gpt_oss"]
PP2 = ["--parallelism.pipeline_parallel_degree=2"]
TP2 = ["--parallelism.tensor_parallel_degree=2"]
VALIDATION = ["--validation.enable", "--validation.dataset=c4_test"]
DEFECTS: dict[str, tuple[list[str], list[str]]] = {
    "pp_gradient_scale": (PP2, ["--training.steps=5"]),
    "ddp_gradient_scale": (
        [
            "--parallelism.data_parallel_replicate_degree=2",
            "--parallelism.data_parallel_shard_degree=1",
        ],
        ["--parallelism.data_parallel_shard_degree=2"],
    ),
    "cp_validation_loss": (
        [*VALIDATION, "--parallelism.context_parallel_degree=2"],
        VALIDATION,
    ),
    "compile_caches": (
        ["--compile.enable", *TP2, "--cad.nano_batches=2"],
        ["--compile.enable"],
    ),
    "router_bias": (
        GPT_OSS,
        [*GPT_OSS, CHECKPOINT, "--checkpoint.initial_load_path=seed"],
    ),
    "tied_embeddings": (["--model.name=qwen3"], ["--model.name=qwen3", *TP2]),
    "varlen_pipeline": (
        ["--model.flavor=debugmodel_varlen_attn", *PP2],
        [
            "--model.flavor=debugmodel_varlen_attn",
            *PP2,
            "--training.local_batch_size=1",
        ],
    ),
    "varlen_gqa": (["--model.flavor=8B_varlen"], ["--model.flavor=8B"]),
}
"""Patches that jobs without cad need, each with a job that needs it and one that does not."""


@pytest.mark.parametrize("patch", DEFECTS)
def test_without_cad_defects_of_torchtitan_are_named(good, monkeypatch, patch):
    monkeypatch.setattr(defects, "HAS_STRICT_ATTENTION", True)
    monkeypatch.setattr(defects, "HAS_STRICT_FSDP", True)
    needing, other = ([*good, *args] for args in DEFECTS[patch])
    finding = report([*needing, "--parallelism.no-cad"])["stock"]
    assert finding.level == (
        "FAIL" if patch in ("tied_embeddings", "varlen_gqa") else "note"
    )
    assert f"(patches/{patch}.patch)" in finding.text
    assert finding.text.endswith(": apply the patch, or set parallelism.cad = true")
    assert (
        f"{patch}.patch" not in report([*other, "--parallelism.no-cad"])["stock"].text
    )
    assert report(needing)["stock"].level == "ok"


def test_with_shadow_defects_of_torchtitan_are_named(good):
    shadow = [*good, "--cad.shadow"]
    finding = report([*shadow, *GPT_OSS])["stock"]
    assert (finding.level, "router_bias.patch" in finding.text) == ("note", True)
    assert finding.text.endswith("set parallelism.cad = true without cad.shadow")
    assert (
        "meets no known defect"
        in report([*shadow, "--compile.enable", *TP2], 4)["stock"].text
    )


def test_the_key_may_be_missing_but_a_config_must_be_readable(good, job):
    job.write_text(
        job.read_text().replace("custom_config_module", "# custom_config_module")
    )
    findings = report(good)
    assert failed(findings) == []
    assert (
        'job.custom_config_module = "torchtitan_cad.job_config" is needed'
        in findings["cad"].text
    )
    job.write_text(job.read_text() + "[cad\n")
    findings = report(good)
    assert list(findings) == failed(findings) == ["config"]
    assert "correct that line; every [table] may appear once" in findings["config"].text


def test_leaves_torchtitan_as_it_is(good):
    before = titan_specs.get_train_spec("llama3").model_cls, titan_cp.cp_shard
    report(good)
    report([*good, "--cad.planner=foo"])
    assert (titan_specs.get_train_spec("llama3").model_cls, titan_cp.cp_shard) == before


NODES = {"llama3_debug_cpu": (4, 1), "llama3_8b": (8, 8), "llama3_8b_8gpus": (8, 1)}
"""Ranks on each node, and nodes; four nodes of eight ranks suit the other configurations."""


@pytest.mark.parametrize(
    "path",
    sorted((REPOSITORY / "train_configs").glob("*.toml")),
    ids=lambda path: path.stem,
)
def test_every_configuration_gets_a_report(path, assets, tmp_path):
    args = [
        f"--job.config_file={path}",
        f"--job.dump_folder={tmp_path}",
        f"--model.hf_assets_path={assets}",
    ]
    assert failed(report([*args, *SYNTHETIC], *NODES.get(path.stem, (8, 4)))) == []


def test_from_the_command_line(good, job, capsys):
    command = ["doctor", str(job), "--nproc", "2"]
    assert main([*command, *good[1:]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == list(doctor.CHECKS)
    assert main([*command, "--", *good[1:], "--cad.planner", "foo"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^FAIL  config      cad\.planner = 'foo'", out, re.MULTILINE)
    assert "1 of these would fail" in out
    assert main(["doctor", "none.toml"]) == main([*command, "--nnodes", "0"]) == 2
    assert "none.toml: there is no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("check", "arg"), [("tokenizer", ""), ("dataset", "--training.dataset=c5")]
)
def test_training_says_the_same(good, tmp_path, monkeypatch, check, arg):
    """What the tokenizer and the dataset of a training process raise is what the doctor prints."""
    (tmp_path / "tokenizer.json").write_text("{")
    arg = arg or f"--model.hf_assets_path={tmp_path}"
    session = SimpleNamespace(wrap_loader=lambda loader: loader)
    monkeypatch.setattr(plugin, "open_session", lambda *_: session)

    def start() -> None:
        config = ConfigManager().parse_args([*good, arg])
        spec = titan_specs.get_train_spec("llama3")
        spec.build_dataloader_fn(
            tokenizer=spec.build_tokenizer_fn(config),
            job_config=config,
            dp_world_size=2,
            dp_rank=0,
        )

    with refusal() as error:
        start()
    assert report([*good, arg])[check].text == str(error.value)
