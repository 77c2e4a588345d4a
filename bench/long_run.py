# SPDX-License-Identifier: BSD-3-Clause
"""A long training with CAD, with a kill and a resume in it, and the same training by stock torchtitan.

    torchtitan-cad prepare --output outputs/assets
    python -m bench.long_run --output bench/results/long_run.json --picture docs/images/long_run.png

The same job trains three times on two ranks of this machine, one after the other, with CAD's default settings: without
CAD, with it, and with it and checkpoints. One rank of the third is killed by SIGKILL. The job is then started again by
the same command and goes on from its last checkpoint. Losses and gradient norms are those that torchtitan writes for
TensorBoard. Resident memory and open descriptors are the most of all ranks, as /proc has them.
"""

import json
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bench.jobs import Job, end, watch
from bench.record import Record, conclude

RANKS = 2
POLL_S = 2.0
LOSS = "loss_metrics/global_avg_loss"
GRADIENT_NORM = "grad_norm"
EARLY = 100
"""First steps, of which the summary speaks apart: later ones have all the rounding of those before in their weights."""


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        steps: of each job.
        seq_len: tokens of a row; a rank trains one row a step.
        interval: steps from one checkpoint of the third job to the next.
        kill_at: step of the third job after which one of its ranks is killed.
        timeout_s: of each job.
        output: file for the figures of every step.
        picture: file for the drawing.
    """

    steps: int = 2000
    seq_len: int = 1024
    interval: int = 500
    kill_at: int = 700
    timeout_s: float = 7200.0
    output: Path | None = None
    picture: Path | None = None


@dataclass
class Curves:
    """Figures of one job by step."""

    loss: dict[int, float] = field(default_factory=dict)
    gradient_norm: dict[int, float] = field(default_factory=dict)
    megabytes: dict[int, float] = field(default_factory=dict)
    """resident memory of the largest rank, where it was looked at"""
    descriptors: dict[int, int] = field(default_factory=dict)
    """open files of the rank that has most, where they were counted"""
    moved: dict[int, float] = field(default_factory=dict)
    """tasks of a step that ran on another rank than their queries' home; none without CAD"""


def train(
    name: str, arguments: Iterable[str], options: Options, folder: Path
) -> Curves:
    """Train to the end; returns the job's figures. Raises RuntimeError if it fails."""
    folder.mkdir(exist_ok=True)
    curves = Curves()
    job = start(arguments, options, folder)
    try:
        for step in watch(job, options.steps, options.timeout_s, name, POLL_S):
            look_at_ranks(job, step, curves)
    finally:
        end(job.process)
    read_events(folder, curves)
    return curves


def train_until_killed(
    arguments: Iterable[str], options: Options, folder: Path
) -> None:
    """Train until the step at which a rank is killed, and wait until the job has ended for it."""
    folder.mkdir(exist_ok=True)
    job = start(arguments, options, folder)
    try:
        for step in watch(job, options.steps, options.timeout_s, "until the kill"):
            if step >= options.kill_at:
                os.kill(rank_processes(job)[-1], signal.SIGKILL)
                break
        job.process.wait(options.timeout_s)
    finally:
        end(job.process)


def start(arguments: Iterable[str], options: Options, folder: Path) -> Job:
    """Start the job with the options that all three have, and some of its own."""
    shared = [
        f"--training.seq_len={options.seq_len}",
        f"--training.steps={options.steps}",
        f"--checkpoint.interval={options.interval}",
    ]
    return Job(folder, RANKS, [*shared, *arguments])


def rank_processes(job: Job) -> list[int]:
    """Return the process numbers of a job's ranks."""
    found = dict[str, int]()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_text()
            variables = (process / "environ").read_text().split("\0")
        except OSError:  # it has ended, or is another user's
            continue
        ranks = [word for word in variables if word.startswith("RANK=")]
        if str(job.folder) in words and ranks:
            number = int(process.name)
            # A rank's own children have its variables too.
            found[ranks[0]] = min(number, found.get(ranks[0], number))
    return [found[rank] for rank in sorted(found)]


