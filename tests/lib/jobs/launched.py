# SPDX-License-Identifier: BSD-3-Clause
"""Jobs under torchrun, as a user starts them, to which things happen: what is printed afterwards, and what is left."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.lib.jobs.harness import REPOSITORY, child_environment, job_files

TORCHRUN = "torch.distributed.run"
LAUNCH = "torchtitan_cad.launch"
CONFIG = REPOSITORY / "train_configs" / "llama3_debug_cpu.toml"
SMALL = [
    "--training.seq_len=1024",
    "--training.local_batch_size=2",
    "--cad.transport=collective",
    "--cad.tolerance=0.02",
]
MARK = "LAUNCHED_BY_TEST"
"""Environment variable that all processes of a job inherit; ranks are not in the launcher's process group."""


def read_lines(process: subprocess.Popen, take: Callable[[str], object]) -> None:
    """Give ``take`` every line that a process prints, without colours."""
    for line in process.stdout:
        take(re.sub(r"\x1b\[[0-9;]*m", "", line.rstrip("\n")))


def losses_in(text: str) -> list[tuple[int, float]]:
    """Step and loss of every step that was logged, in order; of those that ran twice both."""
    found = re.findall(r"step: +(\d+) +loss: +(\d[\d.]+)", text)
    return [(int(step), float(loss)) for step, loss in found]


class Launched:
    """A job of ``nranks`` ranks, with its output line by line and the time of each.

    Args:
        launcher: module that starts the ranks.
        restarts: how often it may start them again.
        args: of the job, over ``llama3_debug_cpu.toml`` made small.
    """

    def __init__(
        self,
        args: Sequence[str],
        dump_folder: Path,
        nranks: int = 2,
        launcher: str = LAUNCH,
        restarts: int = 0,
    ) -> None:
        self._id = uuid.uuid4().hex
        ranks = f"--standalone --nproc_per_node={nranks} --max-restarts={restarts}"
        files = job_files(CONFIG, dump_folder)
        job = ["-m", "torchtitan_cad.train", *files, *SMALL, *args]
        self.process = subprocess.Popen(
            [sys.executable, "-m", launcher, *ranks.split(), *job],
            env={**child_environment(), MARK: self._id},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # a foreground process group of its own, as in a terminal
        )
        self.lines = []
        self._reader = threading.Thread(
            target=read_lines, args=(self.process, self.lines.append), daemon=True
        )
        self._reader.start()

    def wait_for(self, pattern: str, timeout_s: float) -> None:
        """Until a line has matched.

        Raises:
            AssertionError: none did in time, or before the job ended.
        """
        deadline = time.monotonic() + timeout_s
        while not any(re.search(pattern, line) for line in self.lines):
            assert time.monotonic() < deadline, "\n".join(self.lines)
            assert self.process.poll() is None, "\n".join(self.lines)
            time.sleep(0.05)

    def _environments(self) -> dict[int, bytes]:
        """Environments of the launcher and of all living processes that it has started, by process id."""
        mark = f"{MARK}={self._id}\0".encode()
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environment = (folder / "environ").read_bytes()
                if mark in environment:
                    found[int(folder.name)] = environment
        return found

    def children_of(self, parent: int) -> list[int]:
        """Process ids of what a process of the job has started and that lives, in order of their number."""
        files = Path(f"/proc/{parent}/task").glob("*/children")
        pids = " ".join(file.read_text() for file in files).split()
        return sorted(self._environments().keys() & set(map(int, pids)))

    def rank_pids(self) -> dict[int, int]:
        """Process ids of the ranks, children of the launcher."""
        environments = self._environments()
        found = {}
        for pid in self.children_of(self.process.pid):
            rank = re.search(rb"(?:^|\0)RANK=(\d+)\0", environments.get(pid, b""))
            if rank:
                found[int(rank[1])] = pid
        return found

    def finish(self, timeout_s: float) -> tuple[int, float]:
        """The launcher's exit code, and the seconds until it and all that it started have ended."""
        begin = time.monotonic()
        returncode = self.process.wait(timeout_s)
        while left := self._environments():
            assert time.monotonic() < begin + timeout_s, (
                f"processes are left: {list(left)}"
            )
            time.sleep(0.05)
        self._reader.join(5)
        return returncode, time.monotonic() - begin

    def kill(self) -> None:
        while left := self._environments():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self.process.wait()


@contextlib.contextmanager
def launched(*args, **options) -> Iterator[Launched]:
    """A job that has ended when the context does."""
    job = Launched(*args, **options)
    try:
        yield job
    finally:
        job.kill()


def shared_memory() -> set[str]:
    """Names in /dev/shm that no process has mapped: what jobs have left, here or elsewhere on the machine.

    Without semaphores of Python's multiprocessing, of which a job has none and other work has many for moments.
    """

    def unmapped():
        names = set(os.listdir("/dev/shm"))
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with contextlib.suppress(OSError):
                names -= set(re.findall(r"/dev/shm/(\S+)", maps.read_text()))
        return {name for name in names if not name.startswith("sem.mp-")}

    return unmapped() & unmapped()  # a process may begin or end meanwhile
