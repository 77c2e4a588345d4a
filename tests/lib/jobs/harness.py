# SPDX-License-Identifier: BSD-3-Clause
"""Small torchtitan jobs on gloo ranks of this machine.

Each rank is a process running runner.py over base.toml plus the given command-line overrides. Losses and gradient
norms come from hooks inside the process, not from rounded log lines. The processes are forked from one that has
imported everything (rank_server.py), so a job costs about as much as its training steps.
"""

import atexit
import contextlib
import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed import TCPStore

from tests.lib.jobs.attention_server import READY
from tests.lib.waiting import eventually
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
BASE_TOML = HERE / "base.toml"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
"""One thread per rank: the processes share few cores."""


@dataclasses.dataclass
class RunResult:
    """Results of a job's ranks. `steps`, `losses` and `grad_norms` are those of the rank that reports metrics.

    `returncodes[r]` is None for a rank that was killed for exceeding the time limit.
    """

    returncodes: list[int | None]
    logs: list[str]
    dump_folder: Path
    steps: list[int]
    losses: list[float]
    grad_norms: list[float]
    validation_losses: dict[int, float]
    graphs: list[int]
    """Graphs that dynamo had compiled by the end of each step."""
    figures: list[list[dict[str, Any]]]
    """Of every rank's logged steps, what recording.py writes down."""
    traces: list[dict[str, Any]]
    """Every rank's steps of the engine as [name, plan key], and names of collectives, at `trace_at`."""
    grads: dict[str, torch.Tensor]
    """Full gradients by parameter name, before clipping, at the step asked for with `grads_at`."""

    def report(self) -> str:
        """Exit codes and the last lines of every rank's log, for assertion messages."""
        parts = [f"exit codes {self.returncodes}"]
        for rank, log in enumerate(self.logs):
            parts.append(f"--- rank {rank}\n" + "\n".join(log.splitlines()[-40:]))
        return "\n".join(parts)


def run(
    args: Sequence[str],
    nranks: int = 2,
    timeout_s: float = 120,
    *,
    config: Path = BASE_TOML,
    dump_folder: Path | None = None,
    pythonpath: Sequence[Path] = (),
    env: Mapping[str, str] | None = None,
    may_fail: bool = False,
    servers: Sequence[Sequence[str]] = (),
    **hooks,
) -> RunResult:
    """Train on `nranks` local processes and collect what they computed.

    Raises AssertionError with the ends of all logs if a rank fails, unless it may.

    Args:
        args: torchtitan command-line arguments; they win over base.toml.
        nranks: processes, one thread each.
        timeout_s: wall-clock limit of the whole job. As soon as one rank fails, the others have 10 s left.
        config: the job's TOML file.
        dump_folder: torchtitan's `job.dump_folder` (checkpoints, TensorBoard); by default a new folder that lasts
            as long as this process.
        pythonpath: folders searched before the installed packages (for a patched torchtitan).
        env: further environment variables, set after torch and torchtitan are imported.
        servers: options of attention servers that join the job (attention_server.py).
        hooks: of runner.py, by name; None: not asked for.
            grads_at: step whose full gradients are returned in `RunResult.grads`.
            trace_at: step whose steps and collectives are returned in `RunResult.traces`.
            init_seed: initialise parameters by name, the same under every parallelism, by default with 0; None for
                torchtitan's own init.
            as_dp: a single process takes the batches of that many data-parallel ranks in turn.
            link: bytes per second that ranks find their links to have, beside slow attention; by default they measure.
            fp64: compute in fp64 if True, with attention as a dense softmax: the reference of references.
    """
    record_dir = Path(tempfile.mkdtemp(prefix="run_", dir=scratch_folder()))
    dump_folder = dump_folder or record_dir / "dump"
    hooks = {"init_seed": 0} | hooks
    asked_for = {name: value for name, value in hooks.items() if value is not None}
    # Hosting the rendezvous store here lets the system choose the port, so parallel runs cannot collide.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    job = {
        "argv": [json.dumps(asked_for), *job_files(config, dump_folder), *args],
        "env": {
            "RECORD_FOLDER": str(record_dir),
            **rank_environment(store, nranks),
            **(env or {}),
        },
        "logs": log_files(record_dir, nranks),
        "timeout_s": timeout_s,
    }
    with _attention_servers(servers, record_dir):
        returncodes = start_server(tuple(pythonpath)).run(job)
    del store
    return collect(record_dir, dump_folder, returncodes, may_fail=may_fail)


def rank_environment(store: TCPStore, nranks: int) -> dict[str, str]:
    """Variables by which ranks find each other."""
    return {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "LOCAL_WORLD_SIZE": str(nranks),
    }


def log_files(folder: Path, nranks: int) -> list[str]:
    return [str(folder / f"rank{rank}.log") for rank in range(nranks)]


def job_files(config: Path, dump_folder: Path) -> list[str]:
    """Arguments of the files that a job reads and writes."""
    return [
        f"--job.config_file={config}",
        f"--job.dump_folder={dump_folder}",
        f"--model.hf_assets_path={tokenizer_folder()}",
    ]


