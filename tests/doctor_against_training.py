# SPDX-License-Identifier: BSD-3-Clause
"""Does ``torchtitan-cad doctor`` say what training does? Jobs of which one key is changed at random, by both.

    python -m tests.doctor_against_training --count 300 --seed 0

Every job runs on two CPU ranks for two steps. What doctor passes must train, or stop where its data ends; what doctor
fails must end training in one line. The exit code is 1 if they disagree, or if an error takes more than one line.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import tyro
from tqdm import tqdm

from tests.lib.jobs import rank_server, tiny_models
from torchtitan_cad import train
from torchtitan_cad.integration.torchtitan_v0_2.manager import CadConfigManager
from torchtitan_cad.planning import warm_up
from torchtitan_cad.planning.placement.place import warm_up_placement
from torchtitan_cad.tools.doctor.examine import examine
from torchtitan_cad.tools.prepare.tokenizer import prepare_tokenizer

RANKS = 2
TIMEOUT_S = 240.0
"""seconds: for a job that compiles on a busy machine"""
INTEGERS = (-7, -2, -1, 0, 1, 2, 3, 5, 64, 1000, 2**31, 2**63)
NUMBERS = (-1.0, 0.0, 0.5, 1.0, 2.0, 1e30, float("inf"), float("nan"))
TEXTS = ("", "x", "none/none", "/proc/none", "a" * 300, "2", "0", "op", "fixed:64")
LARGEST = {
    "num_workers": 5,
    "steps": 5,
    "seq_len": 1000,
    "local_batch_size": 64,
    "global_batch_size": 64,
}
"""By the last part of a key: values above it are right, and take a test's time or the machine's memory."""
DATA_ENDS = "Ran out of data"

Job = dict[str, Any]
"""Values by key, such as ``training.steps``."""
Case = tuple[str, str, Any]
"""A base, a key and its other value."""


def base_jobs(folder: Path) -> dict[str, Job]:
    """Return six small jobs of two ranks, each of which trains."""
    text = folder / "c4_test" / "documents.json"
    text.parent.mkdir()
    text.write_text(
        "".join(
            json.dumps({"text": f"document {index} " * 40}) + "\n"
            for index in range(400)
        )
    )
    common: Job = {
        "model.name": "llama3",
        "model.flavor": "debugmodel_cpu",
        "model.hf_assets_path": str(prepare_tokenizer(folder / "assets", kind="bytes")),
        "optimizer.implementation": "foreach",
        "training.dataset": "synthetic",
        "training.dataset_path": "lognormal:median=100,sigma=1,max=256,seed=1",
        "training.local_batch_size": 2,
        "training.seq_len": 256,
        "training.steps": 2,
        "training.mixed_precision_param": "float32",
        "lr_scheduler.warmup_steps": 1,
        "parallelism.cad": True,
        "activation_checkpoint.mode": "none",
        "comm.init_timeout_seconds": 60,
        "comm.train_timeout_seconds": 60,
    }
    saved = {
        "checkpoint.enable": True,
        "checkpoint.interval": 1,
        "metrics.log_freq": 1,
        "metrics.enable_tensorboard": True,
        "validation.enable": True,
        "validation.dataset": "c4_test",
        "validation.dataset_path": str(text.parent),
        "validation.local_batch_size": 2,
        "validation.seq_len": 256,
        "validation.freq": 1,
        "validation.steps": 1,
    }
    pipeline = {
        "parallelism.pipeline_parallel_degree": 2,
        "parallelism.pipeline_parallel_schedule": "CAD1F1B",
        "training.local_batch_size": 4,
    }
    tensors = {
        "parallelism.tensor_parallel_degree": 2,
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "op",
        "cad.nano_batches": 2,
    }
    experts = {
        "model.name": "deepseek_v3",
        "model.flavor": "tiny",
        "parallelism.expert_parallel_degree": 2,
        "profiling.enable_profiling": True,
        "profiling.profile_freq": 2,
        "profiling.profiler_warmup": 1,
    }
    return {
        "data": common,
        "saved": common | saved,
        "pipeline": common | pipeline,
        "tensors": common | tensors,
        "experts": common | experts,
        "stock": common | saved | {"parallelism.cad": False},
    }


def draw_value(rng: Random, kind: Any) -> Any:
    """Draw a value of the type of a key, which is at times out of bounds."""
    origin = get_origin(kind)
    args = get_args(kind)
    if origin is Literal:
        return rng.choice([*args, "x"])
    if origin in (Union, types.UnionType):
        return draw_value(
            rng, rng.choice([arg for arg in args if arg is not types.NoneType])
        )
    if origin is list:
        return [draw_value(rng, args[0]) for _ in range(rng.randrange(3))]
    choices: dict[Any, Sequence[Any]] = {
        bool: (True, False),
        int: INTEGERS,
        float: NUMBERS,
        str: TEXTS,
    }
    return rng.choice(choices[kind])


def job_keys(config_cls: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key with its type."""
    for field in dataclasses.fields(config_cls):
        if dataclasses.is_dataclass(field.type):
            yield from job_keys(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field.type


def changeable_keys() -> Iterator[tuple[str, Any]]:
    """Yield every key of a job with CAD, and its type, but for those that name the file or modules."""
    config_cls = CadConfigManager()._maybe_add_custom_config([], None)
    left_out = (
        "job.config_file",
        "job.custom_config_module",
        "experimental.custom_args_module",
        "quantize.",
    )
    return (item for item in job_keys(config_cls) if not item[0].startswith(left_out))


def toml_of(job: Job) -> str:
    """Return the job as lines of TOML, of which numbers, texts and lists are those of JSON (and inf and nan)."""
    lines = (
        f"{key} = {value if isinstance(value, float) else json.dumps(value)}"
        for key, value in job.items()
    )
    return "\n".join(lines) + "\n"


class Outcome(NamedTuple):
    """How a process ended."""

    passes: bool
    said: str
    """the line of the error, or of checks that fail"""
    is_readable: bool
    """an error is one line, without a stack"""


STORES = """
import sys
from torch.distributed import TCPStore
for _ in sys.stdin:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
"""
"""Program that makes the key-value store of a job, as torchrun does, so that it does not end with the first rank."""


def train_job(toml: Path, folder: Path, stores: subprocess.Popen[str]) -> Outcome:
    """Train on two forked ranks, by a store of ``stores``."""
    assert stores.stdin is not None
    assert stores.stdout is not None
    print(file=stores.stdin, flush=True)
    port = stores.stdout.readline().strip()
    env = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    env |= {"LOCAL_WORLD_SIZE": str(RANKS), "TORCHELASTIC_RUN_ID": folder.name}
    logs = [str(folder / f"rank{rank}.log") for rank in range(RANKS)]
    codes = rank_server.run_job(
        [f"--job.config_file={toml}"], env, logs, TIMEOUT_S, _train
    )
    text = "".join(Path(log).read_text(errors="replace") for log in logs)
    if codes == [0] * RANKS:
        return Outcome(True, DATA_ENDS if DATA_ENDS in text else "", True)
    errors = sorted({line for line in text.splitlines() if line.startswith("error: ")})
    stacks = text.count("Traceback (most recent call last)")
    last_line = (text.splitlines() or [""])[-1]
    if stacks or not errors:
        errors.append(f"exit codes {codes}, {stacks} stacks: {last_line}")
    said = " | ".join(errors)
    return Outcome(False, said, len(errors) == 1 and not stacks)


def _train(arguments: list[str]) -> None:
    import torchtitan.train as titan_train

    sys.argv = ["train", *arguments]
    # The default of parse_args() was bound to this script's sys.argv when torchtitan was imported.
    CadConfigManager.parse_args.__defaults__ = (arguments,)
    titan_train.time = types.SimpleNamespace(
        perf_counter=time.perf_counter, sleep=lambda seconds: None
    )
    train.main()


def examine_job(toml: Path, folder: Path) -> Outcome:
    """Let doctor examine the job in a forked process."""
    log = folder / "doctor.log"
    (code,) = rank_server.run_job([str(toml)], {}, [str(log)], TIMEOUT_S, _examine)
    if code == 0:
        return Outcome(True, "", True)
    lines = log.read_text(errors="replace").splitlines()
    failing = [line for line in lines if line.startswith("FAIL")]
    said = " | ".join(failing) or f"exit code {code}: {(lines or [''])[-1]}"
    return Outcome(False, said, bool(failing))


def _examine(arguments: list[str]) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]
    failed = False
    for finding in examine([f"--job.config_file={arguments[0]}"], RANKS):
        print(finding)
        failed |= finding.level == "FAIL"
    sys.exit(int(failed))


