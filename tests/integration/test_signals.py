# SPDX-License-Identifier: BSD-3-Clause
"""Signals and full disks under both launchers: who is at fault, in the first lines; nothing left behind; a resume."""

import functools
import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lib.jobs.launched import LAUNCH, TORCHRUN, Launched, launched, shared_memory

pytestmark = pytest.mark.timeout(900)

START_S, END_S, TIMEOUT_S = 400, 90, 15
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
CAUSES = {
    "SIGKILL": r"rank {rank} \([^)]*pid {pid}\) is gone: its process has ended, at step \d+",
    "SIGTERM": r"rank {rank} \([^)]*pid {pid}\) received SIGTERM at step \d+",
    "SIGSTOP": r"rank {rank} \([^)]*pid {pid}\) (gave no sign of life|is gone)",
}


def case(
    launcher: str,
    nranks: int,
    name: str,
    rank: int,
    *,
    resumes: bool = True,
    transport: str = "collective",
):
    marks = [pytest.mark.slow if resumes else pytest.mark.matrix]
    title = f"{name}-{rank}-of-{nranks}-{launcher}-{transport}"
    return pytest.param(
        launcher, nranks, name, rank, transport, resumes, marks=marks, id=title
    )


def end_job(
    strike: Callable[[Launched], str],
    folder: Path,
    nranks: int,
    launcher: str,
    *args: str,
    ignored: str | None = None,
) -> tuple[int, list[str]]:
    """``strike`` ends a job in its fifth step, and returns what one of the first three lines must then be.

    Returns the exit code and the lines, without those that match ``ignored``. The job ends in time, with a whole
    summary, and leaves nothing behind.
    """
    shared = shared_memory()
    with launched([*JOB, *CHECKPOINTS, *args], folder, nranks, launcher) as job:
        job.wait_for(r"step: +4 ", START_S)
        before = len(job.lines)
        cause = strike(job)
        returncode, seconds = job.finish(END_S)
    said = [
        line
        for line in unusual(job.lines[before:])
        if ignored is None or not re.match(ignored, line)
    ]
    assert seconds < TIMEOUT_S + 45 * ("gave no sign of life" in cause)
    assert any(re.search(cause, line) for line in said[:3]), "\n".join(said)
    assert shared_memory() == shared
    check_summary(folder)
    return returncode, said


def assert_no_stack(lines: list[str]) -> None:
    assert not any("Traceback" in line for line in lines), "\n".join(lines)


@pytest.mark.parametrize(
    ("launcher", "nranks", "name", "rank", "transport", "resumes"),
    [
        case(TORCHRUN, 2, "SIGKILL", 1, resumes=False),
        case(TORCHRUN, 2, "SIGKILL", 0),
        case(TORCHRUN, 4, "SIGKILL", 0),
        case(TORCHRUN, 4, "SIGKILL", 3),
        case(TORCHRUN, 2, "SIGTERM", 1),
        case(TORCHRUN, 4, "SIGTERM", 2),
        case(TORCHRUN, 2, "SIGSTOP", 1),
        case(TORCHRUN, 4, "SIGSTOP", 2),
        case(LAUNCH, 2, "SIGKILL", 1),
        case(LAUNCH, 4, "SIGKILL", 3),
        case(LAUNCH, 4, "SIGKILL", 2, transport="symm_mem"),
        case(LAUNCH, 4, "SIGTERM", 2),
        case(LAUNCH, 2, "SIGSTOP", 1),
    ],
)
def test_rank_that_gets_a_signal_is_named_first(
    launcher, nranks, name, rank, transport, resumes, tmp_path
):
    def signal_rank(job: Launched) -> str:
        pid = job.rank_pids()[rank]
        os.kill(pid, getattr(signal, name))
        return CAUSES[name].format(rank=rank, pid=pid)

    transport = f"--cad.transport={transport}"
    returncode, said = end_job(
        signal_rank, tmp_path, nranks, launcher, transport, ignored=OF_TORCHRUN
    )
    assert returncode != 0
    # torchrun ends with one of its own
    assert_no_stack(said if launcher == LAUNCH else said[:2])
    if resumes:
        check_resume(tmp_path, nranks)


@pytest.mark.slow
@pytest.mark.parametrize("nranks", [2, 4])
@pytest.mark.parametrize("launcher", [LAUNCH, TORCHRUN])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_whole_job_ends_in_order(name, launcher, nranks, tmp_path):
    """Ctrl-C reaches every process of the terminal's group; a scheduler's SIGTERM reaches the launcher."""

    def signal_job(job: Launched) -> str:
        os.killpg(
            job.process.pid, signal.SIGINT
        ) if name == "SIGINT" else job.process.terminate()
        return rf"rank \d \([^)]*\) received {name} at step \d+"

    returncode, said = end_job(
        signal_job, tmp_path, nranks, launcher, ignored=OF_TORCHRUN
    )
    assert returncode == (128 + getattr(signal, name) if launcher == LAUNCH else 1)
    if launcher == LAUNCH:
        assert_no_stack(said)
    check_resume(tmp_path, nranks)


