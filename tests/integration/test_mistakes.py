# SPDX-License-Identifier: BSD-3-Clause
"""The commonest mistakes: one line, which names the key, the value and the remedy; and what `auto` chooses instead."""

import contextlib
import io
import json
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.torch_version import TorchVersion

from tests.lib.jobs.harness import parse_job, tokenizer_folder
from tests.lib.jobs.launched import launched
from torchtitan_cad.integration.errors import CheckpointError, one_line_errors
from torchtitan_cad.integration.pingpong.segment_graph import FIRST_TORCH
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu
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
FILES = {
    "[parallelism]\ncda = true": r"parallelism\.cda: .*did you mean paral\S*\.cad\?",
    "[cad]\ntolerence = 0.1": r"cad\.tolerence: no such key; did you mean cad\.tolerance\?",
    "[traning]\nsteps = 3": r"traning: no such key; did you mean the table \[training\]\?",
    "tolerance = 0.1": r"training\.tolerance: .*did you mean cad\.tolerance\?",
    "[cad]\ntolerance = 'abc'": r"cad\.tolerance = 'abc': set a number or 'auto'$",
    "[parallelism]\ntensor_parallel_degree = '2'": r"parallelism\.tensor_parallel_degree = '2': set an integer",
    "[comm]\nmode = 3": r"comm\.mode = 3: set one of 'default', 'fake_b",
    "[compile]\nenable = 'no'": r"compile\.enable = 'no': set true or false",
    "[cad]\nrank_speeds = 1": r"cad\.rank_speeds = 1: set a list, of which each is a number",
    "[cad": r"job\.config_file = '.*job\.toml': .*line \d+.*; correct that line; every \[table\] may appear once",
    "[cad]\n[cad]": r"job\.config_file = '.*': .*twice.*; correct that line; every \[table\] may appear once",
}
"""What the end of a file says, after the table [training], and the line that is printed."""
PP, TP = (
    "--parallelism.pipeline_parallel_degree=2",
    "--parallelism.tensor_parallel_degree=2",
)
ASYNC_TP = "--parallelism.enable_async_tensor_parallel"
SCHEDULE = f"{PP} --parallelism.pipeline_parallel_schedule"
TICKS, INTERLEAVED, V = (
    f"{SCHEDULE}=CAD1F1B",
    f"{SCHEDULE}=CADInterleaved1F1B",
    f"{SCHEDULE}=ZBVZeroBubble",
)
DUALPIPE, NO_OVERLAP = (
    f"{SCHEDULE}=DualPipeV",
    "--parallelism.no-pipeline-parallel-expert-parallel-overlap",
)
DDP = "--parallelism.data_parallel_replicate_degree=2 --parallelism.data_parallel_shard_degree=1"
FULL, SELECTIVE, BUDGET = (
    f"--activation_checkpoint.mode={mode}"
    for mode in ("full", "selective", "memory_budget")
)
KEPT, BY_OPERATOR = (
    "--cad.no-recompute-attention",
    "--activation_checkpoint.selective_ac_option=op",
)
VALIDATION, CSV = (
    "--validation.enable",
    "--parallelism.pipeline_parallel_schedule_csv=order.csv",
)
TRACED, HALVES, COMPILE = (
    "--cad.streams=traced",
    "--cad.nano_batches=2",
    "--compile.enable",
)
EXPERTS = "--model.name=qwen3 --model.flavor=debugmodel_moe"
TRACED_HALVES = f"{TRACED} {HALVES} {COMPILE}"
OPTIONS = {
    "--cad.nano-batch=2": r"cad\.nano_batch: no such key; did you mean cad\.nano_batches\?",
    "--cad.heartbeat_seconds=abc": r"cad\.heartbeat.seconds: could not convert string to float: 'abc'; --help",
    "--cad.eos_id=5 --cad.documents=row": r"cad\.eos_id = 5 ends no document with cad\.documents = 'row'; leave",
    "--cad.documents=word": r"cad\.documents = 'word': set cad\.documents to one of: 'eos', 'row', 'positions'",
    "--cad.tolerance=abc": r"cad\.tolerance: .*FLOAT\|\{auto\}.*'abc'",
    "--training.steps": r"Missing value for argument '--training\.steps'",
    "--model.flavor=7B": r"model\.flavor = '7B' .*set model\.flavor to one of debugmodel,",
    "--model.hf_assets_path=/none": r"model\.hf_assets_path = '/none': no such folder; set",
    "--model.hf_assets_path=/proc": r"model\.hf_assets_path = '/proc': no tokenizer in it; set",
    "--parallelism.context_parallel_degree=3": r"context_parallel_degree = 3, .* multiply to the 2 ranks of.*; set",
    "--parallelism.context_parallel_degree=0": r"context_parallel_degree = 0: set",
    "--parallelism.pipeline_parallel_microbatch_size=0": r"microbatch_size = 0: set",
    "--training.seq_len=1023": r"training\.seq_len = 1023 is .*; set training\.seq_len to 1024",
    "--training.global_batch_size=5": r"global_batch_size = 5 is not a multiple",
    "--cad.profile=none.json": r"cad\.profile = 'none\.json': .*leave cad\.profile out",
    "--cad.kernel=warp": r"cad\.kernel = 'warp'.*set cad\.kernel",
    "--cad.kernel=flash_attn": r"cad\.kernel = 'flash_attn' does not run on cpu .*; set",
    "--cad.transport=rdma": r"cad\.transport = 'rdma'.*set cad\.transport",
    f"--cad.transport=nvshmem {ASYNC_TP}": r"'nvshmem' does not go with .* one backend .*; set cad\.transport",
    "--cad.nano_batches=3": r"cad\.nano_batches = 3: set cad\.nano_batches to one of: 1, 2",
    f"--cad.shadow {TICKS}": r"cad\.shadow = true .* = 'CAD1F1B'; set the schedule to '1F1B', or cad\.shadow to false",
    "--cad.planner=foo": r"cad\.planner = 'foo'.*set",
    "--cad.min_shard=0": r"cad\.min_shard = 0.*set",
    "--cad.rank_speeds 1.0": r"cad\.rank_speeds has 1 entries for CAD groups of 2 ranks.*set",
    "--cad.receive_buffer_gb=0": r"cad\.receive_buffer_gb = 0\.0: set",
    "--cad.ranks_per_node=3": r"cad\.ranks_per_node = 3: set .* divides the 2 ranks",
    "--cad.backward=never": r"cad\.backward = 'never'.*set cad\.backward",
    "--cad.streams=lanes": r"cad\.streams = 'lanes': set cad\.streams to one of: 'auto'",
    "--model.name=flux": r"model\.name = 'flux': set it to one of",
    f"{VALIDATION} --model.name=deepseek_v3 --model.flavor=debugmodel": r"no validation for .*; set validation\.enable",
    f"{PP} --model.name=gpt_oss --model.flavor=debugmodel": r"pipeline_parallel_degree = 2: .*'gpt_oss'; set it to 1",
    "--checkpoint.enable --checkpoint.folder=/proc/none": r"folder = '/proc/none' .*: cannot write to /proc: .*; set",
    "--job.dump_folder=/proc/none": r"job\.dump_folder = '/proc/none': cannot write",
    "--model.converters=quantize.linear.float8": r"model\.converters = \['quantize.*'\]: .*; leave .* out, or",
    "--fault_tolerance.enable": r"fault_tolerance\.enable = true: .*; set fault_tolerance\.enable to false, or",
    "--training.dataset=foo": r"training\.dataset = 'foo' is not a dataset; set .*synthetic",
    f"{VALIDATION} --validation.dataset=synthetic": r"validation\.dataset = 'synthetic' is not .*; set .*to one of c4",
    f"{VALIDATION} --validation.seq_len=2048": r"seq_len = 2048 is more than training.*; set .*seq_len to 1024",
    "--job.custom_config_module=nowhere": r"custom_config_module: No module named 'nowhere'",
    f"{HALVES} {TP} --training.local_batch_size=1": r"cad\.nano_batches = 2 .* 1 rows; set training\.local_batch_size",
    f"{DDP} {TP}": r"replicate_degree = 2 .* DDP, .*tensor_parallel_degree = 2; set .*replicate_degree to 1",
    f"{DDP} {PP}": r"replicate_degree = 2 .* DDP, .*pipeline_parallel_degree = 2; set .*replicate_degree to 1",
    f"{TP} {COMPILE}": r"compile\.enable = true with .*tensor_parallel_degree = 2 .*; set compile\.enable to false",
    # Experts.
    f"{EXPERTS} --parallelism.expert_parallel_degree=3": r"expert_parallel_degree = 3 does not divide the 64 experts",
    f"{EXPERTS} --parallelism.expert_parallel_degree=4": r"degree = 4 x .* does not divide the 2 ranks of .*; set",
    f"{EXPERTS} {TP} --parallelism.expert_parallel_degree=2 --parallelism.expert_tensor_parallel_degree=3": (
        r"expert_tensor_parallel_degree = 3: set it to 1, or to .*tensor_parallel_degree = 2"
    ),
    # Schedules of torch.
    DUALPIPE: r"expert_parallel_overlap = true .*'DualPipeV' .*set pipeline_parallel_expert_parallel_overlap to false",
    f"{DUALPIPE} {NO_OVERLAP} {VALIDATION}": r"enable = true: .*'DualPipeV' .*set validation\.enable to false",
    f"{V} {VALIDATION}": r"validation\.enable = true: .*'ZBVZeroBubble' .*set validation\.enable to false",
    f"{V} {COMPILE}": r"'ZBVZeroBubble' computes .* compile\.enable = true; set compile\.enable to false",
    f"{V} {COMPILE} {HALVES}": r"'ZBVZeroBubble' computes .* compile\.enable = true; set compile\.enable to false",
    f"{V} {SELECTIVE} {BY_OPERATOR}": r"'ZBVZeroBubble' computes .*option = 'op'; set activation_checkpoint\.mode to",
    f"{V} {FULL} {KEPT}": r"'ZBVZeroBubble' computes .*recompute_attention = false; set activation_checkpoint\.mode to",
    f"{SCHEDULE}=CAD1f1b": r"schedule = 'CAD1f1b': set it to 'CAD1F1B' or 'CADInterleaved1F1B', or",
    # Schedules in ticks.
    f"{TICKS} --parallelism.no-cad": r"'CAD1F1B' needs parallelism\.cad = true; set that",
    f"{TICKS} --cad.backward=keep": r"cad\.backward = 'keep' .*set cad\.backward to 'resend'",
    f"{TICKS} {CSV}": r"pipeline_parallel_schedule_csv = 'order\.csv' .*leave it out",
    f"{TICKS} {BUDGET} {COMPILE}": r"mode = 'memory_budget' .*set activation_checkpoint\.mode to 'full'",
    f"{INTERLEAVED} --training.local_batch_size=3": r"local_batch_size = 3 makes 3 micro.*set it to a multiple of 2",
    f"{TICKS} {VALIDATION} --validation.local_batch_size=4": r"local_batch_size = 4 differs .*set .*_batch_size to 2",
    f"{TICKS} {VALIDATION} --validation.seq_len=128": r"validation\.seq_len = 128 differs .*set .*seq_len to 1024",
    f"{TICKS} --cad.rank_speeds 1.0": r"cad\.rank_speeds has 1 entries for .* 2 ranks \(pipeline parallel 2 x .*set",
    # Streams, and attention that is kept.
    f"{TRACED} {COMPILE}": r"cad\.streams = 'traced' needs cad\.nano_batches = 2, not 1; set that, or cad\.streams to",
    f"{TRACED} {HALVES}": r"cad\.streams = 'traced' needs compile\.enable = true, not false; set that, or cad\.streams",
    f"{TRACED_HALVES} --compile.components=loss": r"needs 'model' in compile\.components = \['loss'\]; add that",
    f"{TRACED_HALVES} --compile.backend=aot_eager": r"needs compile\.backend = 'inductor', not 'aot_eager'; set that",
    f"{TRACED_HALVES} {TP}": r"'traced' needs .*tensor_parallel_degree = 1, not 2, .*; set that, or cad\.streams",
    f"{TRACED_HALVES} {FULL}": r"cad\.streams = 'traced' cannot recompute .*mode = 'full' .*; set the mode to 'none'",
    f"{TRACED_HALVES} {PP} {CSV}": r"'traced' cannot .*_schedule_csv = 'order\.csv' may; leave that out, or cad\.",
    f"{SELECTIVE} --activation_checkpoint.selective_ac_option=2 {KEPT}": r"option = '2'; set .*mode to 'full'",
    f"{BUDGET} {COMPILE} {KEPT}": r"recompute_attention = false .*mode = 'memory_budget' .*; set .*mode to 'full'",
}
"""Options, and the line that is printed."""
if TorchVersion(torch.__version__) < FIRST_TORCH:
    OPTIONS[TRACED_HALVES] = (
        rf"needs torch {FIRST_TORCH} or newer, not .*; install that, or cad\.streams to 'auto'"
    )


