# SPDX-License-Identifier: BSD-3-Clause
"""Jobs that attention servers join, and some of which fail in the middle of a layer: they train as without servers."""

import functools
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise

import pytest

from tests.lib.jobs.compositions import (
    CAD,
    COMPILE,
    CP2,
    FULL,
    HALVES,
    PP2,
    assert_close,
    cad_steps,
    global_batch,
    name_of,
    schedule,
)
from tests.lib.jobs.harness import RunResult, run
from tests.lib.jobs.launched import launched
from tests.lib.sets import matrix, params, slow
from torchtitan_cad.integration import servers
from torchtitan_cad.integration.config import Cad

SERVE = "from torchtitan_cad.tools.main import main; main()"
JOB = (
    *CAD,
    "--debug.no-deterministic",
    "--cad.transport=collective",
    "--training.seq_len=4096",
    "--training.local_batch_size=1",
    "--training.steps=12",
)


@dataclass(frozen=True)
class Case:
    """Options of the servers, what the ranks say of them, and whether one serves to the end."""

    name: str
    servers: tuple[tuple[str, ...], ...]
    said: str
    serves_to_the_end: bool = True


HEALTHY: tuple[str, ...] = ()


def fails(fault: str, direction: str) -> tuple[str, ...]:
    return f"--fault={fault}", f"--direction={direction}"


CASES = [
    Case("kill_backward", (fails("kill", "backward"), HEALTHY), "strikes off"),
    Case("stop_forward", (fails("stop", "forward"), HEALTHY), "it is late"),
    Case("kill_forward", (fails("kill", "forward"), HEALTHY), "strikes off"),
    Case(
        "kill_both",
        (fails("kill", "forward"), (*fails("kill", "backward"), "--at=5")),
        "strikes off",
        serves_to_the_end=False,
    ),
    Case("stop_backward", (fails("stop", "backward"), HEALTHY), "it is late"),
    Case("slow", (fails("slow", "forward"), HEALTHY), "it is late"),
    Case("raise", (fails("raise", "backward"), HEALTHY), "a fault of the test"),
    Case("shapes", (fails("shapes", "forward"), HEALTHY), "other shapes"),
    Case("nan", (fails("nan", "backward"), HEALTHY), "not finite"),
    Case("garbage", (fails("garbage", "forward"), HEALTHY), "sum is not that of"),
    Case("version", (fails("version", "forward"), HEALTHY), "CAD uses server 0"),
    Case("healthy", (HEALTHY, HEALTHY), "CAD uses server 1"),
]
SHORT = CASES[:1]


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


@pytest.mark.parametrize("case", params(CASES, SHORT), ids=name_of)
def test_a_job_trains_on_whatever_its_servers_do(case):
    result = run([*JOB, "--cad.servers"], servers=case.servers)
    check_same(result, without_servers())
    assert any(case.said in log for log in result.logs), result.report()
    *_, last = served_shares(result)
    assert (last > 0) == case.serves_to_the_end, result.report()


@matrix
@pytest.mark.parametrize(
    "args",
    [
        HALVES,
        FULL,
        COMPILE,
        global_batch(4),
        CP2,
        (*PP2, *schedule("CAD1F1B"), "--training.local_batch_size=2"),
    ],
    ids=["halves", "checkpointing", "compile", "accumulation", "cp2", "pp2_cad1f1b"],
)
def test_servers_compose(args):
    nranks = 4 if args[0] in PP2 else 2
    result = run([*JOB, *args, "--cad.servers"], nranks, servers=[HEALTHY])
    check_same(result, run([*JOB, *args], nranks))


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
    expected = dict(alone.losses())
    trained = job.losses()
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
    job = [*JOB, "--training.seq_len=2048", "--training.steps=1000"]
    restless = ("--restless",)
    result = run([*job, "--cad.servers"], servers=[restless] * 2, timeout_s=1100)
    serves = [share > 0 for share in served_shares(result)]
    assert sum(latter != former for latter, former in pairwise(serves)) >= 10
    for descriptors in result.descriptors:
        assert descriptors[1000] <= descriptors[200] + 20
    for memory in result.resident_bytes:
        assert memory[1000] <= memory[200] + 2**26
    expected = run(job, timeout_s=1100)
    assert result.losses[:50] == pytest.approx(expected.losses[:50], rel=1e-5)
