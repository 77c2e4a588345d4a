"""Hostile command lines of ``torchtitan-cad``, by seed, and a process that runs them under a memory limit.

    python -m tests.hostile layouts|jobs FOLDER RESULTS FIRST LAST

Jobs are for the commands that read one; a folder ``assets`` with a tokenizer stands beside those of their cases. Files
that a case's arguments name are written to its folder first. Two lines of JSON per case go to the results: its
arguments, and exit code, output, processor seconds and the peak memory of the process so far.
"""

import copy
import io
import json
import resource
import sys
import time
import tomllib
import traceback
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from random import Random
from typing import Any

from tests.profiles import make_profile
from torchtitan_cad.cli import main

ADDRESS_SPACE = 8 * 2**30
"""Bytes; what asks for more gets a MemoryError instead of the machine's memory."""

NUMBERS = ["0", "-1", "1", "3", "128", "1e18", "1e100", "1e300", "-1e300", "nan", "inf", "two", "", "1_000", "0x10"]
NUMBERS += [str(2**31), str(2**31 + 1), str(2**63), str(2**70), "9" * 400, "9" * 5000, "1.5", "True", "None", "١٢"]
VALUES: list[Any] = [None, True, False, "no", "128", "", 128.9, 0, -1, 1, 2**31, 2**62, 2**63, 2**70, 10**400, 1e18]
VALUES += [1e100, 1e308, float("nan"), float("inf"), [], {}, [[]], {"doc": 0}, "a\nb", "\x00", "é" * 300]
VALUES += [list(range(99))]
TEXTS = [b"", b"{", b"null", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe{}", b"9" * 5000, b"NaN", b"[1e999]"]
TEXTS += [b'{"attention": 1, "attention": 2}', b"\x00" * 1000, b'"' + b"a" * 100_000, b"{}" * 3]
TEXTS += [b"[" * 900 + b"]" * 900]
PATHS = ["/", "/dev/null", "/dev/zero", "/dev/full", "/proc/self/mem", "", "\x00", "a" * 300, "none/none", ".", "--"]
PICTURES = ["/dev/null", "none/plan.png", ".", "", "plan", "plan.docx", "plan.png", "plan.svg", ".png"]
PLAN_OPTIONS = ["--tolerance", "--min-shard", "--tile", "--ranks-per-node", "--inter-node-weight"]
PLAN_OPTIONS += ["--rank-speeds", "--planner"]
PROFILE_OPTIONS = ["--num-heads", "--num-kv-heads", "--head-dim", "--q-lengths", "--kv-lengths", "--repeats"]
PROFILE_OPTIONS += ["--kernel", "--dtype", "--device"]
WORDS = [[], ["fly"], ["plan"], ["profile"], ["plan", "--"], ["plan", "a", "b"], ["--version", "x"], ["plan", "-o"]]
WORDS += [["--help"], ["--version"], ["plan", "--help"], ["prepare", "--vocab-size", "9" * 99]]
WORDS += [["prepare", "--kind", "x"], ["prepare", "--sources", "/none"], ["prepare", "--output", "/dev/null"]]
WORDS += [["prepare", "--vocab-size", "-1"]]
LARGE: list[tuple[list[int], int]] = [([10**6], 2), ([5 * 10**6, 3 * 10**6], 64), ([1] * 50_000, 8)]
LARGE += [([128] * 5000, 2000), ([1], 70_000), ([1], 60_000), ([10**8], 8), ([2**31 - 1], 8), ([10**9] * 3, 8)]
LARGE += [([10**12], 2), ([8 * 10**12], 8), ([2**61], 2), ([2**27], 4096)]
"""Lengths of documents, and ranks."""
JOB = Path(__file__).resolve().parents[1] / "train_configs" / "llama3_debug_cpu.toml"
SMALL = ["--ranks=8", "--layers=2", "--hidden=512", "--heads=4", "--kv-heads=2", "--head-dim=128", "--ffn=1024"]
SMALL += ["--vocabulary=512", "--tokens-per-rank=4096", "--batches=1", "--pp=1", "--checkpointing=none"]
SMALL += ["--nano-batches=1"]
"""Without choices among which every system would search for its best."""
SIMULATED = ["--layers", "--hidden", "--heads", "--kv-heads", "--head-dim", "--ffn", "--vocabulary", "--dtype-bytes"]
SIMULATED += ["--ranks", "--ranks-per-node", "--tp", "--pp", "--cp", "--net", "--node", "--latency", "--memory"]
SIMULATED += ["--linear-flops", "--attention-flops", "--backward-flops", "--row-tokens"]
SIMULATED += ["--tokens-per-rank", "--microbatches", "--batches", "--seed", "--tolerance", "--nano-batches", "--model"]
SIMULATED += ["--checkpointing", "--fsdp"]
DOCUMENTS = ["lognormal", "lognormal:median=0", "lognormal:median=1,sigma=1e300", "uniform:min=9,max=1", "zipf:a=2"]
DOCUMENTS += ["fixed:length=1e18", "fixed:length=nan", "pretrain:scale=0", "pretrain:long=2", "uniform:min=1,max=1e99"]
DOCUMENTS += ["", ":", "fixed:", "fixed:length", "fixed:length=1", "none.json", ".", "lognormal:median=inf"]
KEYS = ["--training.seq_len", "--training.local_batch_size", "--training.global_batch_size", "--training.steps"]
KEYS += ["--parallelism.tensor_parallel_degree", "--parallelism.context_parallel_degree", "--cad.min_shard"]
KEYS += ["--parallelism.pipeline_parallel_degree", "--parallelism.data_parallel_shard_degree", "--cad.tolerance"]
KEYS += ["--cad.rank_speeds", "--cad.ranks_per_node", "--cad.nano_batches", "--cad.profile"]
KEYS += ["--cad.heartbeat_seconds", "--training.dataset_path", "--model.flavor", "--comm.mode", "--checkpoint.folder"]
NO_NUMBERS = ["0", "-1", "nan", "two", "", "1.5", "1e18", "9" * 5000, "None"]


def case(kind: str, seed: int, folder: Path) -> list[str]:
    """Arguments of the case of that kind and seed, whose files are in ``folder``."""
    kinds: list[Callable[[Random, Path], list[str]]]
    if kind == "layouts":
        kinds = [_mutated_layout, _mutated_layout, _options, _options, _large, _text, _profile_file, _files, _measure]
        kinds += [lambda rng, folder: rng.choice(WORDS)]
    else:
        kinds = [_doctor_job, _simulate, _doctor_options, _simulate_job, _compare, _doctor_job, _simulate, _advise]
    return kinds[seed % len(kinds)](Random(seed), folder)


def _layout(rng: Random, lengths: list[int] | None = None, num_ranks: int | None = None) -> dict[str, Any]:
    """A valid layout: documents one after the other, cut where ranks end."""
    num_ranks = num_ranks or rng.choice([1, 2, 3, 8, 17])
    lengths = lengths or [rng.choice([1, 7, 128, 1000, 5000, 40000]) for _ in range(rng.randint(1, 30))]
    share = -(-sum(lengths) // num_ranks)
    ranks: list[list[dict[str, int]]] = [[] for _ in range(num_ranks)]
    position = 0
    for doc, length in enumerate(lengths):
        start = 0
        while start < length:
            rank = position // share
            take = min(length - start, (rank + 1) * share - position)
            ranks[rank].append({"doc": doc, "start": start, "length": take})
            start, position = start + take, position + take
    heads = rng.choice([(32, 8, 128, 2), (1, 1, 1, 1), (64, 8, 128, 2), (4, 2, 16, 4)])
    return {
        "attention": dict(zip(("num_heads", "num_kv_heads", "head_dim", "dtype_bytes"), heads, strict=True)),
        "ranks": ranks,
    }


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
                node[rng.choice(["attend", "attends", "spread", "", "doc "])] = rng.choice(VALUES)
            else:
                node.append(copy.deepcopy(node[key]))
            break
    return data


def _write(path: Path, data: Any) -> str:
    path.write_text(json.dumps(data))
    return str(path)


def _some_options(rng: Random, names: list[str]) -> list[str]:
    words = []
    for name in rng.sample(names, rng.randint(1, 2)):
        words += [name, *rng.choices(NUMBERS, k=rng.choice([1, 1, 1, 3]) if "s" in name[-1] else 1)]
    return words


def _mutated_layout(rng: Random, folder: Path) -> list[str]:
    options = ["--validate"] if rng.random() < 0.5 else []
    return ["plan", _write(folder / "layout.json", _mutate(rng, _layout(rng))), *options]


def _options(rng: Random, folder: Path) -> list[str]:
    return ["plan", _write(folder / "layout.json", _layout(rng)), *_some_options(rng, PLAN_OPTIONS)]


def _large(rng: Random, folder: Path) -> list[str]:
    """Long documents, many ranks, many segments."""
    lengths, num_ranks = rng.choice(LARGE)
    options = rng.choice([[], [], ["--planner", "greedy"], ["--no-split-kv"], ["--ranks-per-node", "8"]])
    return ["plan", _write(folder / "layout.json", _layout(rng, lengths, num_ranks)), *options]


def _text(rng: Random, folder: Path) -> list[str]:
    path = folder / "layout.json"
    path.write_bytes(rng.choice(TEXTS))
    return ["plan", str(path)]


def _profile_file(rng: Random, folder: Path) -> list[str]:
    data = json.loads(make_profile().to_json())
    data["grid"] |= {key: [[0.1] * 3] * 3 for key in ("forward_spread", "backward_spread")}
    profile = folder / "profile.json"
    if rng.random() < 0.2:
        profile.write_bytes(rng.choice(TEXTS))
    else:
        _write(profile, _mutate(rng, data))
    layout = _layout(rng)
    layout["attention"] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype_bytes": 2}
    return ["plan", _write(folder / "layout.json", layout), "--profile", str(profile)]


def _place(folder: Path, path: str) -> str:
    return path if path.startswith(("/", "--")) or not path else str(folder / path)


def _files(rng: Random, folder: Path) -> list[str]:
    layout = _write(folder / "layout.json", _layout(rng)) if rng.random() < 0.7 else _place(folder, rng.choice(PATHS))
    words = ["plan", layout]
    words += ["--output", _place(folder, rng.choice(PATHS))] if rng.random() < 0.5 else []
    words += ["--plot", _place(folder, rng.choice(PICTURES))] if rng.random() < 0.5 else []
    return words


def _measure(rng: Random, folder: Path) -> list[str]:
    small = ["--num-heads", "2", "--num-kv-heads", "1", "--head-dim", "16", "--repeats", "2", "--device", "cpu"]
    small += ["--q-lengths", "64", "--kv-lengths", "128"]
    return ["profile", "--output", str(folder / "out.json"), *small, *_some_options(rng, PROFILE_OPTIONS)]


def _toml(value: Any) -> str:
    """Tables are inline ones, which all other values may contain."""
    match value:
        case dict():
            return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items() if v is not None) + "}"
        case list():
            return "[" + ", ".join(_toml(item) for item in value if item is not None) + "]"
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
    path.write_text("\n".join(f"{json.dumps(k)} = {_toml(value)}" for k, value in tables.items() if value is not None))
    return str(path)


def _assets(folder: Path) -> list[str]:
    return [f"--model.hf_assets_path={folder.parent / 'assets'}", f"--job.dump_folder={folder / 'outputs'}"]


def _overrides(rng: Random) -> list[str]:
    return [f"{key}={rng.choice(NUMBERS)}" for key in rng.sample(KEYS, rng.randint(1, 2))]


def _doctor_job(rng: Random, folder: Path) -> list[str]:
    return ["doctor", _job(rng, folder), "--nproc", rng.choice(["1", "2", "4"]), *_assets(folder)]


def _doctor_options(rng: Random, folder: Path) -> list[str]:
    words = ["doctor", str(JOB), "--nproc", "2", *_assets(folder)]
    if rng.random() < 0.3:
        words += [rng.choice(["--nproc", "--nnodes"]), rng.choice(NUMBERS)]
    return [*words, *_overrides(rng)]


def _numbers(rng: Random) -> list[str]:
    return [f"{key}={rng.choice(NUMBERS)}" for key in rng.sample(SIMULATED, rng.randint(1, 2))]


def _simulate(rng: Random, folder: Path) -> list[str]:
    words = ["simulate", *SMALL, *_numbers(rng)]
    words += [f"--documents={rng.choice(DOCUMENTS)}"] if rng.random() < 0.4 else []
    words += ["--output", _place(folder, rng.choice(PATHS))] if rng.random() < 0.1 else []
    words += ["--plot", _place(folder, rng.choice(PICTURES))] if rng.random() < 0.1 else []
    words += ["--profile", _place(folder, rng.choice(PATHS))] if rng.random() < 0.1 else []
    return words


def _simulate_job(rng: Random, folder: Path) -> list[str]:
    words = ["simulate", _job(rng, folder), "--batches=1"]
    return [*words, *(_numbers(rng) if rng.random() < 0.5 else _overrides(rng))]


def _advise(rng: Random, folder: Path) -> list[str]:
    words = ["advise", _job(rng, folder), "--batches=1", "--ranks=2"]
    return [*words, *(_numbers(rng) if rng.random() < 0.5 else [])]


def _compare(rng: Random, folder: Path) -> list[str]:
    """Only what must be refused: whatever makes sense is trained."""
    words = ["compare", "--output", str(folder / "outputs"), "--steps", "2", "--warmup", "0", "--rounds", "1"]
    wrong = [
        lambda: [str(JOB), rng.choice(["--steps", "--rounds", "--nproc"]), rng.choice(NO_NUMBERS)],
        lambda: [str(JOB), "--nproc", rng.choice(["1000000", str(2**31), str(2**63), "9" * 30])],
        lambda: [_place(folder, rng.choice([path for path in PATHS if not path.startswith("/proc")]))],
        lambda: [str(JOB), "--output", rng.choice(["/dev/null", "/proc/none", "\x00", "a" * 300])],
        lambda: [str(JOB), f"--{''.join(rng.choices('abc-.=', k=6))}"],
    ]
    return [*words, *rng.choice(wrong)()]


def _peak_bytes() -> int:
    """Peak resident memory of this program; ``ru_maxrss`` would begin with that of the process which started it."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
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
    kind, parent, results = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if kind == "layouts":  # torch warns, which jobs import
        warnings.simplefilter("always")
    with results.open("w") as file:
        for seed in range(*map(int, sys.argv[4:])):
            (parent / str(seed)).mkdir()
            arguments = case(kind, seed, parent / str(seed))
            print(json.dumps({"seed": seed, "arguments": arguments}), file=file, flush=True)
            print(json.dumps(run(arguments)), file=file, flush=True)
