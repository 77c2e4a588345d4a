# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan's training by ranks that share one GPU and run at once, each on its share of the multiprocessors.

Documents are so uneven that one rank is late in most steps, as on several GPUs: one row is a single document, the
others have documents of ``Sizes.short`` tokens. Stock torchtitan and CAD with some settings train the same batches in
turns of one step. On the CPU the same code trains a toy model, where shares are what the scheduler gives.

Not shown: NVLink, NCCL, and anything beside the shares' common memory and power.
"""

import contextlib
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu

enable_cpu()

# torchtitan must not be imported before enable_cpu().
from bench.gpu import mps, shared_rank  # noqa: E402
from bench.gpu.parts import Emit  # noqa: E402
from bench.gpu.process import ROOT  # noqa: E402
from bench.turns import TurnTaker  # noqa: E402
from tests.lib.patched_torchtitan import copy_torchtitan  # noqa: E402
from torchtitan_cad.tools.compare.comparison import Runs  # noqa: E402

MODES = {
    "stock": ("--parallelism.no-cad",),
    "cad": ("--parallelism.cad",),
    "two nano-batches": ("--parallelism.cad", "--cad.nano_batches=2"),
    "loader's homes": ("--parallelism.cad", "--cad.placement=loader"),
}
SHARDING = {
    "ddp": (
        "--parallelism.data_parallel_replicate_degree={ranks}",
        "--parallelism.data_parallel_shard_degree=1",
    ),
    "fsdp2": ("--parallelism.data_parallel_shard_degree={ranks}",),
    "fsdp2 compiled": (
        "--parallelism.data_parallel_shard_degree={ranks}",
        "--compile.enable",
    ),
}
RANK = shared_rank.__name__
"""module of a rank"""
END_S = 30.0
"""seconds in which ranks end by themselves once they have trained"""
SHOWN = 1000
"""Characters kept of a log where a job has failed."""
CHOICE = re.compile(r"cad\.transport = 'auto': (.*)")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is trained.

    Attributes:
        row: tokens of a row, one row a rank.
        short: tokens of the documents of all rows but one of ``ranks + 1``.
        steps: that count, of every mode, after ``warmup`` steps.
        most_loss_error: largest relative difference of a loss to stock's.
        most_norm_error: of the norm of the gradients, in the first step.
    """

    flavor: str
    row: int
    short: int
    steps: int
    warmup: int
    dtype: str
    most_loss_error: float
    most_norm_error: float


CUDA = Sizes(shared_rank.FLAVOR, 49_152, 1024, 6, 2, "bfloat16", 1e-4, 1e-3)
CPU = Sizes("debugmodel_cpu", 1024, 64, 2, 1, "float32", 1e-5, 1e-4)


class SharedJob(TurnTaker):
    """A job of one mode whose ranks share a device; it waits but in its turns."""

    def __init__(
        self,
        folder: Path,
        num_ranks: int,
        arguments: Sequence[str],
        environments: Sequence[dict],
    ) -> None:
        super().__init__(folder, num_ranks)
        (folder / shared_rank.START).unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            RANK,
            str(folder),
            f"--job.dump_folder={folder}",
            *arguments,
        ]
        self.processes += start_ranks(
            command,
            environments,
            [self.log(rank).open("w") for rank in range(num_ranks)],
        )

    def begin(self, warmup: int) -> None:
        """Let the ranks take their shares and train their first steps."""
        (self.folder / shared_rank.START).touch()
        self.turn(warmup)

    def end(self) -> None:
        """Wait for the ranks to end by themselves, then kill those that are left."""
        deadline = time.monotonic() + END_S
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            process.kill()
            process.wait()

    def shares(self) -> list[int]:
        """Return the number of multiprocessors of every rank, where it is known."""
        paths = [self.folder / f"share{rank}.json" for rank in range(self.num_ranks)]
        return [json.loads(path.read_text()) for path in paths if path.exists()]

    def transport(self) -> str:
        """Return what the job said of its choice of a transport."""
        found = CHOICE.search(self.log(0).read_text(errors="replace"))
        return found[1] if found else "nothing was said"


def start_ranks(
    command: Sequence[str], environments: Sequence[dict], outputs: Sequence[Any]
) -> list[subprocess.Popen]:
    """Start a process for every rank, all of which use device 0.

    Args:
        environments: variables of every rank beside those that torchrun would set.
        outputs: file of every rank for what it prints.
    """
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    search = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    world = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(len(environments)),
    }
    world |= {
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": search,
    }
    world |= {
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }
    processes = []
    for rank, (environment, output) in enumerate(
        zip(environments, outputs, strict=True)
    ):
        env = {**os.environ, **world, **environment, "RANK": str(rank)}
        processes.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        )
    return processes