def parse_job(dump_folder: Path, *args: str):
    """The config of a small job with CAD, as torchtitan's entry point reads it, of as many ranks as WORLD_SIZE."""
    enable_cpu()
    from torchtitan_cad.integration.torchtitan_v0_2 import plugin
    from torchtitan_cad.integration.torchtitan_v0_2.manager import CadConfigManager

    known = [
        "--model.flavor=debugmodel_varlen_attn",
        "--training.dataset=python_stdlib",
        "--parallelism.cad",
    ]
    try:
        return CadConfigManager().parse_args(
            [*job_files(BASE_TOML, dump_folder), *known, *args]
        )
    finally:
        plugin.restore()  # torchtitan as it was


def child_environment(pythonpath: Sequence[Path] = ()) -> dict[str, str]:
    """Variables of processes that import this repository."""
    search = [*map(str, pythonpath), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        **ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(filter(None, search)),
    }


@contextlib.contextmanager
def _attention_servers(
    servers: Sequence[Sequence[str]], record_dir: Path
) -> Iterator[None]:
    """Attention servers of a job, which end with it; their logs lie beside its own."""
    log_of_job = f"--log={record_dir / 'rank0.log'}"
    command = [sys.executable, "-m", "tests.lib.jobs.attention_server", log_of_job]
    logs = [record_dir / f"server{number}.log" for number in range(len(servers))]
    with contextlib.ExitStack() as stack:
        for log, options in zip(logs, servers, strict=True):
            process = subprocess.Popen(
                [*command, *options],
                env=child_environment(),
                stdout=stack.enter_context(log.open("w")),
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
        assert eventually(lambda: all(READY in log.read_text() for log in logs))
        yield


class _RankServer:
    """The harness's end of rank_server.py."""

    def __init__(self, pythonpath: Sequence[Path]):
        env = {
            **child_environment(pythonpath),
            "TORCHINDUCTOR_CACHE_DIR": str(
                scratch_folder() / "compiled"
            ),  # of all jobs of the session
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "HF_DATASETS_OFFLINE": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.lib.jobs.rank_server"],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, job: dict[str, Any]) -> list[int | None]:
        """Exit codes of the ranks."""
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(
                f"rank_server.py ended with exit code {self._process.wait()}; its error is on stderr"
            )
        return json.loads(answer)

    def close(self) -> None:
        """End of input ends the server."""
        self._process.stdin.close()
        self._process.wait()


_servers = {}


def start_server(pythonpath: tuple[Path, ...] = ()) -> _RankServer:
    """The server for the installed packages, or for a search path; of the latter one is kept, as each takes 0.5 GB."""
    if pythonpath not in _servers:
        for other in [key for key in _servers if key]:
            _servers.pop(other).close()
        _servers[pythonpath] = server = _RankServer(pythonpath)
        atexit.register(server.close)
    return _servers[pythonpath]


def read_scalars(folder: Path) -> dict[str, list[float]]:
    """All values of every scalar of the TensorBoard file below a folder."""
    (events,) = folder.rglob("events.out.tfevents.*")
    accumulator = EventAccumulator(str(events), size_guidance={"scalars": 0}).Reload()
    assert accumulator.Tags()["images"] == []
    return {
        tag: [event.value for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def gradient_errors(result: RunResult, reference: RunResult) -> dict[str, float]:
    """Relative error (Frobenius norm, in fp64) of every parameter's gradient; the parameters must be the same."""
    assert result.grads.keys() == reference.grads.keys() != set(), (
        "pass grads_at to both runs"
    )
    errors = {}
    for name, expected in reference.grads.items():
        difference = result.grads[name].double() - expected.double()
        # A gradient that is zero in the reference must be zero.
        errors[name] = (difference.norm() / (expected.double().norm() or 1.0)).item()
    return errors


def collect(
    record_dir: Path,
    dump_folder: Path,
    returncodes: list[int | None],
    *,
    may_fail: bool = False,
) -> RunResult:
    """Raises AssertionError with the ends of all logs if a rank has failed, unless it may."""
    records = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(record_dir.glob("rank*.jsonl"))
    ]
    reported = [x for own in records for x in own if x["is_metrics_rank"]]
    train = [x for x in reported if x["kind"] == "train"]
    validated = [x for x in reported if x["kind"] == "validation"]
    grads = {}
    for path in sorted(record_dir.glob("grads_rank*.pt")):
        grads |= torch.load(path)
    traces = sorted(record_dir.glob("trace_rank*.json"))
    result = RunResult(
        returncodes=returncodes,
        logs=[
            Path(path).read_text(errors="replace")
            for path in log_files(record_dir, len(returncodes))
        ],
        dump_folder=dump_folder,
        steps=[x["step"] for x in train],
        losses=[x["loss"] for x in train],
        grad_norms=[x["grad_norm"] for x in train],
        validation_losses={x["step"]: x["loss"] for x in validated},
        graphs=[x["graphs"] for x in train],
        figures=[[x for x in own if x["kind"] == "train"] for own in records],
        traces=[json.loads(path.read_text()) for path in traces],
        grads=grads,
    )
    assert may_fail or set(returncodes) == {0}, result.report()
    return result


@functools.cache
def scratch_folder() -> Path:
    """Holds whatever runs write, until this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="torchtitan_cad_tests_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def tokenizer_folder() -> Path:
    """A byte-level tokenizer in the layout of `model.hf_assets_path`: 256 bytes, then <bos> = 256 and <eos> = 257."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(
            vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])

    folder = scratch_folder() / "tokenizer"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"})
    )
    return folder
