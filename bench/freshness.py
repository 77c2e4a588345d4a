# SPDX-License-Identifier: BSD-3-Clause
"""Which results of bench/results are older than the code that they speak of.

    python -m bench.freshness          # a line for every result that is stale; exit code 1 if there is one

A result is of the commit that it records or, without one, of the last commit that changed its file. It is stale if the
code that it speaks of has changed since then, or had changes that were not committed.
"""

import json
import sys
from pathlib import Path

from bench.record import ROOT, git

RESULTS = Path("bench/results")
PLANNING = "torchtitan_cad/planning"
RUNTIME = "torchtitan_cad/runtime"
PINGPONG = "torchtitan_cad/integration/pingpong"
SIMULATION = "torchtitan_cad/tools/simulation"
JOBS = "train_configs"
COMPUTED: dict[str, tuple[str, ...]] = {
    "headline.json": (PLANNING, SIMULATION, JOBS, "bench/headline.py"),
    "models.json": (PLANNING, SIMULATION, "bench/models.py"),
    "paper.json": (PLANNING, SIMULATION, "bench/paper.py"),
    "pipeline.json": (PLANNING, "bench/pipeline.py"),
    "placement.json": (f"{PLANNING}/placement", "bench/placement.py"),
    "planner.json": (PLANNING, "bench/planner.py"),
    "tolerance.json": (PLANNING, SIMULATION, "bench/tolerance.py"),
}
"""Files and folders of code by result, of results that any machine computes alike: they may not be older than their
code (`make results`)."""
MEASURED: dict[str, tuple[str, ...]] = {
    "by_commit.json": ("bench/by_commit.py",),
    "compare_cpu.json": (PLANNING, RUNTIME, "torchtitan_cad/tools/compare"),
    "gpu": (RUNTIME, "bench/gpu"),
    "long_run.json": (PLANNING, RUNTIME, "bench/long_run.py"),
    "network.json": (RUNTIME, "bench/network.py"),
    "overlap.json": (RUNTIME, PINGPONG, "bench/overlap.py"),
    "profile_h200.json": (f"{RUNTIME}/kernels",),
    "servers.json": (
        f"{PLANNING}/servers.py",
        f"{RUNTIME}/servers",
        "torchtitan_cad/tools/attention_server.py",
        "bench/servers.py",
    ),
    "streams.json": (RUNTIME, PINGPONG, "bench/streams.py"),
}
"""The same of results that need a GPU, idle cores or hours: pages that quote one give its date, and ``main`` lists
those that are older than their code."""
SPEAKS_OF = COMPUTED | MEASURED


def why_stale(name: str, root: Path = ROOT) -> str:
    """Say why a result is stale; empty if it is fresh."""
    path = root / RESULTS / name
    heads = [_head(file) for file in sorted(path.glob("*.json"))] or [_head(path)]
    if any(head.get("clean") is False for head in heads):
        return "measured with changes that were not committed"
    last = git(root, "log", "-1", "--format=%H", "--", str(RESULTS / name))
    commits = {head.get("commit") or last for head in heads}
    for commit in sorted(commits):
        places = SPEAKS_OF[name]
        found = git(root, "diff", "--name-only", commit, "HEAD", "--", *places)
        if found is None:
            return f"measured at commit {commit}, which is not known here"
        if changed := found.split():
            return f"{len(changed)} files have changed since {commit[:12]}, such as {changed[0]}"
    return ""


def _head(path: Path) -> dict[str, object]:
    found = json.loads(path.read_text()) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def main() -> int:
    reasons = {name: why_stale(name) for name in SPEAKS_OF}
    for name, reason in reasons.items():
        if reason:
            print(f"{name}: {reason}")
    return int(any(reasons.values()))


if __name__ == "__main__":
    sys.exit(main())
