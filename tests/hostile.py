# SPDX-License-Identifier: BSD-3-Clause
"""Hostile command lines of ``torchtitan-cad``, by seed, and a process that runs them under a memory limit.

    python -m tests.hostile FOLDER RESULTS FIRST LAST

They are those that read a job; a folder ``assets`` with a tokenizer stands beside those of the cases. Files that a
case's arguments name are written to its folder first. Two lines of JSON per case go to the results: its arguments, and
exit code, output, processor seconds and the peak memory of the process so far.
"""

import copy
import io
import json
import resource
import sys
import time
import tomllib
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from random import Random
from typing import Any

from torchtitan_cad.tools.main import main

ADDRESS_SPACE = 8 * 2**30
"""Bytes; what asks for more gets a MemoryError instead of the machine's memory."""

NUMBERS = [
    "0",
    "-1",
    "1",
    "3",
    "128",
    "1e18",
    "1e100",
    "1e300",
    "-1e300",
    "nan",
    "inf",
    "two",
    "",
    "1_000",
    "0x10",
]
NUMBERS += [
    str(2**31),
    str(2**31 + 1),
    str(2**63),
    str(2**70),
    "9" * 400,
    "9" * 5000,
    "1.5",
    "True",
    "None",
    "١٢",
]
VALUES: list[Any] = [
    None,
    True,
    False,
    "no",
    "128",
    "",
    128.9,
    0,
    -1,
    1,
    2**31,
    2**62,
    2**63,
    2**70,
    10**400,
    1e18,
]
VALUES += [
    1e100,
    1e308,
    float("nan"),
    float("inf"),
    [],
    {},
    [[]],
    {"doc": 0},
    "a\nb",
    "\x00",
    "é" * 300,
]
VALUES += [list(range(99))]
TEXTS = [
    b"",
    b"{",
    b"null",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"\xff\xfe{}",
    b"9" * 5000,
    b"NaN",
    b"[1e999]",
]
TEXTS += [
    b'{"attention": 1, "attention": 2}',
    b"\x00" * 1000,
    b'"' + b"a" * 100_000,
    b"{}" * 3,
]
TEXTS += [b"[" * 900 + b"]" * 900]
PATHS = [
    "/",
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/proc/self/mem",
    "",
    "\x00",
    "a" * 300,
    "none/none",
    ".",
    "--",
]
PICTURES = [
    "/dev/null",
    "none/plan.png",
    ".",
    "",
    "plan",
    "plan.docx",
    "plan.png",
    "plan.svg",
    ".png",
]
JOB = Path(__file__).resolve().parents[1] / "train_configs" / "llama3_debug_cpu.toml"
SMALL = [
    "--ranks=8",
    "--layers=2",
    "--hidden=512",
    "--heads=4",
    "--kv-heads=2",
    "--head-dim=128",
    "--ffn=1024",
]
SMALL += [
    "--vocabulary=512",
    "--tokens-per-rank=4096",
    "--batches=1",
    "--pp=1",
    "--checkpointing=none",
]
SMALL += ["--nano-batches=1"]
"""Without choices among which every system would search for its best."""
SIMULATED = [
    "--layers",
    "--hidden",
    "--heads",
    "--kv-heads",
    "--head-dim",
    "--ffn",
    "--vocabulary",
    "--dtype-bytes",
]
SIMULATED += [
    "--ranks",
    "--ranks-per-node",
    "--tp",
    "--pp",
    "--cp",
    "--net",
    "--node",
    "--latency",
    "--memory",
]
SIMULATED += ["--linear-flops", "--attention-flops", "--backward-flops", "--row-tokens"]
SIMULATED += [
    "--tokens-per-rank",
    "--microbatches",
    "--batches",
    "--seed",
    "--tolerance",
    "--nano-batches",
    "--model",
]
SIMULATED += ["--checkpointing", "--fsdp"]
DOCUMENTS = [
    "lognormal",
    "lognormal:median=0",
    "lognormal:median=1,sigma=1e300",
    "uniform:min=9,max=1",
    "zipf:a=2",
]
DOCUMENTS += [
    "fixed:length=1e18",
    "fixed:length=nan",
    "pretrain:scale=0",
    "pretrain:long=2",
    "uniform:min=1,max=1e99",
]
DOCUMENTS += [
    "",
    ":",
    "fixed:",
    "fixed:length",
    "fixed:length=1",
    "none.json",
    ".",
    "lognormal:median=inf",
]
KEYS = [
    "--training.seq_len",
    "--training.local_batch_size",
    "--training.global_batch_size",
    "--training.steps",
]
KEYS += [
    "--parallelism.tensor_parallel_degree",
    "--parallelism.context_parallel_degree",
    "--cad.min_shard",
]
KEYS += [
    "--parallelism.pipeline_parallel_degree",
    "--parallelism.data_parallel_shard_degree",
    "--cad.tolerance",
]
KEYS += [
    "--cad.rank_speeds",
    "--cad.ranks_per_node",
    "--cad.nano_batches",
    "--cad.profile",
]
KEYS += [
    "--cad.heartbeat_seconds",
    "--training.dataset_path",
    "--model.flavor",
    "--comm.mode",
    "--checkpoint.folder",
]