LINES = {
    "before process groups exist": (
        "--cad.planner=foo",
        r"cad\.planner = 'foo': set one of",
    ),
    "after": (
        "--training.dataset=c4_test",
        r"training\.dataset = 'c4_test' .*: .*; set training\.dataset_path to",
    ),
}
"""Mistakes of whole jobs."""


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")


@pytest.fixture(scope="module", autouse=True)
def undone():
    yield
    from torchtitan_cad.integration.torchtitan_v0_2 import plugin

    plugin.restore()


def parse(tmp_path: Path, toml: str, options: list[str]):
    path = tmp_path / "job.toml"
    path.write_text(STOCK + toml)
    given = [option.split("=")[0] for option in options]
    defaults = {
        "--model.hf_assets_path": str(tokenizer_folder()),
        "--job.dump_folder": str(tmp_path),
    }
    args = [f"{key}={value}" for key, value in defaults.items() if key not in given]
    args = [f"--job.config_file={path}", "--parallelism.cad", *args, *options]
    with one_line_errors(args):
        return manager().parse_args(args)


def manager():
    enable_cpu()
    from torchtitan_cad.integration.torchtitan_v0_2.manager import CadConfigManager

    return CadConfigManager()


def end_training(act, *args, options: Sequence[str] = ()) -> None:
    with one_line_errors(options) as progress:
        progress.building = False
        act(*args)


