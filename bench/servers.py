# SPDX-License-Identifier: BSD-3-Clause
"""A job on two ranks of this machine that attention servers join, one of which is killed: tokens a second and losses.

    python -m bench.servers --output bench/results/servers.json --picture docs/images/pool.png

Both ranks run on the machine's first core, and the servers on its last, so that what they take from the ranks is
computed beside them. The servers start when a step has been logged. Some steps after the first plan with them, the
first of them is killed by SIGKILL. "predicted" is a step's time without servers, the mean before they join, less the
attention that they compute by the plan at the rank's measured speed.
"""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tyro

from bench.jobs import Job, end, on_core, start, watch
from bench.record import Record, conclude

JOIN = re.compile(r"serve --join (\S+) --token (\S+)")
UNIT = re.compile(r"attention takes (\S+) us a unit")
LAYERS = 2
RANKS = 2


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        servers: that join after ``join_after`` steps.
        steps: of the job.
        seq_len: tokens of a row.
        kill_after: steps with servers after which the first of them is killed; 0: none is.
        timeout_s: of the whole job.
        output: file for the figures.
        picture: file for the drawing.
    """

    servers: int = 2
    steps: int = 16
    seq_len: int = 16384
    join_after: int = 4
    kill_after: int = 3
    timeout_s: float = 900.0
    output: Path | None = None
    picture: Path | None = None


def train(options: Options, folder: Path) -> Job:
    """Start the job on the first core."""
    arguments = [
        f"--training.seq_len={options.seq_len}",
        f"--training.steps={options.steps}",
        "--cad.servers",
    ]
    return Job(folder, RANKS, arguments, on_core(0))


def steps_of(job: Job) -> list[dict[str, Any]]:
    """Return what CAD has written of each step."""
    (path,) = job.folder.rglob("cad_steps.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(options: Options, folder: Path) -> list[Record]:
    """Train, let servers join and kill one; returns the figures of every step."""
    job = train(options, folder)
    servers: list[subprocess.Popen] = []
    seconds: dict[int, float] = {}
    """by step, when its line was seen"""
    killed_at = 0
    try:
        for step in watch(job, options.steps, options.timeout_s):
            seconds.setdefault(step, time.monotonic())
            if step >= options.join_after and not servers:
                servers = [serve(job, number) for number in range(options.servers)]
            with_servers = job.text.count("of attention by servers")
            if (
                options.kill_after
                and with_servers >= options.kill_after
                and not killed_at
            ):
                os.killpg(servers[0].pid, signal.SIGKILL)
                killed_at = step
    finally:
        end(job.process)
        for server in servers:
            end(server)
    found = UNIT.search(job.text)
    unit = 1e-6 * float(found[1]) if found else 0.0
    return [
        of_step(figures, seconds, unit, options, killed_at) for figures in steps_of(job)
    ]


def serve(job: Job, number: int) -> subprocess.Popen:
    """Start a server, by the command in the job's log."""
    found = JOIN.search(job.text)
    assert found is not None, "the job logs how servers join before its first step"
    program = "import sys; from torchtitan_cad.tools.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "serve"]
    command += ["--join", found[1], "--token", found[2], "--threads", "1"]
    return start([*on_core(-1), *command], job.folder / f"server{number}.log")


def of_step(
    figures: dict[str, Any],
    seconds: dict[int, float],
    unit: float,
    options: Options,
    killed_at: int,
) -> Record:
    """Return the figures of one step; its seconds are those since the line of the step before."""
    step = figures["step"]
    taken = seconds.get(step, 0.0) - seconds.get(step - 1, 0.0)
    attention = unit * LAYERS * max(figures["loads_after"])
    return {
        "step": step,
        "loss": figures["loss"],
        "seconds": taken,
        "tokens/s": RANKS * options.seq_len / taken if step > 1 else 0.0,
        "served": figures.get("served_share", 0.0),
        "attention s": attention,
        "a server is dead": bool(killed_at) and step > killed_at,
    }


def summary(records: list[Record]) -> list[Record]:
    """Return the seconds of a step without servers and with them, measured and predicted."""
    before = [r for r in records if not r["served"] and r["step"] > 2]
    after = [r for r in records if r["served"]]
    if not before or not after:
        return []
    linear = statistics.fmean(r["seconds"] - r["attention s"] for r in before)
    predicted = linear + statistics.fmean(
        (1 - r["served"]) * r["attention s"] for r in after
    )
    alone = linear + statistics.fmean(r["attention s"] for r in after)
    measured = statistics.fmean(r["seconds"] for r in after)
    return [
        {
            "steps with servers": len(after),
            "attention served": statistics.fmean(r["served"] for r in after),
            "s per step, measured": measured,
            "predicted": predicted,
            "predicted without servers": alone,
            "gain": alone / measured,
            "predicted gain": alone / predicted,
        }
    ]


def draw(records: list[Record], path: Path) -> None:
    """Draw tokens a second, the share of attention that servers compute, and losses, over the steps."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (speed, loss) = plt.subplots(
        2, figsize=(7, 5), layout="constrained", sharex=True
    )
    steps = [record["step"] for record in records[1:]]
    speed.plot(steps, [r["tokens/s"] for r in records[1:]], "o-", color="#444444")
    speed.set_ylabel("tokens a second")
    speed.set_ylim(bottom=0)
    served = speed.twinx()
    shares = [100 * r["served"] for r in records[1:]]
    served.bar(steps, shares, color="#56b4e9", alpha=0.4)
    served.set_ylabel("attention by servers, %", color="#2277aa")
    served.set_ylim(0, 100)
    loss.plot(steps, [r["loss"] for r in records[1:]], "o-", color="#444444")
    loss.set_ylabel("loss")
    loss.set_xlabel("step")
    dead = [record["step"] for record in records if record["a server is dead"]]
    for axes in (speed, loss):
        if dead:
            axes.axvline(dead[0] - 0.5, color="#d55e00", linestyle="--")
    if dead:
        speed.annotate(
            "one of the servers is killed",
            (dead[0] - 0.4, 0.94),
            xycoords=("data", "axes fraction"),
            color="#d55e00",
        )
    figure.savefig(path)
    plt.close(figure)


def main(options: Options) -> int:
    """Run, print and write the figures; returns the exit code."""
    with TemporaryDirectory() as folder:
        records = run(options, Path(folder))
    if options.picture is not None:
        draw(records, options.picture)
    for row in summary(records):
        print(json.dumps(row))
    problems = []
    if not any(record["served"] for record in records):
        problems.append("no step was planned with servers: give more steps")
    return conclude(options.output, "bench.servers", records, records, problems)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
