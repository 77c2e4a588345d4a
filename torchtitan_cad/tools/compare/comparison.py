# SPDX-License-Identifier: BSD-3-Clause
"""The same job with and without CAD, run in turns: time per step of both, and what the simulation predicts."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_cad.integration.topology import TICK_SCHEDULES
from torchtitan_cad.tools.compare import measured
from torchtitan_cad.tools.simulated_job import SimulatedJob
from torchtitan_cad.tools.simulation.batches import draw_batches
from torchtitan_cad.tools.simulation.inputs import Documents, Inputs, Rates
from torchtitan_cad.tools.simulation.search import Search, Trial
from torchtitan_cad.tools.simulation.systems import mean_flops

MODES = ("off", "on")
FORCED = (
    "--metrics.log_freq=1",
    "--metrics.no-enable-tensorboard",
    "--metrics.no-enable-wandb",
    "--profiling.no-enable-profiling",
    "--checkpoint.no-enable",
    "--validation.no-enable",
)
"""Settings that leave nothing but training to be measured."""
_ERROR = "error: "
_NO_LIMIT = 1e15
"""bytes, or bytes per second: of a simulated cluster whose exchanges take no time."""


@dataclasses.dataclass(frozen=True)
class Runs:
    """Records of all runs of one mode. Arrays are float64 [rounds, steps, ranks], NaN where nothing is known; ``rows``
    are those of every step and rank, the same in all rounds.
    """

    seconds: np.ndarray
    busy: np.ndarray
    attention: np.ndarray
    waiting: np.ndarray
    tokens: np.ndarray
    loss: np.ndarray
    gradient_norm: np.ndarray
    imbalance_before: np.ndarray
    imbalance_after: np.ndarray
    bytes_per_rank_mean: np.ndarray
    rows: list[list[list[list[int]]]]
    same_documents: bool = True
    """Whether attention stayed inside the documents of ``rows``."""

    @classmethod
    def read(cls, folders: Sequence[Path], ranks: int, warmup: int) -> "Runs":
        """Return the records of one run per folder, without the first ``warmup`` steps; ValueError if none are left."""
        runs = [_read_steps(folder, ranks) for folder in folders]
        count = min(map(len, runs))
        if count <= warmup:
            raise ValueError(
                f"--steps: only {count} steps were recorded: set more than --warmup = {warmup}"
            )
        kept = [steps[warmup:count] for steps in runs]
        arrays = {
            name: np.array(
                [
                    [[record[name] for record in step] for step in steps]
                    for steps in kept
                ],
                dtype=np.float64,
            )
            for name in measured.FIGURES
        }
        first_run = kept[0]
        records = chain.from_iterable(first_run)
        return cls(
            **arrays,
            rows=[[record["rows"] for record in step] for step in first_run],
            same_documents=all(
                record.get("same_documents", True) for record in records
            ),
        )

    @property
    def step_seconds(self) -> np.ndarray:
        """[steps] the slowest rank's time, the median of the rounds."""
        return np.median(self.seconds.max(axis=2), axis=0)

    def simulated(self, job: SimulatedJob, **links: Any) -> Search:
        """Return a search on these runs' batches, by the rates of the job's cluster.

        On CPU ranks rates are scaled to what the mean rank of these runs took, and exchanges take no time but for
        ``links``, values of ``Cluster``.
        """
        documents = self._documents(job.inputs)
        inputs = dataclasses.replace(job.inputs, documents=documents, open=frozenset())
        if not np.isnan(self.busy).any():
            free = dataclasses.replace(
                inputs.cluster,
                net=_NO_LIMIT,
                node=_NO_LIMIT,
                memory=_NO_LIMIT,
                latency=0.0,
            )
            inputs = dataclasses.replace(inputs, cluster=free)
            guess = Search(inputs).run("packed", inputs.configuration)
            inputs = dataclasses.replace(inputs, rates=self._scaled(guess))
        linked = dataclasses.replace(inputs.cluster, **links)
        return Search(dataclasses.replace(inputs, cluster=linked))

    def _documents(self, inputs: Inputs) -> Documents:
        """Return the rows of every step, each once."""
        cluster = inputs.cluster
        configuration = inputs.configuration
        # ranks of other rows
        groups = slice(
            0, cluster.ranks // configuration.pp, cluster.tp * configuration.cp
        )
        rows = [list(chain.from_iterable(step[groups])) for step in self.rows]
        return Documents.of_rows(rows)

    def _scaled(self, guess: Trial) -> Rates:
        """Return the default rates, scaled from what a guess by them takes to what the mean rank took."""
        rates = Rates()
        attention = float(self.attention.mean())
        linear = float(self.busy.mean()) - attention
        faster_linear = guess.part("linear") / linear
        faster_attention = guess.part("attention") / attention
        return Rates(
            linear_flops=rates.linear_flops * faster_linear,
            memory_bandwidth=rates.memory_bandwidth * faster_linear,
            attention_flops=rates.attention_flops * faster_attention,
            backward_flops=rates.backward_flops * faster_attention,
        )

    def parts(self) -> dict[str, list[float]]:
        """Return the seconds of a step by part, [ranks], means over rounds and steps."""
        # of torch's own kernels it is not known, and part of the rest
        attention = np.nan_to_num(self.attention)
        other = self.busy - attention
        waiting = self.seconds - self.busy
        if np.isnan(self.busy).any():
            return {"step": self.seconds.mean(axis=(0, 1)).tolist()}
        parts = {
            "linear layers and the rest": other,
            "attention": attention,
            "waiting": waiting,
        }
        return {
            name: seconds.mean(axis=(0, 1)).tolist() for name, seconds in parts.items()
        }