def look_at_ranks(job: Job, step: int, curves: Curves) -> None:
    """Note memory and descriptors of a job's ranks at a step."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    try:
        for number in rank_processes(job):
            process = Path(f"/proc/{number}")
            pages = int((process / "statm").read_text().split()[1])
            megabytes = pages * page_bytes / 1e6
            descriptors = len(list((process / "fd").iterdir()))
            curves.megabytes[step] = max(megabytes, curves.megabytes.get(step, 0.0))
            curves.descriptors[step] = max(descriptors, curves.descriptors.get(step, 0))
    except OSError:  # the rank has ended
        return


def read_events(folder: Path, curves: Curves) -> None:
    """Read the figures of every start of a job; what a later start has written counts."""
    starts = sorted({path.parent for path in folder.rglob("events.out.tfevents.*")})
    for start_folder in starts:
        events = EventAccumulator(str(start_folder), size_guidance={"scalars": 0})
        events.Reload()
        curves.loss |= {event.step: event.value for event in events.Scalars(LOSS)}
        norms = events.Scalars(GRADIENT_NORM)
        curves.gradient_norm |= {event.step: event.value for event in norms}
    for path in sorted(folder.rglob("cad_steps.jsonl")):
        steps = [json.loads(line) for line in path.read_text().splitlines()]
        curves.moved |= {step["step"]: step["tasks_moved"] for step in steps}


def largest_difference(
    curve: dict[int, float], reference: dict[int, float], first: int, last: int
) -> float:
    """Return the largest relative difference of two curves over some steps. Raises KeyError if a step is missing."""
    steps = range(first, last + 1)
    return max(abs(curve[step] / reference[step] - 1) for step in steps)


def growth(values: dict[int, float] | dict[int, int], early: int) -> list[float]:
    """Return a figure at the first look from step ``early`` on, or the last one before, and at the last."""
    steps = sorted(values)
    first = next((step for step in steps if step >= early), steps[-1])
    return [values[first], values[steps[-1]]]


def summary(jobs: dict[str, Curves], options: Options) -> list[Record]:
    """Return for every job what it ends with, and how far it is from stock."""
    stock = jobs["stock"]
    early = min(EARLY, options.steps)
    rows = list[Record]()
    for name, curves in jobs.items():
        memory = growth(curves.megabytes, early)
        descriptors = growth(curves.descriptors, early)
        difference = {
            f"loss, steps 1 to {last}": largest_difference(
                curves.loss, stock.loss, 1, last
            )
            for last in sorted({early, options.steps})
        }
        rows.append(
            {
                "job": name,
                "last loss": curves.loss[options.steps],
                **difference,
                f"gradient norm, steps 1 to {early}": largest_difference(
                    curves.gradient_norm, stock.gradient_norm, 1, early
                ),
                "steps that move tasks": sum(
                    count > 0 for count in curves.moved.values()
                ),
                "MB early and late": memory,
                "descriptors early and late": descriptors,
            }
        )
    return rows


def draw(jobs: dict[str, Curves], options: Options, path: Path) -> None:
    """Draw the losses of all jobs, their differences from stock, and the memory of their ranks."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (loss, difference, memory) = plt.subplots(
        3, figsize=(7, 7), layout="constrained", sharex=True
    )
    looks = {
        "stock": ("#444444", "-"),
        "with CAD": ("#0072b2", "--"),
        "with CAD, killed and resumed": ("#d55e00", ":"),
    }
    stock = jobs["stock"].loss
    for name, (color, line) in looks.items():
        curves = jobs[name]
        steps = sorted(curves.loss)
        losses = [curves.loss[step] for step in steps]
        loss.plot(steps, losses, line, color=color, label=name)
        looked = sorted(step for step in curves.megabytes if step > 0)
        megabytes = [curves.megabytes[step] for step in looked]
        memory.plot(looked, megabytes, line, color=color)
        if name != "stock":
            apart = [abs(curves.loss[step] / stock[step] - 1) for step in steps]
            difference.semilogy(steps, apart, ".", color=color, markersize=2)
    loss.set_ylabel("loss")
    loss.legend(frameon=False)
    difference.set_ylabel("relative difference\nfrom stock's loss")
    memory.set_ylabel("MB of the largest rank")
    memory.set_ylim(0, 1.1 * max(jobs["with CAD"].megabytes.values()))
    memory.set_xlabel("step")
    for axes in (loss, difference, memory):
        axes.axvline(options.kill_at, color="#d55e00", linewidth=0.8)
    loss.annotate(
        " one rank is killed",
        (options.kill_at, 0.05),
        xycoords=("data", "axes fraction"),
        color="#d55e00",
    )
    figure.savefig(path)
    plt.close(figure)


def by_step(jobs: dict[str, Curves]) -> list[Record]:
    """Return the figures of all jobs, a record a step."""
    steps = sorted(jobs["stock"].loss)
    return [
        {"step": step}
        | {f"loss, {name}": curves.loss[step] for name, curves in jobs.items()}
        | {
            f"gradient norm, {name}": curves.gradient_norm[step]
            for name, curves in jobs.items()
        }
        | {
            f"MB, {name}": curves.megabytes.get(step, "")
            for name, curves in jobs.items()
        }
        for step in steps
    ]


def main(options: Options, arguments: Sequence[str] = ()) -> int:
    """Run, print and write the figures; returns the exit code.

    Args:
        arguments: further ones of all jobs.
    """
    without_cad = ["--parallelism.no-cad", *arguments]
    with_cad = ["--cad.placement=auto", *arguments]
    resumed = ["--checkpoint.enable", *with_cad]
    with TemporaryDirectory() as name:
        folder = Path(name)
        jobs = {"stock": train("stock", without_cad, options, folder / "stock")}
        jobs["with CAD"] = train("with CAD", with_cad, options, folder / "cad")
        train_until_killed(resumed, options, folder / "resumed")
        jobs["with CAD, killed and resumed"] = train(
            "resumed", resumed, options, folder / "resumed"
        )
    rows = summary(jobs, options)
    if options.picture is not None:
        draw(jobs, options, options.picture)
    for row in rows:
        print(json.dumps(row))
    return conclude(options.output, "bench.long_run", by_step(jobs), rows)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
