# SPDX-License-Identifier: BSD-3-Clause
"""Jobs whose data is loaded by worker processes: however they end, it is soon, with its cause, and nothing is left."""

import os
import re
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.lib.jobs.launched import Launched, launched, shared_memory
from tests.lib.sets import matrix

pytestmark = pytest.mark.timeout(300)

JOB = [
    "--experimental.custom_import=tests.lib.jobs.worker_jobs",
    "--training.dataloader.num_workers=2",
    "--training.dataloader.persistent_workers",
    "--cad.heartbeat_seconds=0.5",
]
START_S = 120
END_S = 45
DOCUMENT = (
    "of 200,000 tokens: a worker sends what is left of it with every batch, more than its pipe holds. "
    * 2000
)


def kill_worker(job: Launched) -> None:
    os.kill(job.children_of(job.rank_pids()[1])[-1], signal.SIGKILL)


def signal_rank(job: Launched, number: int) -> None:
    os.kill(job.rank_pids()[1], number)


ENDS: dict[str, tuple[Callable[[Launched], None], int, str]] = {
    "worker killed": (
        kill_worker,
        1,
        r"rank 1 .* stopped by itself .*DataLoader worker .*(killed|exited|reset)",
    ),
    "rank killed": (
        lambda job: signal_rank(job, signal.SIGKILL),
        137,
        r"rank 1 .* is gone",
    ),
    "rank ended": (
        lambda job: signal_rank(job, signal.SIGTERM),
        143,
        r"rank 1 .* received SIGTERM",
    ),
    "launcher ended": (lambda job: job.process.terminate(), 143, r"received SIGTERM"),
    "Ctrl-C": (
        lambda job: os.killpg(job.process.pid, signal.SIGINT),
        130,
        r"received SIGINT",
    ),
}
"""Ways to end a job, with its exit code and what is printed."""


@pytest.fixture(params=["fork", "spawn"])
def method(request, monkeypatch) -> Iterator[str]:
    """How workers start; afterwards no shared memory is left."""
    monkeypatch.setenv("WORKER_START_METHOD", request.param)
    shared = shared_memory()
    yield request.param
    assert shared_memory() == shared


@matrix
@pytest.mark.usefixtures("method")
def test_job_ends_after_its_last_step(tmp_path):
    with launched([*JOB, "--training.steps=2"], tmp_path) as job:
        job.wait_for("Training completed", START_S)
        assert job.finish(END_S)[0] == 0
    assert sum("Process group destroyed" in line for line in job.lines) == 2


@matrix
@pytest.mark.parametrize("end", ENDS)
def test_job_ends_when_something_is_killed(method, end, tmp_path):
    """While workers wait for somebody to take what they have loaded."""
    if (method, end) == ("spawn", "rank killed"):
        pytest.skip("torch's spawned workers wait for ever to send what they loaded")
    documents = tmp_path / "documents"
    documents.mkdir()
    for number in range(8):
        (documents / f"{number}.txt").write_text(f"{number} {DOCUMENT}")
    endless = ["--training.steps=100000", f"--training.dataset_path={documents}"]
    do, returncode, cause = ENDS[end]
    with launched([*JOB, *endless], tmp_path) as job:
        job.wait_for(r"step: +4 ", START_S)
        for pid in job.rank_pids().values():
            assert len(job.children_of(pid)) >= 2
        before = len(job.lines)
        do(job)
        returned, _ = job.finish(END_S)
    said = "\n".join(job.lines[before:])
    assert returned == returncode, said
    assert re.search(cause, said), said