def _read_steps(folder: Path, ranks: int) -> list[tuple[dict[str, Any], ...]]:
    """Return the records of all ranks by step, of the steps that all have recorded."""
    of_ranks = []
    for rank in range(ranks):
        path = folder / f"rank{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        of_ranks.append([json.loads(line) for line in lines])
    return list(zip(*of_ranks, strict=False))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The two modes' runs, and figures of both."""

    off: Runs
    on: Runs

    @property
    def speedups(self) -> np.ndarray:
        """[steps] time without CAD over time with it."""
        return self.off.step_seconds / self.on.step_seconds

    def predicted(self, job: SimulatedJob) -> dict[str, float] | None:
        """Simulate the speed-up: overall, least and most of a step, and overall of reordering whole rows alone.

        None if the simulated GPU has no memory for them. Times on CPU ranks are scaled to those that the mean rank took
        without CAD, or with it where attention has no times without it, and exchanges take none. Rows are those that
        are loaded, which CAD may redistribute.
        """
        timed = self.on if np.isnan(self.off.attention).any() else self.off
        search = dataclasses.replace(timed, rows=self.off.rows).simulated(job)
        configuration = job.inputs.configuration
        alone = configuration.without_cad()
        packed = search.run("packed", alone)
        reorder = search.run("reorder", alone)
        cad = search.run("cad", configuration)
        spread = cad.over(packed)
        gains = {
            "overall": packed.seconds / cad.seconds,
            "reordering_alone": packed.seconds / reorder.seconds,
        }
        return spread and gains | {"least": spread["min"], "most": spread["max"]}

    def rank_flops(self, inputs: Inputs) -> dict[str, float]:
        """Return the model FLOP/s of a rank in both modes, by the loaded documents' own pairs."""
        batches = draw_batches(self.off._documents(inputs))
        of_rank = mean_flops(inputs.model, batches) / inputs.cluster.ranks
        return {
            "off": float(of_rank / self.off.step_seconds.mean()),
            "on": float(of_rank / self.on.step_seconds.mean()),
        }

    def report(self) -> dict[str, Any]:
        """Return all figures, for JSON."""
        off = self.off
        on = self.on
        tokens = off.tokens[0].sum()
        low, median, high = np.quantile(self.speedups, [0.25, 0.5, 0.75]).tolist()
        return {
            "steps": len(off.step_seconds),
            "ranks": off.seconds.shape[2],
            "rounds": off.seconds.shape[0],
            "tokens_per_second": {
                "off": float(tokens / off.step_seconds.sum()),
                "on": float(tokens / on.step_seconds.sum()),
            },
            "speedup": {
                "overall": float(off.step_seconds.sum() / on.step_seconds.sum()),
                "quarter": low,
                "median": median,
                "three_quarters": high,
            },
            "attention_share": float(off.attention.sum() / off.busy.sum()),
            "imbalance": {
                "before": float(np.nanmean(on.imbalance_before)),
                "after": float(np.nanmean(on.imbalance_after)),
            },
            "same_documents": off.same_documents,
            **self._loss_differences(),
            "seconds_per_step": {
                "off": off.step_seconds.tolist(),
                "on": on.step_seconds.tolist(),
            },
            "rank_seconds": {"off": off.parts(), "on": on.parts()},
        }

    def _loss_differences(self) -> dict[str, float]:
        """Return the largest differences of a step's loss from the first run without CAD."""
        # stages without a loss have -1
        reference = self.off.loss.max(axis=2)[:1]
        differences = np.abs(reference - self.on.loss.max(axis=2))
        return {
            "largest_loss_difference": float(differences.max()),
            "largest_relative_loss_difference": float((differences / reference).max()),
        }


