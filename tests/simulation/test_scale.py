# SPDX-License-Identifier: BSD-3-Clause
"""What thousands of GPUs need: nothing is computed twice or in vain, and the figures stay what they were."""

import dataclasses
import time
from typing import Any

import numpy as np
import pytest

from tests.lib.sets import params
from tests.lib.simulation_cases import KINDS, inputs, step
from torchtitan_cad.planning.placement.fill import fill
from torchtitan_cad.tools.main import main
from torchtitan_cad.tools.simulation.baselines import _slowest
from torchtitan_cad.tools.simulation.costs import Costs, Transfer
from torchtitan_cad.tools.simulation.inputs import Configuration
from torchtitan_cad.tools.simulation.search import FINALISTS, Search
from torchtitan_cad.tools.simulation.step import Step
from torchtitan_cad.tools.simulation.streams import Streams


def slowest_of_row(
    costs: Costs, lengths: np.ndarray, cp: int, window: int | None
) -> list[float]:
    """Return seconds of the slowest of a row's ranks, forward and backward: chunk by chunk and document by document."""
    ends, found = np.cumsum(lengths), []
    size = int(ends[-1]) // (2 * cp)
    for forward in (True, False):
        ranks = np.zeros(cp)
        for chunk in range(2 * cp):
            for first, end in zip(ends - lengths, ends, strict=True):
                a, b = max(first, chunk * size), min(end, (chunk + 1) * size)
                if a < b:
                    before, until = costs.document_seconds(
                        np.array([a - first, b - first]), forward, window
                    )
                    ranks[min(chunk, 2 * cp - 1 - chunk)] += until - before
        found.append(ranks.max())
    return found


@pytest.mark.parametrize("cp", [1, 2, 8])
def test_all_rows_at_once_take_what_each_takes(cp: int) -> None:
    divided = step(cp=cp, model=KINDS)
    for kind in divided.costs.kinds:
        rows = [
            slowest_of_row(divided.costs, kind.cut(row), cp, kind.shape.window)
            for row in divided.batch.rows
        ]
        found = _slowest(divided.costs, divided.batch, kind, cp)
        assert found.T.tolist() == [pytest.approx(row) for row in rows]


@pytest.mark.parametrize("system", ["packed", "reorder", "packing_cp"])
@pytest.mark.parametrize(
    "machines",
    params(
        [{}, {"fsdp": True}, {"net": 1e9}, {"memory": 1.6e9}, {"memory": 1e6}],
        [{"memory": 1.6e9}],
    ),
    ids=str,
)
def test_what_is_not_tried_would_not_be_chosen(
    system: str, machines: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    search = Search(inputs(batches=2, **machines))
    candidates = search.candidates(system)
    tried = list[Configuration]()
    every = [search.run(system, each) for each in candidates]
    known = sorted(
        (trial for trial in every if trial.fits), key=lambda trial: trial.seconds
    )[:FINALISTS]
    run = search.run

    def counted(
        name: str, configuration: Configuration, batches: int | None = None
    ) -> Any:
        tried.append(configuration)
        return run(name, configuration, batches)

    monkeypatch.setattr(search, "run", counted)
    fastest = search.fastest(system, candidates)
    assert fastest == (known[0] if known else search.none(every))
    assert bool(known) == (len(set(tried)) < len(candidates))


def test_waits_are_those_for_the_slowest_sender() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        sends = rng.random((6, 6)) < 0.3
        np.fill_diagonal(sends, False)
        seconds, network, ready = rng.random((3, 6))
        streams = Streams(6)
        streams.network = network
        start = np.maximum(network, ready)
        expected = ready.copy()
        for rank in range(6):
            if sends[rank].any() or sends[:, rank].any():
                senders = np.flatnonzero(sends[:, rank])
                waits = [
                    max(start[s] + seconds[rank], start[s] + seconds[s])
                    for s in senders
                ]
                expected[rank] = max([start[rank] + seconds[rank], *waits])
        assert (
            streams.send(ready, Transfer(seconds, sends, 0.0)).tolist()
            == expected.tolist()
        )


def test_work_of_one_size_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kinds of checkpointing, and all numbers of microbatches, share the attention of documents and rows."""
    calls = list[bool]()
    count = Costs.document_seconds

    def counted(
        self: Costs, lengths: np.ndarray, forward: bool, window: int | None = None
    ) -> Any:
        calls.append(forward)
        return count(self, lengths, forward, window)

    monkeypatch.setattr(Costs, "document_seconds", counted)
    base = step()
    for kind in ("none", "linear", "full"):
        for microbatches in (1, 2, 4):
            changed = dataclasses.replace(
                base.configuration, checkpointing=kind, microbatches=microbatches
            )
            now = Step(base.costs, base.batch, changed)
            _ = (
                now.layer_attention,
                _slowest(base.costs, base.batch, base.costs.kinds[0], 1),
            )
    assert len(calls) == 4


def test_documents_longer_than_a_rank_are_dealt_in_time_that_grows_with_them() -> None:
    """Each is dealt to a few of all ranks, of which none is sorted anew."""
    ranks, room, length = 4096, 1000, 2000
    begin = time.process_time()
    (layout,) = fill(
        np.arange(ranks // 2),
        np.full(ranks // 2, length),
        [np.full(ranks, room)],
        together=1,
    )
    assert time.process_time() - begin < 2
    assert layout.tokens_per_rank.tolist() == [room] * ranks


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1024, pytest.param(4096, marks=pytest.mark.slow)])
def test_thousands_of_gpus(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.process_time()
    assert main(["simulate", "--model=llama-8b", f"--ranks={ranks}"]) == 0
    assert time.process_time() - begin < ranks / 10
    printed = capsys.readouterr().out
    assert "batches: 2 (default)" in printed
    assert "cad's with a standard error of" in printed