@contextlib.contextmanager
def shares(device: str, num_ranks: int) -> Iterator[list[dict[str, str]]]:
    """Give every rank the variables by which it gets an equal share of the device, in this context.

    Raises:
        Skip: the device cannot be shared.
    """
    if device == "cpu":
        yield [
            {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_ranks)}
            for rank in range(num_ranks)
        ]
        return
    with mps.service() as running:
        yield [running.share(100 // num_ranks) for _ in range(num_ranks)]


def measure(device: str, emit: Emit, ranks: str, sharding: str, modes: str) -> None:
    """Emit speeds, losses, imbalance and waits of all modes.

    Args:
        ranks: number of ranks.
        sharding: key of ``SHARDING``.
        modes: keys of ``MODES``, separated by commas; stock is the first.

    Raises:
        Skip: the device cannot be shared.
        RuntimeError: a job failed, or trains otherwise than stock.
    """
    sizes = CUDA if device == "cuda" else CPU
    options = {mode: MODES[mode] for mode in modes.split(",")}
    with shares(device, int(ranks)) as environments:
        runs = train_modes(sizes, sharding, options, environments, emit)
    report(runs, sizes, emit)


def train_modes(
    sizes: Sizes,
    sharding: str,
    modes: dict[str, Sequence[str]],
    environments: Sequence[dict[str, str]],
    emit: Emit,
    *,
    in_turns: bool = True,
) -> dict[str, Runs]:
    """Train one job for each mode, and return their records.

    Args:
        sharding: key of ``SHARDING``.
        modes: arguments of the job by name.
        environments: variables of every rank.
        in_turns: whether the jobs take turns of a step; otherwise they run at once, and their times say nothing.

    Raises:
        RuntimeError: a job failed; says how its log ends.
    """
    num_ranks = len(environments)
    jobs = dict[str, SharedJob]()
    with tempfile.TemporaryDirectory(prefix="sharing_") as name:
        folder = Path(name)
        # Stock divides gradients of replicas once too often: patches/ddp_gradient_scale.patch.
        patched = copy_torchtitan(
            folder / "patched", ROOT / "patches" / "ddp_gradient_scale.patch"
        )
        search = os.pathsep.join([str(patched), str(ROOT), *filter(None, sys.path)])
        environments = [
            {**environment, "PYTHONPATH": search} for environment in environments
        ]
        arguments = job_arguments(sizes, num_ranks, sharding, folder)
        try:
            for mode, options in modes.items():
                own_folder = folder / mode.replace(" ", "_")
                jobs[mode] = SharedJob(
                    own_folder, num_ranks, [*arguments, *options], environments
                )
            train = train_in_turns if in_turns else train_at_once
            train(list(jobs.values()), sizes, emit)
        except RuntimeError:
            for mode, job in jobs.items():
                print(
                    f"The end of {mode}'s first log:\n{job.log(0).read_text(errors='replace')[-SHOWN:]}"
                )
            raise
        finally:
            for job in jobs.values():
                job.end()
        emit("transports", {mode: job.transport() for mode, job in jobs.items()})
        return {
            mode: Runs.read([job.folder], num_ranks, 0) for mode, job in jobs.items()
        }


def job_arguments(
    sizes: Sizes, num_ranks: int, sharding: str, folder: Path
) -> list[str]:
    """Return the arguments that all modes have in common, and write their tokenizer."""
    from torchtitan_cad.tools.prepare.tokenizer import prepare_tokenizer

    assets = prepare_tokenizer(folder / "assets", kind="bytes")
    shorts = [str(sizes.short)] * (num_ranks * sizes.row // sizes.short)
    documents = "fixed:" + ",".join([str(sizes.row), *shorts])
    return [
        *(
            "--job.config_file=train_configs/llama3_debug_cpu.toml",
            f"--model.flavor={sizes.flavor}",
        ),
        *(
            f"--model.hf_assets_path={assets}",
            "--training.dataset=synthetic",
            f"--training.dataset_path={documents}",
        ),
        *(
            f"--training.seq_len={sizes.row}",
            f"--training.steps={sizes.warmup + sizes.steps}",
        ),
        *(
            f"--training.mixed_precision_param={sizes.dtype}",
            "--optimizer.lr=1e-4",
            "--cad.placement=auto",
        ),
        *("--metrics.no-enable-tensorboard", "--metrics.log_freq=1"),
        *(argument.format(ranks=num_ranks) for argument in SHARDING[sharding]),
    ]


def train_in_turns(jobs: Sequence[SharedJob], sizes: Sizes, emit: Emit) -> None:
    """Let the jobs start one after another, and then train a step each in turn, in alternating order."""
    begin = time.monotonic()
    for job in jobs:
        job.begin(sizes.warmup)
        emit("seconds until all have begun", time.monotonic() - begin)
        emit("multiprocessors", [job.shares() for job in jobs])
    for number in range(sizes.steps):
        for job in jobs if number % 2 == 0 else jobs[::-1]:
            job.turn()


def train_at_once(jobs: Sequence[SharedJob], sizes: Sizes, emit: Emit) -> None:
    """Let all jobs train all their steps."""
    for job in jobs:
        (job.folder / shared_rank.START).touch()
        job.allow(sizes.warmup + sizes.steps)
    for job in jobs:
        job.await_records()
    emit("multiprocessors", [job.shares() for job in jobs])


def report(runs: dict[str, Runs], sizes: Sizes, emit: Emit) -> None:
    """Emit the figures of all modes; raise RuntimeError if one trains otherwise than stock."""
    stock = runs["stock"]
    counted = slice(sizes.warmup, None)
    ideal = ideal_seconds(stock, counted)
    pairs = pairs_of_ranks(stock)[counted]
    emit(
        "imbalance of the loader's rows",
        float((pairs.max(axis=1) / pairs.mean(axis=1)).mean()),
    )
    rows = []
    for mode, run in runs.items():
        seconds = run.step_seconds[counted]
        row = {
            "mode": mode,
            "seconds": float(seconds.mean()),
            "tokens_per_second": float(run.tokens[0, counted].sum() / seconds.sum()),
            "speed_up": float(stock.step_seconds[counted].sum() / seconds.sum()),
            "ideal_speed_up": float(stock.step_seconds[counted].sum() / ideal.sum()),
            "loss_error": float(np.abs(run.loss / stock.loss - 1).max()),
            "norm_error": float(
                np.abs(run.gradient_norm[0, 0] / stock.gradient_norm[0, 0] - 1).max()
            ),
        }
        if mode != "stock":
            row["imbalance_at_home"] = float(run.imbalance_before[0, counted].mean())
            row["imbalance_planned"] = float(run.imbalance_after[0, counted].mean())
            row["megabytes_a_rank"] = float(
                run.bytes_per_rank_mean[0, counted].mean() / 1e6
            )
            # A step in which nothing moves has no wait.
            row["exposed_wait"] = float(
                np.nan_to_num(run.waiting[0, counted]).max(axis=1).sum() / seconds.sum()
            )
        rows.append(row)
    emit("modes", rows)
    emit(
        "seconds_by_step",
        {mode: run.step_seconds.tolist() for mode, run in runs.items()},
    )
    emit(
        "waits_by_step",
        {
            mode: run.waiting[0].tolist()
            for mode, run in runs.items()
            if mode != "stock"
        },
    )
    emit("losses", {mode: run.loss[0, :, 0].tolist() for mode, run in runs.items()})
    emit(
        "gradient_norms",
        {mode: run.gradient_norm[0, :, 0].tolist() for mode, run in runs.items()},
    )
    for row in rows:
        if not (
            row["loss_error"] <= sizes.most_loss_error
            and row["norm_error"] <= sizes.most_norm_error
        ):
            raise RuntimeError(f"{row['mode']} does not train as stock: {row}")


def ideal_seconds(stock: Runs, counted: slice) -> np.ndarray:
    """Return the seconds of every step if attention were spread evenly at no cost, by stock's own steps.

    A step of stock takes a part that all steps have, and a part in proportion to the query-key pairs of the rank with
    most; the even step has the mean rank's pairs instead.
    """
    pairs = pairs_of_ranks(stock)[counted]
    most = pairs.max(axis=1)
    mean = pairs.mean(axis=1)
    seconds = stock.step_seconds[counted]
    if np.ptp(most) == 0:
        return seconds * (mean / most)
    slope, constant = np.polyfit(most, seconds, 1)
    return constant + slope * mean


def pairs_of_ranks(runs: Runs) -> np.ndarray:
    """Return a number in proportion to the query-key pairs of the rows loaded, by step and rank."""
    return np.array(
        [
            [sum(length**2 for row in rank for length in row) for rank in step]
            for step in runs.rows
        ]
    )
