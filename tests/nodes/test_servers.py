# SPDX-License-Identifier: BSD-3-Clause
"""An attention server on a node of its own, whose link is cut while it computes, and mended again."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lib.jobs.harness import child_environment, job_files, run
from tests.lib.jobs.launched import CONFIG, SMALL, losses_in
from tests.lib.network import Nodes, missing

pytestmark = [
    pytest.mark.skipif(
        missing() is not None, reason=f"no nodes on this machine: {missing()}"
    ),
    pytest.mark.matrix,
    pytest.mark.timeout(400),
]

JOB = [
    *SMALL,
    "--training.seq_len=4096",
    "--training.local_batch_size=1",
    "--training.steps=30",
]
TIMEOUT_S = 300


def wait_for(log: Path, pattern: str) -> None:
    """Until a log has a match."""
    deadline = time.monotonic() + TIMEOUT_S / 3
    while not re.search(pattern, log.read_text()):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def test_a_cut_link_costs_a_wait_and_a_mended_one_is_used_again(tmp_path):
    """Losses are those of the job without servers."""
    job_log = tmp_path / "job.log"
    pipes = {"stderr": subprocess.STDOUT, "env": child_environment()}
    with Nodes(2) as network, job_log.open("w") as job_output:
        files = job_files(CONFIG, tmp_path / "dump")
        train = ["-m", "torchtitan_cad.train", *files, *JOB, "--cad.servers"]
        job = network.torchrun(0, 2, train, nnodes=1, stdout=job_output, **pipes)
        serve = f"-m tests.lib.jobs.attention_server --host={network.address(0)}"
        command = [sys.executable, *serve.split(), f"--log={job_log}"]
        server = network.start(1, command, **pipes)
        wait_for(job_log, "of attention by servers")
        network.cut(1)
        wait_for(job_log, "strikes off server 0")
        network.mend(1)
        wait_for(job_log, "CAD uses server [1-9]")
        assert job.wait(TIMEOUT_S) == 0, job_log.read_text()
        server.terminate()
        assert server.wait(30) is not None
    text = re.sub(r"\x1b\[[0-9;]*m", "", job_log.read_text())
    losses = dict(losses_in(text))
    expected = run(JOB, config=CONFIG, init_seed=None, timeout_s=TIMEOUT_S).losses
    assert list(losses.values()) == pytest.approx(expected, rel=2e-5)
