# SPDX-License-Identifier: BSD-3-Clause
"""What a step of one fixed job takes, by commit of this repository.

    torchtitan-cad prepare --output outputs/assets
    python -m bench.by_commit HEAD~200 HEAD --output bench/results/by_commit.json

Every commit is checked out in a folder of its own and trains the job of ``make train`` there, on two ranks, with the
packages of this environment. Commits take turns, ``rounds`` times, so that all have the same share of what else the
machine does. Nothing else should run then. A step's seconds are its tokens over those per second that torchtitan logs.
"""

import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import tyro
from tqdm import tqdm

from bench.jobs import COLOUR, train_command
from bench.record import ROOT, Record, conclude

RANKS = 2
SPEED = re.compile(r"step: +(\d+) .*tps: ([\d,]+)")
"""A step's number, and tokens per second of one rank."""


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        commits: names of commits, oldest first.
        steps: of the job that count; of all commits the same documents.
        warmup: first steps that do not count.
        rounds: jobs of every commit.
        seq_len: tokens of a row; a rank trains one row a step.
        timeout_s: of one job.
        output: file for the figures.
    """

    commits: tyro.conf.Positional[tuple[str, ...]] = ("HEAD",)
    steps: int = 10
    warmup: int = 2
    rounds: int = 2
    seq_len: int = 16384
    timeout_s: float = 900.0
    output: Path | None = None


def git(*words: str) -> str:
    """Return what git prints. Raises CalledProcessError, whose output says why, if it fails."""
    command = ["git", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def step_seconds(log: str, options: Options) -> list[float]:
    """Return the seconds of the steps that count, of a job's log."""
    speeds = {
        int(step): float(speed.replace(",", ""))
        for step, speed in SPEED.findall(COLOUR.sub("", log))
    }
    counted = [step for step in sorted(speeds) if step > options.warmup]
    return [options.seq_len / speeds[step] for step in counted]


def train(folder: Path, options: Options) -> list[float]:
    """Train the job with the code in a folder; returns the seconds of the steps that count.

    Raises:
        RuntimeError: it has failed; the end of its log is in the message.
    """
    with TemporaryDirectory() as dump_folder:
        arguments = [
            f"--model.hf_assets_path={ROOT / 'outputs/assets'}",
            f"--training.seq_len={options.seq_len}",
            f"--training.steps={options.warmup + options.steps}",
        ]
        command = train_command(Path(dump_folder), RANKS, arguments)
        done = subprocess.run(
            ["env", f"PYTHONPATH={folder}", "OMP_NUM_THREADS=1", *command],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=options.timeout_s,
        )
    seconds = step_seconds(done.stdout + done.stderr, options)
    if done.returncode or not seconds:
        raise RuntimeError(f"{folder.name}: exit code {done.returncode}: {done.stderr}")
    return seconds


def main(options: Options) -> int:
    """Train with every commit, print and write the figures; returns the exit code."""
    commits = [git("rev-parse", "--short=12", name) for name in options.commits]
    seconds: dict[str, list[float]] = {commit: [] for commit in commits}
    with TemporaryDirectory() as name:
        folders = {commit: Path(name) / commit for commit in commits}
        try:
            for commit, folder in folders.items():
                git("worktree", "add", "--detach", str(folder), commit)
            turns = [*folders.items()] * options.rounds
            for commit, folder in tqdm(turns, unit="job"):
                seconds[commit] += train(folder, options)
        finally:
            for folder in folders.values():
                if folder.exists():
                    git("worktree", "remove", "--force", str(folder))
    latest = statistics.median(seconds[commits[-1]])
    rows: list[Record] = [
        {
            "commit": commit,
            "date": git("log", "-1", "--format=%cs", commit),
            "s per step, median": statistics.median(of_commit),
            "least": min(of_commit),
            "over the last": statistics.median(of_commit) / latest,
        }
        for commit, of_commit in seconds.items()
    ]
    return conclude(options.output, "bench.by_commit", rows, rows)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
