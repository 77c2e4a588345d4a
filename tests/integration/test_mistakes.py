# SPDX-License-Identifier: BSD-3-Clause
"""The commonest mistakes: one line, which names the key, the value and the remedy; and what `auto` chooses instead."""

import io
import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.torch_version import TorchVersion

from tests.lib.jobs.compositions import options
from tests.lib.jobs.harness import parse_job, tokenizer_folder
from tests.lib.refusals import check_refusal, refusal
from torchtitan_cad.integration import cpu
from torchtitan_cad.integration.errors import CheckpointError, one_line_errors
from torchtitan_cad.integration.pingpong.segment_graph import FIRST_TORCH
from torchtitan_cad.integration.torchtitan_v0_2 import plugin, rules
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu
from torchtitan_cad.integration.torchtitan_v0_2.manager import CadConfigManager
from torchtitan_cad.integration.torchtitan_v0_2.streams import choose_streams
from torchtitan_cad.runtime.errors import PeerError, first_sentence

STOCK = """
[model]
name = "llama3"
flavor = "debugmodel"
[activation_checkpoint]
mode = "none"
[validation]
seq_len = 1024
local_batch_size = 2
[training]
dataset = "python_stdlib"
seq_len = 1024
local_batch_size = 2
"""
FILES = [
    "[parallelism]\ncda = true",
    "[cad]\ntolerence = 0.1",
    "[traning]\nsteps = 3",
    "tolerance = 0.1",
    "[cad]\ntolerance = 'abc'",
    "[parallelism]\ntensor_parallel_degree = '2'",
    "[comm]\nmode = 3",
    "[compile]\nenable = 'no'",
    "[cad]\nservers = 1",
    "comm = 3",
    "[cad",
    "[cad]\n[cad]",
]
"""What the beginning of a file says, before the table [training]."""
EXPERTS = "--model.name=qwen3 --model.flavor=debugmodel_moe"
DUALPIPE = "stages2 --parallelism.pipeline_parallel_schedule=DualPipeV"
WORDS = [
    "--cad.nano-batch=2",
    "--cad.heartbeat_seconds=abc",
    "--cad.servers_port=70000",
    "--cad.eos_id=5 --cad.documents=row",
    "--cad.documents=word",
    "--cad.tolerance=abc",
    "--training.steps",
    "--model.flavor=7B",
    "--model.hf_assets_path=/none",
    "--model.hf_assets_path=/proc",
    "--parallelism.context_parallel_degree=3",
    "--parallelism.context_parallel_degree=0",
    "--parallelism.pipeline_parallel_microbatch_size=0",
    "--training.seq_len=1023",
    "--training.global_batch_size=5",
    "--cad.kernel=warp",
    "--cad.kernel=flash_attn",
    "--cad.transport=rdma",
    "--cad.transport=nvshmem --parallelism.enable_async_tensor_parallel",
    "--cad.nano_batches=3",
    "--cad.shadow stages2 cad1f1b",
    "--cad.planner=foo",
    "--cad.min_shard=0",
    "--cad.receive_buffer_gb=0",
    "--cad.ranks_per_node=3",
    "--cad.backward=never",
    "--cad.streams=lanes",
    "--model.name=flux",
    "--validation.enable --model.name=deepseek_v3 --model.flavor=debugmodel",
    "stages2 --model.name=gpt_oss --model.flavor=debugmodel",
    "--checkpoint.enable --checkpoint.folder=/proc/none",
    "--job.dump_folder=/proc/none",
    "--model.converters=quantize.linear.float8",
    "--fault_tolerance.enable",
    "--training.dataset=foo",
    "--validation.enable --validation.dataset=synthetic",
    "--validation.enable --validation.seq_len=2048",
    "--job.custom_config_module=nowhere",
    "halves tp2 --training.local_batch_size=1",
    "replicate2 shard1 tp2",
    "replicate2 shard1 stages2",
    "tp2 compile",
    # Experts.
    f"{EXPERTS} --parallelism.expert_parallel_degree=3",
    f"{EXPERTS} --parallelism.expert_parallel_degree=4",
    f"{EXPERTS} tp2 --parallelism.expert_parallel_degree=2 --parallelism.expert_tensor_parallel_degree=3",
    # Schedules of torch.
    DUALPIPE,
    f"{DUALPIPE} --parallelism.no-pipeline-parallel-expert-parallel-overlap --validation.enable",
    "stages2 zbv --validation.enable",
    "stages2 zbv compile",
    "stages2 zbv compile halves",
    "stages2 zbv ac_op",
    "stages2 zbv attention_kept",
    "stages2 --parallelism.pipeline_parallel_schedule=CAD1f1b",
    # Schedules in ticks.
    "stages2 cad1f1b --parallelism.no-cad",
    "stages2 cad1f1b --cad.backward=keep",
    "stages2 cad1f1b --parallelism.pipeline_parallel_schedule_csv=order.csv",
    "stages2 cad1f1b --activation_checkpoint.mode=memory_budget compile",
    "stages2 cad_interleaved --training.local_batch_size=3",
    "stages2 cad1f1b --validation.enable --validation.local_batch_size=4",
    "stages2 cad1f1b --validation.enable --validation.seq_len=128",
    # Streams, and attention that is kept.
    "traced compile",
    "traced halves",
    "traced halves compile --compile.components=loss",
    "traced halves compile --compile.backend=aot_eager",
    "traced halves compile tp2",
    "traced halves compile ac_full",
    "traced halves compile stages2 --parallelism.pipeline_parallel_schedule_csv=order.csv",
    "ac_layer --activation_checkpoint.selective_ac_option=2 --cad.no-recompute-attention",
    "--activation_checkpoint.mode=memory_budget compile --cad.no-recompute-attention",
]
if TorchVersion(torch.__version__) < FIRST_TORCH:
    WORDS.append("traced halves compile")
