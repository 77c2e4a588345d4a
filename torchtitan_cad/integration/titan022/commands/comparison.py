"""The same job with and without CAD, run in turns: time per step of both, and what the plans predict."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_cad.integration.titan022.commands import measured
from torchtitan_cad.integration.titan022.commands.measured import Step

MODES = ("off", "on")
_FORCED = (
    "--metrics.log_freq=1",
    "--metrics.no-enable-tensorboard",
    "--metrics.no-enable-wandb",
    "--profiling.no-enable-profiling",
    "--checkpoint.no-enable",
    "--validation.no-enable",
)
"""Settings that leave nothing but training to be measured."""
_ERROR = "error: "


@dataclasses.dataclass(frozen=True)
class Runs:
    """Records of all runs of one mode. Arrays are float64 [rounds, steps, ranks]; NaN where nothing is known."""

    seconds: np.ndarray
    busy: np.ndarray
    attention: np.ndarray
    tokens: np.ndarray
    loss: np.ndarray
    imbalance_before: np.ndarray
    imbalance_after: np.ndarray
    first_step: int = 1

    @classmethod
    def read(cls, folders: Sequence[Path], ranks: int, warmup: int) -> "Runs":
        """Return the records of one run per folder, without the first ``warmup`` steps.

        Raises:
            ValueError: a run has recorded too few steps.
        """
        rounds = [[_read(folder / f"rank{rank}.jsonl") for rank in range(ranks)] for folder in folders]
        count = min(len(steps) for run in rounds for steps in run)
        if count <= warmup:
            raise ValueError(f"--steps: only {count} steps were recorded: set more than --warmup = {warmup}")
        kept = [[steps[warmup:count] for steps in run] for run in rounds]
        arrays = {
            field.name: np.array(
                [[[getattr(step, field.name) for step in steps] for steps in run] for run in kept], dtype=np.float64
            ).swapaxes(1, 2)
            for field in dataclasses.fields(cls)
            if field.name != "first_step"
        }
        return cls(**arrays, first_step=rounds[0][0][warmup].step)

    @property
    def step_seconds(self) -> np.ndarray:
        """[steps] the slowest rank's time, the median of the rounds."""
        return np.median(self.seconds.max(axis=2), axis=0)


