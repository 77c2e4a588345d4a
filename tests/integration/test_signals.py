# SPDX-License-Identifier: BSD-3-Clause
"""Signals and full disks under both launchers: who is at fault, in the first lines; nothing left behind; a resume.

The data of some jobs is loaded by worker processes.
"""

import functools
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from tests.lib.jobs.launched import LAUNCH, TORCHRUN, Launched, launched, shared_memory
from tests.lib.sets import matrix, slow
from torchtitan_cad.tools.report import check_logged_step, read_steps

pytestmark = pytest.mark.timeout(900)

START_S = 400
END_S = 90
TIMEOUT_S = 15
JOB = [
    "--training.steps=100000",
    f"--comm.train_timeout_seconds={TIMEOUT_S}",
    "--cad.heartbeat_seconds=0.5",
]
CHECKPOINTS = [
    "--checkpoint.enable",
    "--checkpoint.interval=3",
    "--checkpoint.keep_latest_k=2",
]
OF_RANK = {
    "SIGKILL": "is gone: its process has ended, at step ",
    "SIGTERM": "received SIGTERM at step ",
    "SIGSTOP": "(gave no sign of life|is gone)",
}
OF_TORCHRUN = r"W\d{4} .*\btorch/distributed/elastic/"
"""Its own account of the signals that it sends, a line per rank."""
OF_STORE = r"(\[rank\d\]:)?\[W.* TCPStore\.cpp|Exception raised from |frame #|<omitting python frames>|$"
"""Lines that torch prints for a rank that was asking the store when its host, the launcher, vanished."""


def strike(job: Launched, target: str, name: str) -> str:
    """Send a signal, and return what one of the first lines must then be.

    Args:
        target: a rank, the worker of one, the whole job or its launcher.
    """
    if target == "launcher":  # which has no time left to end its ranks
        job.process.kill()
        return rf"the launcher \([^)]*pid {job.process.pid}\) {OF_RANK['SIGKILL']}"
    number = getattr(signal, name)
    if target == "job":
        # Ctrl-C reaches every process of the terminal's group; a scheduler's SIGTERM reaches the launcher.
        send = os.killpg if name == "SIGINT" else os.kill
        send(job.process.pid, number)
        return rf"rank \d \([^)]*\) received {name} at step \d+"
    if target == "worker":
        os.kill(job.children_of(job.rank_pids()[1])[-1], number)
        return (
            r"rank 1 .* stopped by itself .*DataLoader worker .*(killed|exited|reset)"
        )
    pid = job.rank_pids()[int(target)]
    os.kill(pid, number)
    return rf"rank {target} \([^)]*pid {pid}\) {OF_RANK[name]}"


LAUNCHERS = {"torchrun": TORCHRUN, "launch": LAUNCH}
IN_MATRIX = ("torchrun 2 1 SIGKILL", "launch 2 launcher SIGKILL")
IN_SLOW = (
    "torchrun 2 0 SIGKILL",
    "torchrun 4 0 SIGKILL",
    "torchrun 4 3 SIGKILL",
    "torchrun 2 1 SIGTERM",
    "torchrun 4 2 SIGTERM",
    "torchrun 2 1 SIGSTOP",
    "torchrun 4 2 SIGSTOP",
    "launch 2 1 SIGKILL",
    "launch 4 3 SIGKILL",
    "launch 4 2 SIGTERM",
    "launch 2 1 SIGSTOP",
    "launch 4 launcher SIGKILL",
    "torchrun 2 launcher SIGKILL",
    "torchrun 4 launcher SIGKILL",
    *map(" ".join, product(LAUNCHERS, "24", ["job"], ("SIGINT", "SIGTERM"))),
)
"""Launcher, ranks, what the signal goes to, and the signal."""


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, marks=matrix) for case in IN_MATRIX),
        *(pytest.param(case, marks=slow) for case in IN_SLOW),
    ],
)
def test_who_is_at_fault_is_named_first_and_the_job_resumes(case, tmp_path):
    """The job ends in time, with a whole summary, and leaves nothing behind."""
    started_by, ranks, target, name = case.split()
    launcher = LAUNCHERS[started_by]
    nranks = int(ranks)
    shared = shared_memory()
    args = [*JOB, *CHECKPOINTS]
    with launched(args, tmp_path, nranks, launcher) as job:
        job.wait_for(r"step: +4 ", START_S)
        before = len(job.lines)
        cause = strike(job, target, name)
        returncode, seconds = job.finish(END_S)
    lines = unusual(job.lines[before:])
    ignored = OF_STORE if target == "launcher" else OF_TORCHRUN
    said = [line for line in lines if not re.match(ignored, line)]
    assert seconds < TIMEOUT_S + 45 * (name == "SIGSTOP")
    assert any(re.search(cause, line) for line in said[:3]), "\n".join(said)
    if target == "job":
        number = getattr(signal, name)
        assert returncode == (128 + number if launcher == LAUNCH else 1)
    else:
        assert returncode != 0
    if launcher == LAUNCH or target == "launcher":
        assert_no_stack(said)
    assert shared_memory() == shared
    check_summary(tmp_path)
    check_resume(tmp_path, nranks)


