# SPDX-License-Identifier: BSD-3-Clause
"""Jobs that attention servers join, and some of which fail in the middle of a layer: they train as without servers."""

import functools
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.lib.jobs import compositions as c
from tests.lib.jobs.harness import RunResult, run
from tests.lib.sets import params

STEPS = 12
JOB = (
    *c.CAD,
    "--debug.no-deterministic",
    "--cad.tolerance=0.02",
    "--cad.transport=collective",
    "--training.seq_len=4096",
    "--training.local_batch_size=1",
    f"--training.steps={STEPS}",
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
    Case("healthy", (HEALTHY, HEALTHY), "CAD uses server 1"),
]
SHORT = CASES[:2]


@functools.cache
def without_servers(*more: str) -> RunResult:
    return run([*JOB, *more])


def steps_of(result: RunResult) -> Sequence[dict[str, Any]]:
    (path,) = result.dump_folder.rglob("cad_steps.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_same(result: RunResult, reference: RunResult) -> None:
    c.assert_close(result.losses, reference.losses, "loss")
    c.assert_close(result.grad_norms, reference.grad_norms, "gradient norm")


@pytest.mark.parametrize("case", params(CASES, SHORT), ids=lambda case: case.name)
def test_a_job_trains_on_whatever_its_servers_do(case: Case) -> None:
    result = run([*JOB, "--cad.servers"], servers=case.servers)
    check_same(result, without_servers())
    said = "\n".join(result.logs)
    assert case.said in said, result.report()
    shares = [step.get("served_share", 0.0) for step in steps_of(result)]
    assert max(shares) > 0.1, result.report()
    assert (shares[-1] > 0) == case.serves_to_the_end, (shares, result.report())


@pytest.mark.parametrize(
    "case",
    params(
        [
            c.Composition("halves", args=("--cad.nano_batches=2",)),
            c.Composition("checkpointing", args=("--activation_checkpoint.mode=full",)),
            c.Composition("compile", args=c.COMPILE),
            c.Composition("accumulation", args=c.global_batch(4)),
            c.Composition("cp2", args=c.CP2),
            c.pp2("pp2_cad1f1b", *c.schedule("CAD1F1B")),
        ],
        [],
    ),
    ids=lambda case: case.name,
)
def test_servers_compose(case: c.Composition) -> None:
    job = [*JOB, *case.args, *case.shared]
    if case.name.startswith("pp2"):
        job.append("--training.local_batch_size=2")
    result = run([*job, "--cad.servers"], servers=[HEALTHY])
    check_same(result, run(job))
    assert max(step.get("served_share", 0.0) for step in steps_of(result)) > 0.1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_servers_that_come_and_go_for_a_thousand_steps_leak_nothing() -> None:
    """Memory and descriptors of the ranks at the end are those after 200 steps; servers take part now and then."""
    job = [*JOB, "--training.seq_len=2048", "--training.steps=1000", "--cad.servers"]
    restless = [("--restless",), ("--restless",)]
    result = run(job, servers=restless, timeout_s=1100)
    shares = [step.get("served_share", 0.0) for step in steps_of(result)]
    changes = sum(bool(a) != bool(b) for a, b in itertools.pairwise(shares))
    assert changes >= 10
    for descriptors, memory in zip(
        result.descriptors, result.resident_bytes, strict=True
    ):
        assert descriptors[1000] <= descriptors[200] + 20
        assert memory[1000] <= memory[200] + (64 << 20)
    reference = run([*job[:-1]], timeout_s=1100)
    assert result.losses[:50] == pytest.approx(reference.losses[:50], rel=1e-5)


def test_a_deterministic_job_takes_no_servers() -> None:
    result = run([*c.CAD, "--cad.servers"], may_fail=True)
    result.assert_refused("cad.servers", True, remedy="one of them to false")