def agree(
    case: Case, bases: dict[str, Job], folder: Path, stores: subprocess.Popen[str]
) -> bool:
    """Print what both say of a base with one other value, and tell whether they agree."""
    base, key, value = case
    folder.mkdir()
    toml = folder / "job.toml"
    toml.write_text(
        toml_of({"job.dump_folder": str(folder / "outputs"), **bases[base], key: value})
    )
    doctor = examine_job(toml, folder)
    training = train_job(toml, folder, stores)
    both = (
        doctor.passes == training.passes and doctor.is_readable and training.is_readable
    )
    print(f"{'agree' if both else 'DISAGREE'} {base}: {key} = {value!r:.60}")
    print(f"    doctor:   {'passes' * doctor.passes}{doctor.said}")
    print(f"    training: {'passes ' * training.passes}{training.said}", flush=True)
    return both


def draw_cases(count: int, seed: int, bases: dict[str, Job]) -> list[Case]:
    """Draw bases in turn, and for each a key and a value that does not take too long."""
    rng = Random(seed)
    kinds = list(changeable_keys())
    cases: list[Case] = []
    while len(cases) < count:
        base = list(bases)[len(cases) % len(bases)]
        key, kind = rng.choice(kinds)
        value = draw_value(rng, kind)
        largest = LARGEST.get(key.split(".")[-1])
        if largest is None or value <= largest:
            cases.append((base, key, value))
    return cases


def main(count: int = 300, seed: int = 0) -> int:
    """Try ``count`` jobs, dealt to the six bases in turn, with keys and values of ``seed``."""
    tiny_models.register_flavors()
    warm_up()
    warm_up_placement()
    with (
        tempfile.TemporaryDirectory() as name,
        subprocess.Popen(
            [sys.executable, "-c", STORES],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as stores,
    ):
        os.chdir(name)  # where jobs with relative folders leave what they write
        bases = base_jobs(Path(name))
        cases = draw_cases(count, seed, bases)
        disagreements = 0
        for index, case in enumerate(tqdm(cases, disable=not sys.stderr.isatty())):
            disagreements += not agree(case, bases, Path(name, str(index)), stores)
        stores.communicate()
    print(f"{disagreements} of {count} disagree")
    return int(disagreements > 0)


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