def _read(path: Path) -> list[Step]:
    return [Step(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The two modes' runs, and figures of both."""

    off: Runs
    on: Runs

    @property
    def speedups(self) -> np.ndarray:
        """[steps] time without CAD over time with it."""
        return self.off.step_seconds / self.on.step_seconds

    @property
    def predicted_speedups(self) -> np.ndarray:
        """[steps] what the plans predict; NaN where the shares of the work are not known.

        A step takes linear + attention x imbalance, with the mean rank's measured times of the run without CAD and the
        imbalance of the step's plans, before and after. It knows nothing of the exchange.
        """
        attention = _mean(self.off.attention)
        linear = _mean(self.off.busy) - attention
        before, after = _mean(self.on.imbalance_before), _mean(self.on.imbalance_after)
        predicted = (linear + attention * before) / (linear + attention * after)
        known = np.isfinite(predicted)
        # On CUDA only the last steps' shares are recorded: they stand for all.
        return predicted if known.all() or not known.any() else np.full_like(predicted, predicted[known].mean())

    @property
    def attention_share(self) -> float:
        """Share of attention in the time that the mean rank computes without CAD; NaN where it is not known."""
        return float(np.nansum(self.off.attention) / np.nansum(self.off.busy)) if np.nansum(self.off.busy) else np.nan

    def report(self) -> dict[str, Any]:
        """Return all figures, for JSON."""
        tokens = self.off.tokens[0].sum(axis=1)
        off, on = self.off.step_seconds, self.on.step_seconds
        losses = [runs.loss.max(axis=2) for runs in (self.off, self.on)]  # stages without a loss have -1
        predicted = self.predicted_speedups
        return {
            "steps": len(off),
            "first_step": self.off.first_step,
            "ranks": self.off.seconds.shape[2],
            "rounds": self.off.seconds.shape[0],
            "tokens_per_second": {"off": float(tokens.sum() / off.sum()), "on": float(tokens.sum() / on.sum())},
            "speedup": {"overall": float(off.sum() / on.sum()), **_spread(self.speedups)},
            "predicted_speedup": {"overall": float(off.sum() / (off / predicted).sum()), **_spread(predicted)},
            "attention_share": self.attention_share,
            "imbalance": {
                "before": float(np.nanmean(self.on.imbalance_before)),
                "after": float(np.nanmean(self.on.imbalance_after)),
            },
            "largest_loss_difference": float(np.abs(losses[0][:1] - losses[1]).max()),
            "largest_relative_loss_difference": float((np.abs(losses[0][:1] - losses[1]) / losses[0][:1]).max()),
            "seconds_per_step": {"off": off.tolist(), "on": on.tolist()},
            "rank_seconds": {
                mode: {
                    "attention": _per_rank(runs.attention),
                    "other": _per_rank(runs.busy - runs.attention),
                    "waiting": _per_rank(runs.seconds - runs.busy),
                }
                for mode, runs in zip(MODES, (self.off, self.on), strict=True)
            },
        }


def _mean(values: np.ndarray) -> np.ndarray:
    """Return [steps] mean over rounds and ranks, of what is known."""
    known = np.isfinite(values)
    sums = np.where(known, values, 0.0).sum(axis=(0, 2))
    return np.where(known.any(axis=(0, 2)), sums / np.maximum(known.sum(axis=(0, 2)), 1), np.nan)


def _per_rank(values: np.ndarray) -> list[float]:
    """[ranks] mean over rounds and steps."""
    return [float(np.nanmean(rank)) if np.isfinite(rank).any() else float("nan") for rank in np.moveaxis(values, 2, 0)]


def _spread(values: np.ndarray) -> dict[str, float]:
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return {"quarter": float(low), "median": float(median), "three_quarters": float(high)}


def run(
    args: Sequence[str],
    output: Path,
    *,
    ranks: int,
    steps: int,
    rounds: int,
    warmup: int,
    progress: Callable[[int], None],
    switches: Sequence[str] = ("--parallelism.no-cad", "--parallelism.cad"),
) -> Comparison:
    """Run a job without and with CAD, ``rounds`` times each, in alternating order.

    Args:
        args: of the job, its file among them.
        output: folder for records and logs; earlier records there are removed.
        ranks: processes, all on this machine.
        steps: of every run.
        warmup: of them, first ones that do not count.
        progress: told the number of steps done since it was last told.
        switches: arguments of the job that tell the runs called "off" and "on" from each other.

    Raises:
        ValueError: a run failed; says which, and why.
    """
    folders: dict[str, list[Path]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        pair = list(zip(MODES, switches, strict=True))
        for mode, switch in pair if number % 2 == 0 else pair[::-1]:
            folder = output / f"{mode}{number + 1}"
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob("rank*.jsonl"):
                old.unlink()
            own = [f"--training.steps={steps}", f"--job.dump_folder={folder}", *_FORCED, switch]
            _run_once(folder, [*args, *own], ranks, steps, progress)
            folders[mode].append(folder)
    return Comparison(*(Runs.read(folders[mode], ranks, warmup) for mode in MODES))


def _run_once(folder: Path, args: Sequence[str], ranks: int, steps: int, progress: Callable[[int], None]) -> None:
    """One run to its end; all its processes end with it."""
    launcher = f"-m torchtitan_cad.launch --standalone --nproc_per_node={ranks} -m {measured.__name__}"
    command = [sys.executable, *launcher.split(), str(folder), *args]
    records, log = folder / "rank0.jsonl", folder / "log.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env={"OMP_NUM_THREADS": "1", **os.environ}
        )
        done = 0
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.5)
                if (count := len(_read(records))) > done:
                    progress(count - done)
                    done = count
        finally:
            if process.poll() is None:  # Ctrl-C: the launcher ends its ranks
                process.terminate()
                process.wait()
    if process.returncode:
        raise ValueError(f"the run in {folder} failed: {_reason(log)}; its log is {log}")
    if done < steps:
        progress(steps - done)


def _reason(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(_ERROR)]
    return errors[0].removeprefix(_ERROR) if errors else (lines or ["it said nothing"])[-1]