def fail(error: Exception) -> None:
    raise error


CASES = [(toml + "\n", [], line) for toml, line in FILES.items()] + [
    ("", o.split(), line) for o, line in OPTIONS.items()
]


@pytest.mark.parametrize(("toml", "options", "message"), CASES, ids=[*FILES, *OPTIONS])
def test_mistake_is_one_line(
    toml: str,
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd,
) -> None:
    if any("replicate_degree" in option for option in options):
        monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit) as end:
        parse(tmp_path, toml, options)
    printed = capfd.readouterr()
    (line,) = printed.err.splitlines()
    assert re.match(f"error: .*{message}", line), line
    assert end.value.code == 2
    assert "Traceback" not in printed.out


@pytest.mark.matrix
@pytest.mark.parametrize("when", LINES)
@pytest.mark.parametrize("nranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_lines_of_a_job_that_cannot_start(
    when: str, nranks: int, tmp_path: Path
) -> None:
    option, message = LINES[when]
    with launched([option], tmp_path, nranks) as job:
        returncode, _ = job.finish(200)
    printed = "\n".join(job.lines)
    assert returncode == 2, printed
    assert len(job.lines) < 15, printed
    (error,) = [line for line in job.lines if line.startswith("error: ")]
    assert re.match(f"error: {message}", error), printed
    assert "Traceback" not in printed
    assert ("Building device mesh" in printed) == (when == "after"), printed


