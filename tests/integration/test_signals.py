"""Signals and full disks under torchrun: who is at fault, in the first lines; nothing left behind; a resume."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.integration.launched import LAUNCH, TORCHRUN, launched, shared_memory

pytestmark = pytest.mark.timeout(900)

START_S, END_S, TIMEOUT_S = 400, 90, 15
JOB = ["--training.steps=100000", f"--comm.train_timeout_seconds={TIMEOUT_S}", "--cad.heartbeat_seconds=0.5"]
CHECKPOINTS = ["--checkpoint.enable", "--checkpoint.interval=3", "--checkpoint.keep_latest_k=2"]
CAUSES = {
    "SIGKILL": r"rank {rank} \([^)]*pid {pid}\) is gone: its process has ended, at step \d+",
    "SIGTERM": r"rank {rank} \([^)]*pid {pid}\) received SIGTERM at step \d+",
    "SIGSTOP": r"rank {rank} \([^)]*pid {pid}\) (gave no sign of life|is gone)",
}


def matrix(launcher: str, nranks: int, name: str, rank: int, *marks: pytest.MarkDecorator):
    return pytest.param(launcher, nranks, name, rank, marks=marks, id=f"{name}-{rank}-of-{nranks}-{launcher}")


@pytest.mark.parametrize(
    ("launcher", "nranks", "name", "rank"),
    [
        matrix(TORCHRUN, 2, "SIGKILL", 1),
        *(
            matrix(TORCHRUN, nranks, name, rank, pytest.mark.slow)
            for nranks, name, rank in [
                (2, "SIGKILL", 0),
                (4, "SIGKILL", 0),
                (4, "SIGKILL", 3),
                (2, "SIGTERM", 1),
                (4, "SIGTERM", 2),
                (2, "SIGSTOP", 1),
                (4, "SIGSTOP", 2),
            ]
        ),
    ],
)
def test_rank_that_gets_a_signal_is_named_first(
    launcher: str, nranks: int, name: str, rank: int, tmp_path: Path
) -> None:
    shared = shared_memory()
    with launched([*JOB, *CHECKPOINTS], tmp_path, nranks, launcher) as job:
        job.wait_for(r"step: +4 ", START_S)
        pid = job.rank_pids()[rank]
        before = len(job.lines)
        begin = time.monotonic()
        os.kill(pid, getattr(signal, name))
        returncode, seconds = job.finish(END_S)
    said = [line for line in job.lines[before:] if not re.search(r"INFO - (step:|cad:|Saving|Finished|\[GC\])", line)]
    report(f"{name} of rank {rank} of {nranks}", said, time.monotonic() - begin, returncode)
    assert returncode != 0
    assert seconds < (TIMEOUT_S + 45 if name == "SIGSTOP" else TIMEOUT_S)
    assert any(re.search(CAUSES[name].format(rank=rank, pid=pid), line) for line in said[:3]), "\n".join(said)
    assert not any("Traceback" in line for line in said[:3])
    assert shared_memory() == shared


@pytest.mark.slow
@pytest.mark.parametrize("nranks", [2, 4])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_whole_job_ends_in_order(name: str, nranks: int, tmp_path: Path) -> None:
    """Ctrl-C reaches every process of the terminal's group; a scheduler's SIGTERM reaches the launcher."""
    shared = shared_memory()
    with launched([*JOB, *CHECKPOINTS], tmp_path, nranks, LAUNCH) as job:
        job.wait_for(r"step: +4 ", START_S)
        before = len(job.lines)
        begin = time.monotonic()
        if name == "SIGINT":
            os.killpg(job.process.pid, signal.SIGINT)
        else:
            os.kill(job.process.pid, signal.SIGTERM)
        returncode, seconds = job.finish(END_S)
    said = [line for line in job.lines[before:] if not re.search(r"INFO - (step:|cad:|Saving|Finished|\[GC\])", line)]
    report(f"{name} of the job, {nranks} ranks", said, time.monotonic() - begin, returncode)
    assert returncode == 128 + getattr(signal, name)
    assert seconds < TIMEOUT_S
    assert re.search(rf"rank \d \([^)]*\) received {name} at step \d+", "\n".join(said[:3])), "\n".join(said)
    assert not any("Traceback" in line for line in said), "\n".join(said)
    assert shared_memory() == shared
    assert list(tmp_path.rglob("cad_summary.json"))
    with launched(["--training.steps=9", *CHECKPOINTS], tmp_path, nranks) as job:
        job.wait_for(r"Training starts at step [4-9]|Training starts at step \d\d", START_S)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
@pytest.mark.parametrize("nranks", [2, 4])
def test_full_disk_is_named_and_the_last_checkpoint_resumes(nranks: int, tmp_path: Path) -> None:
    disk = tmp_path / "checkpoint"
    disk.mkdir()
    options = [*CHECKPOINTS, "--training.steps=9"]
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=7m", "tmpfs", disk]).returncode:
        pytest.skip("may not mount")
    try:
        with launched(options, tmp_path, nranks) as job:
            returncode, _ = job.finish(START_S)
        last_step = max(i for i, line in enumerate(job.lines) if re.search(r" step: +6 ", line))
        said = job.lines[last_step + 1 :]
        report(f"full disk, {nranks} ranks", said, 0, returncode)
        assert returncode == 1
        (error,) = [line for line in job.lines if line.startswith("error: ")]
        assert re.match(rf"error: a checkpoint in {disk} could not be written .* rank \d, [0-3] MB are free", error)
        assert error in [line for line in said if not re.search(r"INFO - (cad:|Saving)", line)][:3]
        assert not any("Traceback" in line for line in said)
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        with launched(options, tmp_path, nranks) as job:
            job.wait_for(r"Training starts at step 4", START_S)
    finally:
        subprocess.run(["umount", disk], check=True)


def report(title: str, said: list[str], seconds: float, returncode: int) -> None:
    """Shown with `pytest -rP`."""
    print(f"{title}: exit code {returncode} after {seconds:.1f} s, {len(said)} lines")
    print("\n".join(f"    {line}" for line in said[:6]))