def assert_no_stack(lines: list[str]) -> None:
    assert not any("Traceback" in line for line in lines), "\n".join(lines)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 7 MB for checkpoints."""
    disk = tmp_path / "checkpoint"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=7m", "tmpfs", disk]
    if subprocess.run(mount).returncode:
        pytest.skip("may not mount")
    yield disk
    subprocess.run(["umount", disk], check=True)


@slow
@pytest.mark.parametrize("launcher", [LAUNCH, TORCHRUN])
@pytest.mark.parametrize("nranks", [2, 4])
def test_full_disk_is_named_and_the_last_checkpoint_resumes(
    nranks, launcher, tmp_path, small_disk
):
    shared = shared_memory()
    with launched([*JOB, *CHECKPOINTS], tmp_path, nranks, launcher) as job:
        returncode, _ = job.finish(START_S)
    assert returncode == 1
    text = "\n".join(job.lines)
    *_, after_step_6 = re.split(r".* step: +6 .*\n", text)
    said = unusual(after_step_6.splitlines())
    (error,) = [line for line in job.lines if line.startswith("error: ")]
    cause = rf"error: a checkpoint in {small_disk}, where [0-3] MB are free, could not be written .* rank \d"
    assert re.match(cause, error)
    assert error in said[:3], "\n".join(said)
    if launcher == LAUNCH:
        assert_no_stack(said)
    assert shared_memory() == shared
    check_summary(tmp_path)
    larger = ["mount", "-o", "remount,size=64m", small_disk]
    subprocess.run(larger, check=True)
    assert check_resume(tmp_path, nranks) == 4


def unusual(lines: list[str]) -> list[str]:
    usual = re.compile(r"INFO - (step:|cad:|Saving|Finished|\[GC\])")
    return [line for line in lines if not usual.search(line)]


def check_summary(dump_folder: Path) -> dict[int, float]:
    """The last run's file is whole; returns the loss of each of its steps."""
    folders = (dump_folder / "tb").iterdir()
    last = max(folders, key=lambda path: path.stat().st_ctime_ns)
    steps = read_steps(last / "cad_steps.jsonl", check_logged_step)
    for step in steps:
        assert None not in (step["imbalance_after"], step["bytes_per_rank_max"])
    return {step["step"]: step["loss"] for step in steps}


def files_of_runs(dump_folder: Path) -> dict[Path, bytes]:
    files = filter(Path.is_file, (dump_folder / "tb").rglob("*"))
    return {path: path.read_bytes() for path in files}


def check_resume(dump_folder: Path, nranks: int) -> int:
    """The job goes on behind its last checkpoint with the losses of an undisturbed one; returns the first step."""
    earlier = files_of_runs(dump_folder)
    with launched([*JOB, *CHECKPOINTS], dump_folder, nranks) as job:
        job.wait_for("Training starts at step", START_S)
        found = re.search(r"Training starts at step (\d+)", "\n".join(job.lines))
        start = int(found[1])
        assert start > 3
        assert start % 3 == 1
        job.wait_for(rf"step: +{start + 3} ", START_S)
    assert earlier.items() <= files_of_runs(dump_folder).items(), (
        "a later run changed earlier files"
    )
    losses = check_summary(dump_folder)
    expected = undisturbed(nranks)
    assert min(losses) == start
    assert len(losses) >= 3
    for step in losses.keys() & expected.keys():
        assert losses[step] == expected[step]
    return start


@functools.cache
def undisturbed(nranks: int) -> dict[int, float]:
    """Losses of the job's first 60 steps."""
    with tempfile.TemporaryDirectory() as folder:
        with launched(JOB, Path(folder), nranks) as job:
            job.wait_for("step: +61 ", START_S)
        return check_summary(Path(folder))


# Jobs whose data is loaded by worker processes ------------------------------------------------------------------------

WITH_WORKERS = [
    "--experimental.custom_import=tests.lib.jobs.worker_jobs",
    "--training.dataloader.num_workers=2",
    "--training.dataloader.persistent_workers",
    "--cad.heartbeat_seconds=0.5",
]
DOCUMENT = (
    "of 200,000 tokens: a worker sends what is left of it with every batch, more than its pipe holds. "
    * 2000
)


@pytest.fixture(params=["fork", "spawn"])
def method(request, monkeypatch) -> Iterator[str]:
    """How workers start; afterwards no shared memory is left."""
    monkeypatch.setenv("WORKER_START_METHOD", request.param)
    shared = shared_memory()
    yield request.param
    assert shared_memory() == shared


@matrix
@pytest.mark.usefixtures("method")
def test_job_with_workers_ends_after_its_last_step(tmp_path):
    with launched([*WITH_WORKERS, "--training.steps=2"], tmp_path) as job:
        job.wait_for("Training completed", START_S)
        assert job.finish(45)[0] == 0
    assert sum("Process group destroyed" in line for line in job.lines) == 2


@matrix
@pytest.mark.parametrize(
    ("target", "name", "code"),
    [
        ("worker", "SIGKILL", 1),
        ("1", "SIGKILL", 137),
        ("1", "SIGTERM", 143),
        ("job", "SIGTERM", 143),
        ("job", "SIGINT", 130),
    ],
)
def test_job_with_workers_ends_soon_with_its_cause(
    method, target, name, code, tmp_path
):
    """While workers wait for somebody to take what they have loaded."""
    if (method, target, name) == ("spawn", "1", "SIGKILL"):
        pytest.skip("torch's spawned workers wait for ever to send what they loaded")
    documents = tmp_path / "documents"
    documents.mkdir()
    for number in range(8):
        (documents / f"{number}.txt").write_text(f"{number} {DOCUMENT}")
    endless = ["--training.steps=100000", f"--training.dataset_path={documents}"]
    with launched([*WITH_WORKERS, *endless], tmp_path) as job:
        job.wait_for(r"step: +4 ", START_S)
        for pid in job.rank_pids().values():
            assert len(job.children_of(pid)) >= 2
        before = len(job.lines)
        cause = strike(job, target, name)
        returned, _ = job.finish(45)
    said = "\n".join(job.lines[before:])
    assert returned == code, said
    assert re.search(cause, said), said