OPTIONS = [" ".join(options(words)) for words in WORDS]


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is one of two, and torchtitan is afterwards as it was."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    yield
    plugin.restore()


def parse(tmp_path: Path, *options: str, toml: str = ""):
    """Read the job of a file, with text before ``STOCK``, and of options."""
    path = tmp_path / "job.toml"
    path.write_text(toml + STOCK)
    args = [
        f"--job.config_file={path}",
        f"--model.hf_assets_path={tokenizer_folder()}",
        f"--job.dump_folder={tmp_path}",
        "--parallelism.cad",
        *options,
    ]
    with one_line_errors(args):
        return CadConfigManager().parse_args(args)


def end_training(error: Exception, *options: str) -> None:
    with one_line_errors(options) as progress:
        progress.building = False
        raise error


CASES = [("", option) for option in OPTIONS] + [(f"{toml}\n", "") for toml in FILES]


@pytest.mark.parametrize(("toml", "option"), CASES, ids=[*OPTIONS, *FILES])
def test_mistake_is_one_line(toml, option, tmp_path, monkeypatch, capsys):
    if "replicate_degree" in option:
        monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit) as end:
        parse(tmp_path, *option.split(), toml=toml)
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ")
    names = [word.partition("=")[0] for word in option.replace("-", "_").split()]
    keys = [name.rpartition(".")[2] for name in names]
    assert toml or any(key in line.replace("-", "_") for key in keys)
    check_refusal(line)
    assert end.value.code == 2
    assert "Traceback" not in printed.out


def test_a_rule_of_a_misspelt_key_is_an_error():
    config = CadConfigManager().config
    with pytest.raises(AttributeError, match="sead"):
        rules.read_key(config, "debug.sead")


def test_mistake_where_only_ascii_can_be_written(tmp_path, capsys):
    """tyro asks stdout for its encoding."""
    with redirect_stdout(io.StringIO()), pytest.raises(SystemExit):
        parse(tmp_path, "--comm.mode=1e100")
    check_refusal(capsys.readouterr().err, "--comm.mode")