@pytest.mark.parametrize(
    ("rank", "level"), [("0", logging.INFO), ("1", logging.WARNING)]
)
def test_other_ranks_log_warnings_only_until_the_job_is_built(
    rank: str, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    enable_cpu()
    import torchtitan.train as titan_train

    from torchtitan_cad import train

    levels: list[int] = []
    root = logging.getLogger()

    def main(build: Callable[[object], None]) -> None:
        titan_train.init_logger()
        build(None)
        levels.append(root.level)

    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr(titan_train, "init_logger", lambda: root.setLevel(logging.INFO))
    monkeypatch.setattr(titan_train, "ConfigManager", titan_train.ConfigManager)
    monkeypatch.setattr(titan_train, "Trainer", lambda _: levels.append(root.level))
    monkeypatch.setattr(titan_train, "main", main)
    train.main()
    assert levels == [level, logging.INFO]


@pytest.mark.parametrize("key", ["last_save_in_hf", "initial_load_in_hf"])
def test_checkpoints_of_hugging_face_need_a_package(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enable_cpu()
    from torchtitan_cad.integration.torchtitan_v0_2 import folders, rules

    monkeypatch.setattr(folders, "resumed_from", lambda config: None)
    options = ["--checkpoint.enable", f"--checkpoint.{key}"]
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError,
        match=rf"checkpoint\.{key} = true: needs the package safetensors, .*; install it, or set it to false",
    ):
        parse_job(tmp_path, *options)
    monkeypatch.setattr(rules, "find_spec", lambda name: name)
    assert getattr(parse_job(tmp_path, *options).checkpoint, key)


def test_number_for_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setitem(globals(), "STOCK", "comm = 3\n" + STOCK)
    with pytest.raises(SystemExit):
        parse(tmp_path, "", [])
    assert (
        capsys.readouterr().err
        == "error: comm: no such key; it is a table: write its keys below [comm]\n"
    )


def test_mistake_where_only_ascii_can_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        contextlib.redirect_stdout(io.StringIO()),
        pytest.raises(SystemExit),
    ):
        # tyro asks it for its encoding
        parse(tmp_path, "", ["--comm.mode=1e100"])
    assert (
        "invalid choice '1e100' for argument '--comm.mode'. Expected one of"
        in capsys.readouterr().err
    )


def test_cad_needs_no_custom_config_module(tmp_path: Path) -> None:
    config = parse(tmp_path, "[parallelism]\ncad = true\n[cad]\ntolerance = 0.1", [])
    assert config.parallelism.cad
    assert config.cad.tolerance == 0.1


