# SPDX-License-Identifier: BSD-3-Clause
"""What a step takes on two nodes, over the rate of the link between them, with CAD and without.

    torchtitan-cad prepare --output outputs/assets
    python -m bench.network --rounds 3

Nodes are network namespaces of this machine (tests/nodes/network.py: Linux, root, iproute2), with one rank on a core of
its own each. Every rate and mode trains the same job, in turns; the time of a step is that of the slowest rank, the
median of the rounds. Predictions are `simulate`'s, with compute as stock takes it on the fastest link, and with what
stock takes on the same link besides, for FSDP's traffic. Prints a table, and writes JSON and a picture. Nothing else
should run then.
"""

import dataclasses
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import tyro
from tqdm import tqdm

from torchtitan_cad.integration.titan022.cpu import enable_cpu

enable_cpu()

# torchtitan must not be imported before enable_cpu().
from bench.record import Record, conclude  # noqa: E402
from tests.nodes.network import Nodes, missing  # noqa: E402
from torchtitan_cad.integration.titan022.commands import measured  # noqa: E402
from torchtitan_cad.integration.titan022.commands.comparison import Runs  # noqa: E402
from torchtitan_cad.integration.titan022.commands.simulated_job import SimulatedJob, read_simulated_job  # noqa: E402

NODES = 2
EXCHANGE_S = 1e-3
"""seconds: an exchange without bytes, over gloo between two processes"""
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
    modes: tuple[str, ...] = tuple(MODES)
    steps: int = 6
    warmup: int = 1
    """First steps of every run that do not count."""
    rounds: int = 3
    folder: Path = Path("outputs/network")
    """For records and logs of the runs."""
    output: Path | None = None
    """JSON file for the figures; a picture beside it."""


def train(options: Options, rate: float, mode: str, folder: Path, overrides: Sequence[str]) -> None:
    """Run the job once.

    Raises:
        RuntimeError: it failed; says where its logs are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("rank*.jsonl"):
        old.unlink()
    own = [f"--training.steps={options.steps}", f"--job.dump_folder={folder}", "--metrics.log_freq=1"]
    command = ["-m", measured.__name__, str(folder), f"--job.config_file={options.job}", *own, *MODES[mode], *overrides]
    cores = sorted(os.sched_getaffinity(0))
    with Nodes(NODES) as nodes:
        nodes.limit(rate or None)
        processes = []
        for node in range(NODES):
            log = (folder / f"node{node}.txt").open("w")
            processes.append(
                nodes.torchrun(node, 1, command, core=cores[node % len(cores)], stdout=log, stderr=subprocess.STDOUT)
            )
        if any([process.wait() for process in processes]):
            raise RuntimeError(f"a run failed: see {folder}/node*.txt")


def measure(options: Options, overrides: Sequence[str]) -> list[Record]:
    """Return one record per rate and mode."""
    folders: dict[tuple[float, str], list[Path]] = {}
    cases = [(rate, mode) for rate in options.rates for mode in options.modes]
    for number in range(options.rounds):
        for rate, mode in tqdm(cases if number % 2 == 0 else cases[::-1], unit="run", leave=False, disable=None):
            folder = options.folder / f"{rate:.0f}-{mode.replace(' ', '-')}-{number + 1}"
            train(options, rate, mode, folder, overrides)
            folders.setdefault((rate, mode), []).append(folder)
    runs = {case: Runs.read(of, NODES, options.warmup) for case, of in folders.items()}
    job = read_simulated_job([f"--job.config_file={options.job}", "--parallelism.cad", *overrides], NODES)
    return tabulate(runs, job)


def tabulate(runs: dict[tuple[float, str], Runs], job: SimulatedJob) -> list[Record]:
    """Return one record per rate and mode, with a prediction for those with CAD."""
    seconds = {case: each.step_seconds for case, each in runs.items()}
    first = next(iter(runs))[0], "stock"
    guesses = {case: predicted_seconds(runs[first], job, *case) for case in runs}
    records: list[Record] = []
    for rate, mode in runs:
        mine, stock = seconds[rate, mode], seconds[rate, "stock"]
        guess = guesses[rate, mode] + float(stock.mean()) - guesses[rate, "stock"]
        records.append(
            {
                "Mbit/s": rate / 1e6 or "no limit",
                "mode": mode,
                "ms per step": 1e3 * float(mine.mean()),
                "predicted ms": "" if mode == "stock" else 1e3 * guess,
                "speed over stock": float(stock.sum() / mine.sum()),
            }
        )
    return records


def predicted_seconds(stock: Runs, job: SimulatedJob, rate: float, mode: str) -> float:
    """Return the mean step's seconds of a mode by the simulation, with compute as in the runs of ``stock``."""
    links = {"net": rate / 8, "latency": EXCHANGE_S} if rate else {}
    search = stock.simulated(job, ranks_per_node=1, **links)
    configuration = dataclasses.replace(job.configuration, nano_batches=2 if mode == "two nano-batches" else 1)
    return search.run("packed" if mode == "stock" else configuration.planner.planner, configuration).seconds


def draw(records: list[Record], path: Path) -> None:
    """Draw the time of a step over the rate, measured and, with CAD, predicted."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    modes = dict.fromkeys(record["mode"] for record in records)
    for mode, color, marker in zip(modes, ("#444444", "#d55e00", "#56b4e9"), "os^", strict=False):
        mine = [record for record in records if record["mode"] == mode]
        rates, times, guesses = ([record[key] for record in mine] for key in ("Mbit/s", "ms per step", "predicted ms"))
        names = [rate if isinstance(rate, str) else f"{rate:g}" for rate in rates]
        axes.plot(names, times, color=color, marker=marker, label=mode)
        if mode != "stock":
            axes.plot(names, guesses, linestyle=":", color=color, label=f"{mode}, predicted")
    axes.set_xlabel("rate of the link between two nodes, Mbit/s")
    axes.set_ylabel("ms per step")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    figure.savefig(path)
    plt.close(figure)


def main(options: Options, overrides: Sequence[str] = ()) -> None:
    """Train, print and write the figures; ``overrides`` are further arguments of the job.

    Raises:
        ValueError: this machine cannot have nodes, or an unknown mode, or none of stock.
    """
    if (reason := missing()) is not None:
        raise ValueError(f"no nodes on this machine: {reason}")
    if "stock" not in options.modes or set(options.modes) - set(MODES):
        raise ValueError(f"--modes {' '.join(options.modes)}: set some of {', '.join(MODES)}, stock among them")
    records = measure(options, overrides)
    conclude(options.output, "bench.network", records, records)
    if options.output is not None:
        draw(records, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main(*tyro.cli(Options, description=__doc__, return_unknown_args=True))
