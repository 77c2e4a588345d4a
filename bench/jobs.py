# SPDX-License-Identifier: BSD-3-Clause
"""Training jobs on this machine as processes of their own, and their logs while they run."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

STEP = re.compile(r"step: +(\d+) ")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Job:
    """The small Llama of ``make train`` on some ranks, and its log as far as it has come."""

    def __init__(
        self,
        folder: Path,
        num_ranks: int,
        arguments: Sequence[str],
        prefix: Sequence[str] = (),
    ) -> None:
        """Start the job.

        Args:
            folder: for its log and all that it writes.
            arguments: options of torchtitan beside the job file.
            prefix: words before the command, such as those of ``on_core``.
        """
        self.log = folder / "job.log"
        self.folder = folder
        command = train_command(folder, num_ranks, arguments)
        self.process = start([*prefix, *command], self.log)

    @property
    def text(self) -> str:
        """What the job has printed, without colours."""
        return COLOUR.sub("", self.log.read_text())

    @property
    def step(self) -> int:
        """The last step that was logged, 0 before the first."""
        return max((int(step) for step in STEP.findall(self.text)), default=0)


def train_command(folder: Path, num_ranks: int, arguments: Sequence[str]) -> list[str]:
    """Return the command of ``Job``, to be started in the folder of a checkout."""
    return [
        sys.executable,
        "-m",
        "torchtitan_cad.launch",
        "--standalone",
        f"--nproc_per_node={num_ranks}",
        "-m",
        "torchtitan_cad.train",
        "--job.config_file=train_configs/llama3_debug_cpu.toml",
        f"--job.dump_folder={folder}",
        *arguments,
    ]


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


def watch(
    job: Job,
    steps: int,
    timeout_s: float,
    name: str = "training",
    poll_s: float = 0.1,
) -> Iterator[int]:
    """Yield the last logged step, again and again, until the job has ended.

    Args:
        steps: that the job is to train.
        name: of the progress bar.
        poll_s: seconds between two looks at the log.

    Raises:
        RuntimeError: it has failed, or takes too long.
    """
    deadline = time.monotonic() + timeout_s
    with tqdm(total=steps, unit="step", desc=name) as progress:
        while job.process.poll() is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"not done after {timeout_s} s: {job.text}")
            step = job.step
            if step > progress.n:
                progress.update(step - progress.n)
            yield step
            time.sleep(poll_s)
    if job.process.returncode:
        raise RuntimeError(f"exit code {job.process.returncode}: {job.text}")
