# SPDX-License-Identifier: BSD-3-Clause
"""A job on two ranks of this machine that attention servers join, one of which is killed: tokens a second and losses.

    python -m bench.servers --output bench/results/servers.json --picture docs/images/pool.png

Both ranks run on the machine's first core, and the servers on its last, so that what they take from the ranks is
computed beside them. The servers start when a step has been logged. Some steps after the first plan with them, the
first of them is killed by SIGKILL. "predicted" is a step's time without servers, the mean before they join, less the
attention that they compute by the plan at the rank's measured speed.
"""

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tyro
from tqdm import tqdm

from bench.record import Record, conclude

STEP = re.compile(r"step: +(\d+) ")
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


class Job:
    """The job, and its log as far as it has come."""

    def __init__(self, options: Options, folder: Path) -> None:
        self.log, self.folder = folder / "job.log", folder
        command = [
            *on_core(0),
            sys.executable,
            "-m",
            "torchtitan_cad.launch",
            "--standalone",
            f"--nproc_per_node={RANKS}",
            "-m",
            "torchtitan_cad.train",
            "--job.config_file=train_configs/llama3_debug_cpu.toml",
            f"--job.dump_folder={folder}",
            f"--training.seq_len={options.seq_len}",
            f"--training.steps={options.steps}",
            "--cad.servers",
        ]
        self.process = start(command, self.log)

    @property
    def text(self) -> str:
        """What the job has printed, without colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text())

    @property
    def step(self) -> int:
        """The last step that was logged, 0 before the first."""
        return max((int(step) for step in STEP.findall(self.text)), default=0)

    def steps(self) -> list[dict[str, Any]]:
        """What CAD has written of each step."""
        (path,) = self.folder.rglob("cad_steps.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()]


def on_core(number: int) -> list[str]:
    """Return the beginning of a command that runs on one core of this process's, counted from the first or last."""
    cores = sorted(os.sched_getaffinity(0))
    return ["taskset", "--cpu-list", str(cores[number])]


def start(command: list[str], log: Path) -> subprocess.Popen:
    """Start a process with one thread, which ends with its group."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as file:
        return subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def end(process: subprocess.Popen) -> None:
    """End a process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def watch(job: Job, options: Options) -> Iterator[int]:
    """Yield the last logged step, again and again, until the job has ended.

    Raises:
        RuntimeError: it has failed, or takes too long.
    """
    deadline = time.monotonic() + options.timeout_s
    with tqdm(total=options.steps, unit="step", desc="training") as progress:
        while job.process.poll() is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"not done after {options.timeout_s} s: {job.text}")
            step = job.step
            progress.update(step - progress.n)
            yield step
            time.sleep(0.1)
    if job.process.returncode:
        raise RuntimeError(f"exit code {job.process.returncode}: {job.text}")


def run(options: Options, folder: Path) -> list[Record]:
    """Train, let servers join and kill one; returns the figures of every step."""
    job = Job(options, folder)
    servers: list[subprocess.Popen] = []
    seconds: dict[int, float] = {}
    """by step, when its line was seen"""
    killed_at = 0
    try:
        for step in watch(job, options):
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
        of_step(figures, seconds, unit, options, killed_at) for figures in job.steps()
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
