# SPDX-License-Identifier: BSD-3-Clause
"""The order of streams in segments' compiled graphs, on devices that report what no event orders.

Two ranks run the real engine, plans and graphs, forward and backward (tests/lib/ledger/segment_graphs.py). Races
are also looked for with mistakes planted, which must be found.
"""

from collections.abc import Sequence

import pytest

from tests.lib.cpp import build
from tests.lib.jobs.compositions import needs_traced
from tests.lib.ledger import SOURCE, needs_ledger
from tests.lib.ledger.segment_graphs import Job, Outcome, run_job
from tests.lib.processes import run_processes, values

pytestmark = [needs_ledger, needs_traced, pytest.mark.timeout(1200)]
matrix = pytest.mark.matrix


def outcomes(job: Job) -> list[list[Outcome]]:
    """Both ranks' outcomes."""
    build(SOURCE)  # here, where a compiler's message is seen
    return values(run_processes(2, run_job, job, timeout_s=1000))


def check(runs: list[Outcome]) -> None:
    for run in runs:
        assert not run.races
    assert len({run.graphs for run in runs}) == 1, "recompiled for another plan"


@pytest.mark.parametrize("runs", [3, pytest.param(21, marks=matrix)])
def test_no_order_that_graphs_allow_has_races(runs):
    """The graphs' own order, and others; each with another pair of plans, by the same graphs.

    The main stream waits for the first and the last exchange alone, and events do not pile up.
    """
    for of_rank in outcomes(Job(runs=runs)):
        check(of_rank)
        first, second, third, *_ = of_rank
        assert first.graphs <= 4
        assert second.objects == third.objects
        assert [share for share, _ in main_stream_idles(first.forward)] == [0]
        assert [share for share, _ in main_stream_idles(first.backward)] == [1]


@matrix
@pytest.mark.parametrize("compiler", ["nodes", "inductor"])
@pytest.mark.parametrize(
    "composed",
    [
        {"in_rows": True},
        {"keep": True},
        {"microbatches": 2},
        {"recompute": True},
        {"validate": True},
        {"without": ("one chunk",)},
    ],
    ids=str,
)
def test_what_graphs_are_composed_with_is_in_order(composed, compiler):
    runs = 2 if compiler == "inductor" else 4
    for of_rank in outcomes(Job(compiler, runs, **composed)):
        check(of_rank)
        first = of_rank[0]
        forward = first.forward.count("mm on 0")
        backward = first.backward.count("mm on 0")
        assert (backward > 2 * forward) == ("recompute" in composed)


# Mistakes, which must be found ----------------------------------------------------------------------------------------


@matrix
@pytest.mark.parametrize(
    "mistake",
    ["a wait", "a record in time", "buffers of their own", "inputs kept alive"],
)
def test_mistakes_are_found(mistake):
    """The calls' marks are off, which order what events in the graph do not."""
    for (run,) in outcomes(Job(without=("marks", mistake))):
        assert run.races


DURATIONS = {"attention kernel": 4, "mm": 1, "all_to_all": 2}
"""any unit: of operators; all others take none"""


def main_stream_idles(history: Sequence[str]) -> list[tuple[float, float]]:
    """The waits of stream 0 that take time: how much of its attention has run before, from 0 to 1, and how long.

    Args:
        history: what ``torch.ops.ledger.history`` returns.
    """
    kernels = history.count("attention kernel on 0")
    clock_of: dict[str, float] = {}
    events: dict[str, float] = {}
    idles = []
    done = 0
    for line in history:
        what, stream = line.rsplit(" on ", 1)
        clock = clock_of.get(stream, 0.0)
        if what.startswith("record e"):
            events[what.removeprefix("record ")] = clock
        elif what.startswith("wait "):
            until = max(clock, events.get(what.removeprefix("wait "), 0.0))
            if stream == "0" and until > clock:
                idles.append((done / kernels, until - clock))
            clock_of[stream] = until
        else:
            clock_of[stream] = clock + DURATIONS.get(what, 0)
            done += line == "attention kernel on 0"
    return idles