def test_users_own_config_module_is_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_config.py").write_text(
        "from dataclasses import dataclass, field\n"
        "@dataclass\nclass Training:\n    sauce: int = 1\n"
        "@dataclass\nclass JobConfig:\n    training: Training = field(default_factory=Training)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = parse(
        tmp_path, "", ["--job.custom_config_module=own_config", "--training.sauce=7"]
    )
    assert config.training.sauce == 7
    assert config.cad.tolerance == "auto"


def test_traceback_on_request_and_a_line_for_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit):
        parse(tmp_path, "", ["--cad.planner=foo"])
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["extraInfo"]["py_callstack"].startswith("cad.planner = 'foo'")
    with pytest.raises(ValueError, match="foo"):
        parse(tmp_path, "", ["--cad.planner=foo", "--traceback"])
    gone = PeerError("rank 3 is gone")
    with pytest.raises(PeerError):
        end_training(fail, gone, options=["--traceback"])


def test_first_rank_of_a_node_speaks_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The others wait until their launcher has ended them."""
    waited: list[float] = []
    # Of that module alone: other threads of this process sleep, too.
    monkeypatch.setattr(
        "torchtitan_cad.integration.errors.time", SimpleNamespace(sleep=waited.append)
    )
    for rank in (0, 1):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        with pytest.raises(SystemExit):
            parse(tmp_path, "", ["--cad.planner=foo"])
    assert len(waited) == 1
    assert waited[0] > 1
    assert capsys.readouterr().err.count("error: ") == 2


def test_bugs_keep_their_stack_and_peers_do_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for bug in (RuntimeError("a bug"), ValueError("too many values to unpack")):
        with pytest.raises(type(bug)):
            end_training(fail, bug)
    assert capsys.readouterr().err == ""
    with pytest.raises(SystemExit) as end:
        end_training(
            fail,
            PeerError(
                "rank 3 (host, pid 7) is gone.\nException raised from read at pair.cc:1 (most recent ..."
            ),
        )
    assert end.value.code == 1
    assert capsys.readouterr().err == "error: rank 3 (host, pid 7) is gone.\n"


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [
        (OSError(28, "No space left on device"), "No space left on device; make room"),
        (
            RuntimeError("Missing key in checkpoint state_dict: norm."),
            "norm.; start the job with the model",
        ),
    ],
)
def test_checkpoints_that_fail_name_folder_and_remedy(
    cause: Exception, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        end_training(
            fail,
            CheckpointError(
                "/data/checkpoint", CheckpointException("load", {1: (cause, None)})
            ),
        )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: a checkpoint in /data/checkpoint could not ")
    assert remedy in line


def test_first_sentence_drops_what_torch_appends() -> None:
    error = RuntimeError(
        "[/src/gloo/pair.cc:5] Connection closed\nby peer. This may indicate a remote process failure. GLHF!"
    )
    assert first_sentence(error) == "Connection closed by peer"


COMPILED = (HALVES, COMPILE)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("args", "device", "torch_version", "traced", "why"),
    [
        (COMPILED, CPU, FIRST_TORCH, True, "nothing stands in the way"),
        (
            (*COMPILED, SELECTIVE, BY_OPERATOR),
            CPU,
            FIRST_TORCH,
            True,
            "nothing stands in the way",
        ),
        (
            (*COMPILED, "--cad.streams=opaque"),
            CPU,
            FIRST_TORCH,
            False,
            "cad.streams = 'opaque'",
        ),
        ((*COMPILED, FULL), CPU, FIRST_TORCH, False, "cannot recompute exchanges"),
        ((HALVES,), CPU, FIRST_TORCH, False, "needs compile.enable = true"),
        (COMPILED, CUDA, FIRST_TORCH, False, "has not run on GPUs yet"),
        ((*COMPILED, TRACED), CUDA, FIRST_TORCH, True, "cad.streams = 'traced'"),
        (COMPILED, CPU, "2.14.0", False, "needs torch 2.14.1 or newer, not 2.14.0"),
    ],
)
def test_streams_are_traced_where_that_is_possible_and_has_run(
    args: tuple[str, ...],
    device: torch.device,
    torch_version: str,
    traced: bool,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch, "__version__", TorchVersion(torch_version))
    config = parse_job(tmp_path, *args)
    from torchtitan_cad.integration.torchtitan_v0_2 import checks

    chosen, reason = checks.choose_streams(config, device, experts=False)
    assert chosen == traced
    assert why in reason
    if "cad.streams" not in " ".join(args):
        assert not checks.choose_streams(config, device, experts=True)[0]
