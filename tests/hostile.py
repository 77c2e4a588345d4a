"""Hostile command lines of ``torchtitan-cad``, by seed, and a process that runs them under a memory limit.

    python -m tests.hostile FOLDER RESULTS FIRST LAST

Files that a case's arguments name are written to the folder first. Two lines of JSON per case go to the results: its
arguments, and exit code, output, processor seconds and the peak memory of the process so far.
"""

import copy
import io
import json
import resource
import sys
import time
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
PLAN_OPTIONS = ["--tolerance", "--min-shard", "--tile", "--max-recv-queries", "--max-recv-keys", "--ranks-per-node"]
PLAN_OPTIONS += ["--inter-node-weight", "--rank-speeds", "--planner"]
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


def case(seed: int, folder: Path) -> list[str]:
    """Arguments of the case of that seed, whose files are in ``folder``."""
    kinds: list[Callable[[Random, Path], list[str]]]
    kinds = [_mutated_layout, _mutated_layout, _options, _options, _large, _text, _profile_file, _files, _measure]
    kinds += [lambda rng, folder: rng.choice(WORDS)]
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


def run_cases(case: Callable[[int, Path], list[str]]) -> None:
    """Runs the cases that the process's arguments name."""
    folder, results = map(Path, sys.argv[1:3])
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    with results.open("w") as file:
        for seed in range(*map(int, sys.argv[3:5])):
            place = folder / str(seed)
            place.mkdir()
            arguments = case(seed, place)
            print(json.dumps({"seed": seed, "arguments": arguments}), file=file, flush=True)
            print(json.dumps(run(arguments)), file=file, flush=True)


if __name__ == "__main__":
    warnings.simplefilter("always")
    run_cases(case)