def test_late_call_is_refused(monkeypatch):
    """Once torchtitan has bound its device type it is too late; the message says what to do."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(cpu, "_enabled", False)
    monkeypatch.setitem(sys.modules, "torchtitan.tools.utils", cpu)
    with refusal("enable_cpu()", remedy="torchtitan_cad.train", error=RuntimeError):
        enable_cpu()


def test_users_own_config_module_is_merged(tmp_path, monkeypatch):
    (tmp_path / "own_config.py").write_text(
        "from dataclasses import dataclass, field\n"
        "from pathlib import Path\n"
        "@dataclass\nclass Training:\n    sauce: int = 1\n"
        "@dataclass\nclass Own:\n    place: Path | None = None\n    pair: tuple[int, int] = (1, 2)\n"
        "@dataclass\nclass JobConfig:\n    training: Training = field(default_factory=Training)\n"
        "    own: Own = field(default_factory=Own)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    options = "--job.custom_config_module=own_config", "--training.sauce=7"
    own = "[own]\nplace = 'here'\npair = [3, 4]\n"
    config = parse(tmp_path, *options, toml=own)
    assert config.training.sauce == 7
    # TOML has neither paths nor tuples: torchtitan leaves its values to the module
    assert (str(config.own.place), list(config.own.pair)) == ("here", [3, 4])
    assert config.cad.tolerance == "auto"


WRONG = "--cad.planner=foo"


def test_traceback_on_request_and_a_line_for_the_launcher(tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(SystemExit):
        parse(tmp_path, WRONG)
    told = json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"]
    assert told.startswith("cad.planner = 'foo'")
    with refusal("cad.planner", "foo"):
        parse(tmp_path, WRONG, "--traceback")
    with pytest.raises(PeerError):
        end_training(PeerError("rank 3 is gone"), "--traceback")


def test_first_rank_of_a_node_speaks_for_all(tmp_path, monkeypatch, capsys):
    """The others wait until their launcher has ended them."""
    # Of that module alone: other threads of this process sleep, too.
    time = Mock()
    monkeypatch.setattr("torchtitan_cad.integration.errors.time", time)
    for rank, waits in ((0, 0), (1, 1)):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        with pytest.raises(SystemExit):
            parse(tmp_path, WRONG)
        assert time.sleep.call_count == waits
    assert capsys.readouterr().err.count("error: ") == 2


@pytest.mark.parametrize(
    "bug", [RuntimeError("a bug"), ValueError("too many values to unpack")]
)
def test_bugs_keep_their_stack(bug, capsys):
    with pytest.raises(type(bug)):
        end_training(bug)
    assert capsys.readouterr().err == ""


def test_peers_have_none_nor_what_torch_appends(capsys):
    text = "rank 3 (host, pid 7) is gone.\nException raised from read at pair.cc:1 (most recent ..."
    with pytest.raises(SystemExit) as end:
        end_training(PeerError(text))
    assert end.value.code == 1
    assert capsys.readouterr().err == "error: rank 3 (host, pid 7) is gone.\n"
    text = "[/src/gloo/pair.cc:5] Connection closed\nby peer. This may indicate a remote process failure. GLHF!"
    assert first_sentence(RuntimeError(text)) == "Connection closed by peer"


def test_a_checkpoint_that_fails_names_folder_and_remedy(capsys):
    cause = OSError(28, "No space left on device")
    failure = CheckpointException("load", {1: (cause, None)})
    with pytest.raises(SystemExit):
        end_training(CheckpointError("/data/checkpoint", failure))
    (line,) = capsys.readouterr().err.splitlines()
    check_refusal(line, "/data/checkpoint", "No space left on device")


CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
CHOSEN = [
    # Options, device and version of torch, whether streams are traced, and why.
    ("", CPU, FIRST_TORCH, True, "nothing stands in the way"),
    ("ac_op", CPU, FIRST_TORCH, True, "nothing stands in the way"),
    ("opaque", CPU, FIRST_TORCH, False, "cad.streams = 'opaque'"),
    ("ac_full", CPU, FIRST_TORCH, False, "cannot recompute exchanges"),
    ("--compile.no-enable", CPU, FIRST_TORCH, False, "needs compile.enable = true"),
    ("", CUDA, FIRST_TORCH, False, "has not run on GPUs yet"),
    (
        "stages2 cad1f1b",
        CUDA,
        FIRST_TORCH,
        False,
        "in another order than schedules in ticks",
    ),
    ("traced", CUDA, FIRST_TORCH, True, "cad.streams = 'traced'"),
    ("", CPU, "2.14.0", False, "needs torch 2.14.1 or newer, not 2.14.0"),
]


@pytest.mark.parametrize(("words", "device", "version", "traced", "why"), CHOSEN)
def test_streams_are_traced_where_that_is_possible_and_has_run(
    words, device, version, traced, why, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    config = parse_job(tmp_path, *options(f"halves compile {words}"))
    chosen, reason = choose_streams(config, device, experts=False)
    assert chosen == traced
    assert why in reason
    with_experts, _ = choose_streams(config, device, experts=True)
    assert words in ("opaque", "traced") or not with_experts