def run(
    args: Sequence[str],
    output: Path,
    *,
    ranks: int,
    steps: int,
    rounds: int,
    warmup: int,
    progress: Callable[[int], None],
    switches: Sequence[str],
) -> Comparison:
    """Run a job without and with CAD, ``rounds`` times each, in alternating order, on ``ranks`` of this machine.

    Args:
        args: of the job, its file among them.
        output: folder for records and logs; earlier records there are removed.
        warmup: first steps of every run, which do not count.
        progress: is called with the steps of every run that has ended.
        switches: arguments of the job that tell the runs called "off" and "on" from each other, with spaces between.

    Raises ValueError that says which run has failed, and why.
    """
    folders: dict[str, list[Path]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        pair = list(zip(MODES, switches, strict=True))
        for mode, switch in pair if number % 2 == 0 else pair[::-1]:
            folder = output / f"{mode}{number + 1}"
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob("rank*.jsonl"):
                old.unlink()
            own = [
                f"--training.steps={steps}",
                f"--job.dump_folder={folder}",
                *FORCED,
                *switch.split(),
            ]
            _run_once(folder, [*args, *own], ranks)
            progress(steps)
            folders[mode].append(folder)
    return Comparison(*(Runs.read(folders[mode], ranks, warmup) for mode in MODES))


def switches_of(config: Any) -> tuple[str, str]:
    """Return the ``switches`` of a job, which has torch's schedule without CAD where it has one in ticks with it."""
    without = "--parallelism.no-cad"
    schedule = config.parallelism.pipeline_parallel_schedule
    if schedule in TICK_SCHEDULES:
        of_torch = schedule.removeprefix("CAD")
        without += f" --parallelism.pipeline_parallel_schedule={of_torch}"
    return without, "--parallelism.cad"


def _run_once(folder: Path, args: Sequence[str], ranks: int) -> None:
    """One run to its end; all its processes end with it."""
    launcher = f"-m torchtitan_cad.launch --standalone --nproc_per_node={ranks} -m {measured.__name__}"
    command = [sys.executable, *launcher.split(), str(folder), *args]
    log = folder / "log.txt"
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with log.open("w") as file, _exit_on_sigterm():
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment
        )
        try:
            process.wait()
        finally:
            if process.poll() is None:  # Ctrl-C: the launcher ends its ranks
                process.terminate()
                process.wait()
    if process.returncode:
        raise ValueError(
            f"the run in {folder} failed: {_reason(log)}; its log is {log}"
        )


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM raise SystemExit, as Ctrl-C raises KeyboardInterrupt."""

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)


def _reason(log: Path) -> str:
    lines = [
        line.strip()
        for line in log.read_text(errors="replace").splitlines()
        if line.strip()
    ]
    errors = [line for line in lines if line.startswith(_ERROR)]
    return (
        errors[0].removeprefix(_ERROR) if errors else (lines or ["it said nothing"])[-1]
    )