def case(seed: int, folder: Path) -> list[str]:
    """Arguments of the case of that seed, whose files are in ``folder``."""
    kinds: list[Callable[[Random, Path], list[str]]]
    kinds = [
        _doctor_job,
        _simulate,
        _doctor_options,
        _simulate_job,
        _doctor_options,
        _doctor_job,
        _simulate,
        _advise,
    ]
    return kinds[seed % len(kinds)](Random(seed), folder)


def _mutate(rng: Random, data: Any) -> Any:
    """One to three values anywhere in it replaced, removed or added."""
    data = copy.deepcopy(data)
    for _ in range(rng.randint(1, 3)):
        node = data
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(node[key], (dict, list)) and rng.random() < 0.85:
                node = node[key]
                continue
            action = rng.random()
            if action < 0.75:
                node[key] = copy.deepcopy(rng.choice(VALUES))
            elif action < 0.9:
                del node[key]
            elif isinstance(node, dict):
                node[rng.choice(["attend", "attends", "spread", "", "doc "])] = (
                    rng.choice(VALUES)
                )
            else:
                node.append(copy.deepcopy(node[key]))
            break
    return data


def _place(folder: Path, path: str) -> str:
    return path if path.startswith(("/", "--")) or not path else str(folder / path)


def _toml(value: Any) -> str:
    """Tables are inline ones, which all other values may contain."""
    match value:
        case dict():
            return (
                "{"
                + ", ".join(
                    f"{json.dumps(k)} = {_toml(v)}"
                    for k, v in value.items()
                    if v is not None
                )
                + "}"
            )
        case list():
            return (
                "[" + ", ".join(_toml(item) for item in value if item is not None) + "]"
            )
        case float():
            return str(value)
    return json.dumps(value)


def _job(rng: Random, folder: Path) -> str:
    """A job with one to three values anywhere in it replaced, removed or added; or none at all."""
    path = folder / "job.toml"
    if rng.random() < 0.1:
        path.write_bytes(rng.choice(TEXTS))
        return str(path)
    tables = _mutate(rng, tomllib.loads(JOB.read_text()))
    path.write_text(
        "\n".join(
            f"{json.dumps(k)} = {_toml(value)}"
            for k, value in tables.items()
            if value is not None
        )
    )
    return str(path)


def _assets(folder: Path) -> list[str]:
    return [
        f"--model.hf_assets_path={folder.parent / 'assets'}",
        f"--job.dump_folder={folder / 'outputs'}",
    ]


def _overrides(rng: Random) -> list[str]:
    return [
        f"{key}={rng.choice(NUMBERS)}" for key in rng.sample(KEYS, rng.randint(1, 2))
    ]


def _doctor_job(rng: Random, folder: Path) -> list[str]:
    return [
        "doctor",
        _job(rng, folder),
        "--nproc",
        rng.choice(["1", "2", "4"]),
        *_assets(folder),
    ]


def _doctor_options(rng: Random, folder: Path) -> list[str]:
    words = ["doctor", str(JOB), "--nproc", "2", *_assets(folder)]
    words += (
        [rng.choice(["--nproc", "--nnodes"]), rng.choice(NUMBERS)]
        if rng.random() < 0.3
        else []
    )
    return [*words, *_overrides(rng)]


def _numbers(rng: Random) -> list[str]:
    return [
        f"{key}={rng.choice(NUMBERS)}"
        for key in rng.sample(SIMULATED, rng.randint(1, 2))
    ]


def _simulate(rng: Random, folder: Path) -> list[str]:
    words = ["simulate", *SMALL, *_numbers(rng)]
    words += [f"--documents={rng.choice(DOCUMENTS)}"] if rng.random() < 0.4 else []
    words += (
        ["--output", _place(folder, rng.choice(PATHS))] if rng.random() < 0.1 else []
    )
    words += (
        ["--plot", _place(folder, rng.choice(PICTURES))] if rng.random() < 0.1 else []
    )
    words += (
        ["--profile", _place(folder, rng.choice(PATHS))] if rng.random() < 0.1 else []
    )
    return words


def _simulate_job(rng: Random, folder: Path) -> list[str]:
    words = ["simulate", _job(rng, folder), "--batches=1"]
    return [*words, *(_numbers(rng) if rng.random() < 0.5 else _overrides(rng))]


def _advise(rng: Random, folder: Path) -> list[str]:
    words = ["advise", _job(rng, folder), "--batches=1", "--ranks=2"]
    return [*words, *(_numbers(rng) if rng.random() < 0.5 else [])]


def _peak_bytes() -> int:
    """Peak resident memory of this program; ``ru_maxrss`` would begin with that of the process which started it."""
    (line,) = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM:")
    ]
    return 1024 * int(line.split()[1])


def run(argv: list[str]) -> dict[str, Any]:
    """Exit code, output, time and memory of a command line."""
    out, err = io.StringIO(), io.StringIO()
    begin = time.process_time()
    code: int | None = None
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(argv)
        except BaseException:
            traceback.print_exc()
    return {
        "code": code,
        "out": out.getvalue(),
        "err": err.getvalue(),
        "seconds": time.process_time() - begin,
        "peak_bytes": _peak_bytes(),
    }


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    parent, results = Path(sys.argv[1]), Path(sys.argv[2])
    with results.open("w") as file:
        for seed in range(*map(int, sys.argv[3:])):
            (parent / str(seed)).mkdir()
            arguments = case(seed, parent / str(seed))
            print(
                json.dumps({"seed": seed, "arguments": arguments}),
                file=file,
                flush=True,
            )
            print(json.dumps(run(arguments)), file=file, flush=True)
