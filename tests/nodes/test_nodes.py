# SPDX-License-Identifier: BSD-3-Clause
"""Jobs on several nodes: they train as on one machine, and faults between nodes are named within seconds."""

import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.lib.jobs.compositions import options
from tests.lib.jobs.harness import run
from tests.lib.jobs.launched import CONFIG, SMALL
from tests.lib.jobs.on_nodes import NodesJob
from tests.lib.network import Nodes, missing
from tests.lib.sets import matrix

pytestmark = pytest.mark.skipif(
    missing() is not None, reason=f"no nodes on this machine: {missing()}"
)

NEAR_AND_FAR = "--cad.transport=symm_mem"
COMPOSITIONS = (
    "2 1 / ",
    "2 1 / --cad.tolerance=auto",
    "2 1 / --cad.placement=balanced --cad.ranks_per_node=1",
    "2 1 / cp2",
    "2 1 / stages2 1f1b",
    "2 1 / stages2 cad1f1b",
    "2 2 / tp2",
    "2 2 / --cad.ranks_per_node=2 halves --cad.placement=auto",
    "4 1 / --cad.placement=balanced",
    "2 2 / symm_mem --cad.placement=auto",
    "2 2 / symm_mem halves --cad.backward=keep",
    "2 2 / symm_mem --cad.receive_buffer_gb=2e-4 --cad.ranks_per_node=2",
    "2 2 / symm_mem cp4",
    "2 2 / symm_mem stages2 1f1b",
    "2 2 / symm_mem stages2 cad1f1b",
    "4 1 / symm_mem",
)
"""Nodes, ranks on each, and options."""
TIMEOUT_S = 250


def on_one_machine(ranks: int, args: Sequence[str]) -> list[float]:
    """Return the losses of such a job without nodes."""
    return run([*SMALL, *args], ranks, TIMEOUT_S, config=CONFIG, init_seed=None).losses


def train(nodes: int, ranks: int, args: Sequence[str], folder: Path) -> list[float]:
    """Return the losses of a job on nodes with links of 1 Gbit/s."""
    with Nodes(nodes) as network:
        network.limit(1e9)
        job = NodesJob(network, ranks, args, folder)
        assert job.finish(TIMEOUT_S) == [0] * nodes, job.text
    # a stage lies inside a host
    is_far = "--parallelism.pipeline_parallel_schedule=1F1B" not in args
    # of a CAD group: with tensor parallelism in nodes it has one rank a host
    shares_hosts = ranks > 1 and "--parallelism.tensor_parallel_degree=2" not in args
    knows_hosts = shares_hosts or "--cad.ranks_per_node=1" in args
    assert ("MB between hosts" in job.text) == (is_far and knows_hosts)
    said = f"CAD exchanges rows by symm_mem inside {nodes} hosts, gloo between them"
    assert (said in job.text) == (is_far and NEAR_AND_FAR in args)
    return job.losses


@matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", COMPOSITIONS)
def test_nodes_train_like_one_machine(case, tmp_path):
    numbers, words = case.split(" / ")
    nodes, ranks = map(int, numbers.split())
    args = ["--training.steps=3", *options(words)]
    expected = on_one_machine(nodes * ranks, args)
    assert len(expected) == 3
    found = train(nodes, ranks, args, tmp_path)
    assert found == pytest.approx(expected, rel=1e-5)


@matrix
@pytest.mark.timeout(900)
def test_a_checkpoint_of_two_nodes_resumes_on_four(tmp_path):
    """The data-parallel degree stays, so that every loader finds its state."""
    save = ["--checkpoint.enable", "--checkpoint.interval=2"]
    save.append("--checkpoint.no-last-save-model-only")
    expected = on_one_machine(4, ["--training.steps=4"])
    train(2, 2, ["--training.steps=2", *save], tmp_path)
    resumed = train(4, 1, ["--training.steps=4", *save], tmp_path)
    assert resumed == pytest.approx(expected[2:], rel=1e-5)


STEP_TIMEOUT_S = 20
LINE_S = 10.0
"""Seconds until a line must have come on a node that the key-value store answers."""
OTHER = [r"rank 1 \(node1, pid \d+\)", r"rank 0 \(node0, pid \d+\)"]
"""Per node, the rank of the other one."""
STORE = "key-value store (answers|does not answer)"
NO_RENDEZVOUS = r"launch: .*the rendezvous at 10\.77\.0\.1:\d+ does not answer"
ENDLESS = ["--training.steps=100000", f"--comm.train_timeout_seconds={STEP_TIMEOUT_S}"]


FAULTS = ("cut 1", "SIGSTOP 1", "SIGSTOP 0", "SIGKILL 1", "SIGKILL 0")
"""What happens to which node. The store is on node 0."""


@matrix
@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", ["--cad.transport=collective", NEAR_AND_FAR])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_node_names_the_other_in_time_and_ends(fault, transport, tmp_path):
    """The last checkpoint resumes afterwards."""
    name, number = fault.split()
    struck = int(number)
    speakers = (0, 1) if name == "cut" else (1 - struck,)
    saving = ["--checkpoint.enable", "--checkpoint.interval=3"]
    with Nodes(2) as nodes:
        nodes.limit(1e9)
        job = NodesJob(nodes, 1, [*ENDLESS, *saving, transport], tmp_path)
        job.wait_for(0, r"step: +5 ", 150)
        begin = time.monotonic()
        if name == "cut":
            nodes.cut(struck)
        else:
            nodes.signal(struck, getattr(signal, name))
        if 0 in speakers:
            job.wait_for(0, f"(?=.*{OTHER[0]})(?=.*({STORE}))", LINE_S, begin)
        for node in speakers:
            assert job.processes[node].wait(STEP_TIMEOUT_S + 130) != 0
            job.wait_for(
                node,
                f"error: rank {node} stopped at step .*{OTHER[node]}|{NO_RENDEZVOUS}",
                5,
                begin,
            )
        assert "Traceback" not in job.text
    with Nodes(2) as nodes:
        again = NodesJob(nodes, 1, ["--training.steps=7", *saving], tmp_path)
        assert again.finish(200) == [0, 0], again.text
        assert 1 <= len(again.losses) < 7


@matrix
@pytest.mark.timeout(400)
def test_a_link_that_comes_back_costs_no_job(tmp_path):
    with Nodes(2) as nodes:
        nodes.limit(1e9)
        job = NodesJob(nodes, 1, ENDLESS, tmp_path)
        job.wait_for(0, r"step: +5 ", 150)
        nodes.cut(1)
        time.sleep(3)
        nodes.mend(1)
        job.wait_for(0, r"step: +12 ", 60)
        assert [process.poll() for process in job.processes] == [None, None], job.text
