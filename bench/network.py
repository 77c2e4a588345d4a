# SPDX-License-Identifier: BSD-3-Clause
"""What a step takes on two nodes, over the rate of the link between them, with CAD and without.

    torchtitan-cad prepare --output outputs/assets
    python -m bench.network

Nodes are network namespaces of this machine (tests/lib/network.py: Linux, root, iproute2), with one rank on a core of
its own each. Every rate and mode trains the same job. The modes take turns of one step, for which the others wait, so
that all have the same share of what else this machine does; the time of a step is that of the slowest rank. Predictions
are `simulate`'s, with compute as stock takes it on the fastest link, the link as the job with CAD has measured it when
it started, and what stock takes on the same link besides, for FSDP's traffic. Prints a table, and writes JSON and a
picture. Nothing else should run then.
"""

import contextlib
import dataclasses
import os
import re
import subprocess
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path

import numpy as np
import tyro
from tqdm import tqdm

from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu

enable_cpu()

# torchtitan must not be imported before enable_cpu().
from bench.record import Record, conclude  # noqa: E402
from bench.turns import TurnTaker  # noqa: E402
from tests.lib.network import Nodes, missing  # noqa: E402
from torchtitan_cad.tools.compare.comparison import Runs  # noqa: E402
from torchtitan_cad.tools.simulated_job import SimulatedJob, read_simulated_job  # noqa: E402

