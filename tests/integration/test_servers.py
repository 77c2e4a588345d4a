# SPDX-License-Identifier: BSD-3-Clause
"""Jobs that attention servers join, and some of which fail in the middle of a layer: they train as without servers."""

import functools
import os
import signal
import socket
import subprocess
import sys
from itertools import pairwise

import pytest

from tests.lib.jobs.compositions import (
    assert_close,
    cad_steps,
    options,
)
from tests.lib.jobs.harness import RunResult, run
from tests.lib.jobs.launched import launched, losses_in
from tests.lib.sets import matrix, params, slow
from torchtitan_cad.integration import servers
from torchtitan_cad.integration.config import Cad

SERVE = "from torchtitan_cad.tools.main import main; main()"
JOB = options(
    "cad collective row1 --debug.no-deterministic --training.seq_len=4096 --training.steps=12"
)


HEALTHY = ""
# What ranks say of the servers, and the options of these.
CASES = [
    ("strikes off", "--fault=kill --direction=backward", HEALTHY),
    ("it is late", "--fault=stop --direction=forward", HEALTHY),
    ("strikes off", "--fault=kill --direction=forward", HEALTHY),
    (
        "strikes off",
        "--fault=kill --direction=forward",
        "--fault=kill --direction=backward --at=5",
    ),
    ("it is late", "--fault=stop --direction=backward", HEALTHY),
    ("it is late", "--fault=slow --direction=forward", HEALTHY),
    ("a fault of the test", "--fault=raise --direction=backward", HEALTHY),
    ("other shapes", "--fault=shapes --direction=forward", HEALTHY),
    ("not finite", "--fault=nan --direction=backward", HEALTHY),
    ("sum is not that of", "--fault=garbage --direction=forward", HEALTHY),
    ("CAD uses server 0", "--fault=version --direction=forward", HEALTHY),
    ("CAD uses server 1", HEALTHY, HEALTHY),
]


@functools.cache
def without_servers(*args: str) -> RunResult:
    return run([*JOB, *args])


def served_shares(result: RunResult) -> list[float]:
    """The part of attention that plans give to servers, by step."""
    return [step.get("served_share", 0.0) for step in cad_steps(result)]


def check_same(result: RunResult, expected: RunResult) -> None:
    assert_close(result.losses, expected.losses, "loss")
    assert_close(result.grad_norms, expected.grad_norms, "gradient norm")
    assert max(served_shares(result)) > 0.02, result.report()


@pytest.mark.parametrize("case", params(CASES, CASES[:1]), ids=" ".join)
def test_a_job_trains_on_whatever_its_servers_do(case):
    said, *servers = case
    result = run([*JOB, "--cad.servers"], servers=list(map(str.split, servers)))
    check_same(result, without_servers())
    assert any(said in log for log in result.logs), result.report()
    *_, last = served_shares(result)
    assert (last > 0) == (HEALTHY in servers), result.report()


@matrix
@pytest.mark.parametrize(
    "words",
    ["halves", "ac_full", "compile", "batch4", "cp2", "pp2 cad1f1b rows2"],
)
def test_servers_compose(words):
    nranks = 4 if "pp2" in words else 2
    job = [*JOB, *options(words)]
    result = run([*job, "--cad.servers"], nranks, servers=[[]])
    check_same(result, run(job, nranks))


@matrix
@pytest.mark.timeout(400)
def test_a_server_finds_a_job_that_starts_again(tmp_path):
    """A rank is killed, torchrun starts all anew from the last checkpoint, and the server that stayed serves them."""
    port = free_port()
    rows = ["--training.seq_len=4096", "--training.local_batch_size=1"]
    steps = ["--training.steps=12", "--checkpoint.enable", "--checkpoint.interval=3"]
    served = [
        "--cad.servers",
        "--cad.servers_token=kept",
        f"--cad.servers_port={port}",
    ]
    command = ["serve", f"--join=localhost:{port}", "--token=kept", "--threads=1"]
    server = subprocess.Popen([sys.executable, "-c", SERVE, *command])
    try:
        with launched([*rows, *steps, *served], tmp_path / "with", restarts=1) as job:
            job.wait_for("step: +5 ", timeout_s=120)
            os.kill(job.rank_pids()[1], signal.SIGKILL)
            assert job.finish(timeout_s=120)[0] == 0, job.lines
    finally:
        server.terminate()
        server.wait(30)
    _, again = (i for i, line in enumerate(job.lines) if "CAD takes" in line)
    assert any("of attention by servers" in line for line in job.lines[again:])
    with launched([*rows, *steps], tmp_path / "without") as alone:
        assert alone.finish(timeout_s=120)[0] == 0, alone.lines
    expected = dict(losses_in("\n".join(alone.lines)))
    trained = losses_in("\n".join(job.lines))
    assert len(trained) > len(expected) == 12
    for step, loss in trained:
        assert loss == pytest.approx(expected[step], rel=1e-5)


def test_a_port_that_is_taken_is_one_line(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"^cad.servers_port = {port} of .* set "):
            servers._open_store(Cad(servers_port=port), hosts=True)


def free_port() -> int:
    with socket.create_server(("", 0)) as free:
        return free.getsockname()[1]


@slow
@pytest.mark.timeout(1200)
def test_servers_that_come_and_go_for_a_thousand_steps_leak_nothing():
    """Memory and descriptors of the ranks at the end are those after 200 steps; servers take part now and then."""
    job = [*JOB, "--training.seq_len=2048", "--training.steps=1000", "--cad.servers"]
    result = run(job, servers=[["--restless"]] * 2, timeout_s=1100)
    serves = [share > 0 for share in served_shares(result)]
    assert sum(latter != former for latter, former in pairwise(serves)) >= 10
    for figures in result.figures:
        early, late = (x for x in figures if x["step"] in (200, 1000))
        assert late["descriptors"] <= early["descriptors"] + 20
        assert late["resident_bytes"] <= early["resident_bytes"] + 2**26