@pytest.mark.matrix
@pytest.mark.parametrize("nranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "launcher", [LAUNCH, pytest.param(TORCHRUN, marks=pytest.mark.slow)]
)
def test_ranks_end_when_their_launcher_is_killed(launcher, nranks, tmp_path):
    """SIGKILL leaves it no time to end them."""

    def kill_launcher(job: Launched) -> str:
        job.process.kill()
        return rf"the launcher \([^)]*pid {job.process.pid}\) is gone: its process has ended, at step \d+"

    _, said = end_job(kill_launcher, tmp_path, nranks, launcher, ignored=OF_STORE)
    assert sum("the launcher (" in line for line in said[:3]) == 1
    assert_no_stack(said)
    check_resume(tmp_path, nranks)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
@pytest.mark.parametrize("launcher", [LAUNCH, TORCHRUN])
@pytest.mark.parametrize("nranks", [2, 4])
def test_full_disk_is_named_and_the_last_checkpoint_resumes(nranks, launcher, tmp_path):
    shared = shared_memory()
    disk = tmp_path / "checkpoint"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=7m", "tmpfs", disk]
    ).returncode:
        pytest.skip("may not mount")
    try:
        with launched([*JOB, *CHECKPOINTS], tmp_path, nranks, launcher) as job:
            returncode, _ = job.finish(START_S)
        last_step = max(
            i for i, line in enumerate(job.lines) if re.search(r" step: +6 ", line)
        )
        said = unusual(job.lines[last_step + 1 :])
        cause = rf"error: a checkpoint in {disk} could not be written .* rank \d, [0-3] MB are free"
        assert returncode == 1
        (error,) = [line for line in job.lines if line.startswith("error: ")]
        assert re.match(cause, error)
        assert error in said[:3], "\n".join(said)
        if launcher == LAUNCH:
            assert_no_stack(said)
        assert shared_memory() == shared
        check_summary(tmp_path)
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        assert check_resume(tmp_path, nranks) == 4
    finally:
        subprocess.run(["umount", disk], check=True)


OF_TORCHRUN = r"W\d{4} .*\btorch/distributed/elastic/"
"""Its own account of the signals that it sends, a line per rank."""

OF_STORE = r"(\[rank\d\]:)?\[W.* TCPStore\.cpp|Exception raised from |frame #|<omitting python frames>|$"
"""Lines that torch prints for a rank that was asking the store when its host, the launcher, vanished."""


def unusual(lines: list[str]) -> list[str]:
    return [
        line
        for line in lines
        if not re.search(r"INFO - (step:|cad:|Saving|Finished|\[GC\])", line)
    ]


def check_summary(dump_folder: Path) -> dict[int, float]:
    """The last run's file is whole; returns the loss of each of its steps."""
    folder = max(
        (dump_folder / "tb").iterdir(), key=lambda path: path.stat().st_ctime_ns
    )
    steps = [
        json.loads(line)
        for line in (folder / "cad_steps.jsonl").read_text().splitlines()
    ]
    assert all(
        step[name] is not None
        for step in steps
        for name in ("imbalance_after", "bytes_per_rank_max", "loss")
    )
    return {step["step"]: step["loss"] for step in steps}


def check_resume(dump_folder: Path, nranks: int) -> int:
    """The job goes on behind its last checkpoint with the losses of an undisturbed one; returns the first step."""
    earlier = {
        path: path.read_bytes()
        for path in (dump_folder / "tb").rglob("*")
        if path.is_file()
    }
    with launched([*JOB, *CHECKPOINTS], dump_folder, nranks) as job:
        job.wait_for("Training starts at step", START_S)
        (start,) = re.findall(r"Training starts at step (\d+)", "\n".join(job.lines))[
            :1
        ]
        assert int(start) % 3 == 1
        assert int(start) > 3
        job.wait_for(rf"step: +{int(start) + 3} ", START_S)
    assert all(path.read_bytes() == content for path, content in earlier.items()), (
        "a later run changed earlier files"
    )
    losses, expected = check_summary(dump_folder), undisturbed(nranks)
    assert min(losses) == int(start)
    assert len(losses) >= 3
    compared = [step for step in losses if step <= LAST_STEP]
    assert [losses[step] for step in compared] == [expected[step] for step in compared]
    return int(start)


LAST_STEP = 60


@functools.cache
def undisturbed(nranks: int) -> dict[int, float]:
    """Losses of the job's first steps."""
    with tempfile.TemporaryDirectory() as folder:
        with launched(JOB, Path(folder), nranks) as job:
            job.wait_for(rf"step: +{LAST_STEP + 1} ", START_S)
        return check_summary(Path(folder))