NODES = 2
LINK = re.compile(r"([\d.e+-]+) Gbit/s between them, ([\d.e+-]+) us an exchange")
"""in a job's log: the rate of the link between its nodes, and the latency of an exchange"""
MODES = {
    "stock": ["--parallelism.no-cad"],
    "cad": ["--parallelism.cad"],
    "two nano-batches": ["--parallelism.cad", "--cad.nano_batches=2"],
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to train; arguments that are none of these are the job's."""

    job: Path = Path("train_configs/llama3_debug_cpu.toml")
    rates: tuple[float, ...] = (0.0, 1e9, 2e8, 5e7)
    """Bits per second that a node sends at most; 0: no limit."""
    steps: int = 20
    """Steps of every job that count."""
    warmup: int = 2
    """First steps of every job that do not count."""
    folder: Path = Path("outputs/network")
    """For records and logs of the runs."""
    output: Path | None = None
    """JSON file for the figures; a picture beside it."""


class Job(TurnTaker):
    """A job of one mode on ``nodes`` of its own, which waits but in its turns.

    Raises RuntimeError, as ``turn``, which lets it run for its first steps.
    """

    def __init__(
        self,
        options: Options,
        nodes: Nodes,
        rate: float,
        mode: str,
        overrides: Sequence[str],
    ) -> None:
        super().__init__(options.folder / f"{rate:.0f}-{mode.replace(' ', '-')}", NODES)
        command = [
            "-m",
            "bench.turns",
            str(self.folder),
            f"--job.config_file={options.job}",
            *MODES[mode],
        ]
        # One step more: the end of a job would be in another's turn.
        command += [
            f"--training.steps={options.warmup + options.steps + 1}",
            f"--job.dump_folder={self.folder}",
        ]
        command += ["--metrics.log_freq=1", *overrides]
        nodes.limit(rate or None)
        cores = sorted(os.sched_getaffinity(0))
        for node in range(NODES):
            log = self.log(node).open("w")
            core = cores[node % len(cores)]
            self.processes.append(
                nodes.torchrun(
                    node, 1, command, core=core, stdout=log, stderr=subprocess.STDOUT
                )
            )
        self.turn(options.warmup)

    def link(self) -> dict[str, float]:
        """Return the link as the job measured it when it started, for ``Runs.simulated``; without CAD it has none."""
        found = LINK.search(self.log(0).read_text())
        return (
            {"net": 1e9 / 8 * float(found[1]), "latency": 1e-6 * float(found[2])}
            if found
            else {}
        )


def measure(options: Options, overrides: Sequence[str]) -> list[Record]:
    """Return one record per rate and mode."""
    simulated = read_simulated_job(
        [f"--job.config_file={options.job}", "--parallelism.cad", *overrides], NODES
    )
    runs: dict[tuple[float, str], Runs] = {}
    links: dict[tuple[float, str], dict[str, float]] = {}
    for rate in tqdm(options.rates, unit="rate", disable=None):
        with contextlib.ExitStack() as stack:
            nodes = [
                stack.enter_context(Nodes(NODES, f"-{number}"))
                for number in range(len(MODES))
            ]
            jobs = [
                Job(options, *each, overrides)
                for each in zip(nodes, repeat(rate), MODES)
            ]
            for number in tqdm(
                range(options.steps), unit="step", leave=False, disable=None
            ):
                for job in jobs if number % 2 == 0 else jobs[::-1]:
                    job.turn()
        for mode, job in zip(MODES, jobs, strict=True):
            runs[rate, mode] = Runs.read([job.folder], NODES, options.warmup)
            links[rate, mode] = job.link()
    return tabulate(runs, links, simulated)


def tabulate(
    runs: dict[tuple[float, str], Runs],
    links: dict[tuple[float, str], dict[str, float]],
    job: SimulatedJob,
) -> list[Record]:
    """Return one record per rate and mode, with a prediction for those with CAD."""
    compute = runs[next(iter(runs))[0], "stock"]
    records: list[Record] = []
    for (rate, mode), run in runs.items():
        mine, stock = run.step_seconds, runs[rate, "stock"].step_seconds
        record: Record = {
            "Mbit/s": rate / 1e6 or "no limit",
            "mode": mode,
            "ms per step": 1e3 * float(mine.mean()),
        }
        record |= {"predicted ms": "", "exposed wait, %": ""}
        if mode != "stock":
            more = np.subtract(
                *(
                    predicted_seconds(compute, job, links[rate, mode], each)
                    for each in (mode, "stock")
                )
            )
            record["predicted ms"] = 1e3 * float(stock.mean() + more)
            record["exposed wait, %"] = 100 * float(
                run.waiting.mean() / run.seconds.mean()
            )
        record["speed over stock"] = float(stock.sum() / mine.sum())
        record["standard error"] = float((stock / mine).std() / len(mine) ** 0.5)
        records.append(record)
    return records


def predicted_seconds(
    stock: Runs, job: SimulatedJob, link: dict[str, float], mode: str
) -> float:
    """Return the mean step's seconds of a mode by the simulation, with compute as in the runs of ``stock``."""
    search = stock.simulated(job, ranks_per_node=1, **link)
    configuration = dataclasses.replace(
        job.inputs.configuration, nano_batches=2 if mode == "two nano-batches" else 1
    )
    system = "packed" if mode == "stock" else "cad"
    return search.run(system, configuration).seconds


def draw(records: list[Record], path: Path) -> None:
    """Draw the time of a step over the rate, measured and, with CAD, predicted."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    modes = dict.fromkeys(record["mode"] for record in records)
    for mode, color, marker in zip(
        modes, ("#444444", "#d55e00", "#56b4e9", "#009e73"), "os^v", strict=False
    ):
        mine = [record for record in records if record["mode"] == mode]
        rates, times, guesses = (
            [record[key] for record in mine]
            for key in ("Mbit/s", "ms per step", "predicted ms")
        )
        names = [rate if isinstance(rate, str) else f"{rate:g}" for rate in rates]
        axes.plot(names, times, color=color, marker=marker, label=mode)
        if mode != "stock":
            axes.plot(
                names, guesses, linestyle=":", color=color, label=f"{mode}, predicted"
            )
    axes.set_xlabel("rate of the link between two nodes, Mbit/s")
    axes.set_ylabel("ms per step")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    figure.savefig(path)
    plt.close(figure)


def main(options: Options, overrides: Sequence[str] = ()) -> None:
    """Train, print and write the figures; ``overrides`` are further arguments of the job.

    Raises:
        ValueError: this machine cannot have nodes.
    """
    if (reason := missing()) is not None:
        raise ValueError(f"no nodes on this machine: {reason}")
    records = measure(options, overrides)
    conclude(options.output, "bench.network", records, records)
    if options.output is not None:
        draw(records, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main(*tyro.cli(Options, description=__doc__, return_unknown_args=True))
