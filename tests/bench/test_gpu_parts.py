# SPDX-License-Identifier: BSD-3-Clause
"""Parts of `python -m bench.gpu` by themselves: what they find, and how the driver is asked for partitions."""

import sys
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu import ordering, partition, sending
from bench.gpu.parts import PARTS, Part, Skip
from bench.gpu.process import Outcome, run_part
from tests.lib.refusals import refusal
from torchtitan_cad.planning import make_plan


def dry_run(name: str) -> Outcome:
    (part,) = (part for part in PARTS if part.name == name)
    return run_part(part, "cpu", 300, None)


@pytest.mark.matrix
def test_ranks_on_partitions():
    outcome = dry_run("partition")
    assert outcome.status == "done", outcome.output
    figures = outcome.figures
    assert [(row["partitions"], row["work"]) for row in figures["layers"]] == [
        (count, work) for count in (2, 4) for work in ("attention", "attention and MLP")
    ]
    ratios = [row["home_ms"] / row["planned_ms"] for row in figures["layers"]]
    assert [row["speed_up"] for row in figures["layers"]] == ratios


@pytest.mark.matrix
def test_an_exchange_beside_other_work():
    outcome = dry_run("sending")
    assert outcome.status == "done", outcome.output
    rows = outcome.figures["chains"]
    assert len(rows) == len(sending.VARIANTS) * 3


@pytest.mark.matrix
def test_rows_are_there_with_their_word():
    """And if the word is posted first, that is found."""
    outcome = dry_run("ordering")
    assert outcome.status == "done", outcome.output
    batches = [
        (ordering.CPU.batch * rows, 8 * words)
        for rows, words in ordering.CPU.row_shapes
    ]
    assert outcome.figures["rows"] == sum(rows for rows, _ in batches)
    assert outcome.figures["bytes_checked"] == sum(
        rows * row_bytes for rows, row_bytes in batches
    )
    assert outcome.figures["mismatches"] == 0

    fault = Part(
        "fault", "a planted fault", "tests.bench.fake_parts:posts_too_early", 300
    )
    outcome = run_part(fault, "cpu", 300, None)
    assert outcome.status == "failed"
    assert outcome.figures["mismatches"] == ordering.CPU.batch * len(
        ordering.CPU.row_shapes
    )
    first = outcome.figures["first_mismatches"][0]
    assert (first["round"], first["row"], first["mended"]) == (1, 0, False)


# Partitions -----------------------------------------------------------------------------------------------------------


class Code(IntEnum):
    OK = 0
    CUDA_ERROR_NOT_SUPPORTED = 801


class FakeDriver(ModuleType):
    """cuda.bindings.driver of a GPU of 132 SMs, which splits them into groups of at most ``most`` SMs.

    Attributes:
        asked: numbers of SMs that were asked for.
    """

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(self, most: int, contexts: Code = Code.OK) -> None:
        super().__init__("cuda.bindings.driver")
        self.most, self.contexts = most, contexts
        self.asked: list[int] = []
        self.priorities: list[tuple[str, int]] = []

    def cuDeviceGet(self, ordinal: int) -> tuple:
        return Code.OK, f"gpu {ordinal}"

    def cuDeviceGetDevResource(self, gpu: str, kind: int) -> tuple:
        return Code.OK, SimpleNamespace(
            sm=SimpleNamespace(smCount=132, smCoscheduledAlignment=8)
        )

    def cuDevSmResourceSplitByCount(
        self, count: int, whole: Any, flags: int, sms: int
    ) -> tuple:
        self.asked.append(sms)
        group = SimpleNamespace(sm=SimpleNamespace(smCount=sms))
        return Code.OK, [group] * count, count if sms <= self.most else count - 1, None

    def cuDevResourceGenerateDesc(self, groups: list[Any], count: int) -> tuple:
        return Code.OK, f"{groups[0].sm.smCount} SMs"

    def cuGreenCtxCreate(self, description: str, gpu: str, flags: int) -> tuple:
        return self.contexts, f"context of {description} on {gpu}"

    def cuGreenCtxStreamCreate(self, context: str, flags: int, priority: int) -> tuple:
        self.priorities.append((context, priority))
        return Code.OK, len(self.priorities)


@pytest.fixture
def use_driver(monkeypatch: pytest.MonkeyPatch):
    def use(driver: FakeDriver) -> FakeDriver:
        bindings = ModuleType("cuda.bindings")
        bindings.driver = driver
        monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        monkeypatch.setattr(
            torch.cuda, "ExternalStream", lambda pointer, device: (pointer, device)
        )
        return driver

    return use


def test_the_largest_equal_partitions_are_taken(use_driver):
    driver = use_driver(FakeDriver(most=56))
    partitions = partition.split_gpu(2)
    assert driver.asked == [64, 56]
    assert [part.sms for part in partitions] == [56, 56]
    assert [part.streams for part in partitions] == [((1, 0), (2, 0)), ((3, 0), (4, 0))]
    context = "context of 56 SMs on gpu 0"
    assert driver.priorities == [(context, 0), (context, -1)] * 2


def test_without_green_contexts_the_part_is_skipped(use_driver, monkeypatch):
    use_driver(FakeDriver(most=0))
    with refusal(error=Skip):
        partition.split_gpu(4)
    use_driver(FakeDriver(most=64, contexts=Code.CUDA_ERROR_NOT_SUPPORTED))
    with refusal(error=Skip):
        partition.split_gpu(2)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with refusal(error=Skip):
        partition.split_gpu(2)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_plans_of_uneven_documents(num_ranks):
    """Rank 0 is late at home, and a plan that moves rows evens it out, in one chunk of the default buffers."""
    from torchtitan_cad.planning.exchange.messages import buffer_bytes
    from torchtitan_cad.planning.model.shape import RowBytes

    layout = partition.uneven_layout(num_ranks, partition.CUDA.tokens)
    assert layout.tokens_per_rank.tolist() == [partition.CUDA.tokens] * num_ranks
    plan = make_plan(layout, partition.CUDA.shape, partition.CUDA.config)
    assert plan.moves_rows
    assert plan.stats.max_over_mean_before / plan.stats.max_over_mean > 1.5
    for rank in range(num_ranks):
        chunks = plan.exchange(rank).most.chunks(
            RowBytes.of(plan.shape, keep=False), buffer_bytes()
        )
        assert {
            len(of_kind)
            for of_kind in (chunks.queries_out, chunks.keys_out, chunks.queries_home)
        } == {1}


# An exchange ----------------------------------------------------------------------------------------------------------


class FakeBench:
    """Runs of 10 ms of other work, which an arrival after 4 ms prolongs by 1 ms and which prolongs that to 6 ms."""

    def median(self, work: Any, chain: Any) -> sending.Times:
        return sending.Times(11.0, 6.0) if work else sending.Times(0.0, 4.0)


def test_what_is_hidden_of_an_exchange():
    chain, works = (
        SimpleNamespace(num_bytes=12_000_000),
        {"nothing": None, "gemm": "some"},
    )
    quiet, beside = sending._beside(
        FakeBench(), chain, works, {"nothing": 0.0, "gemm": 10.0}, sending.VARIANTS[0]
    )
    assert (quiet["arrival_ms"], quiet["gigabytes_per_second"]) == (4.0, 3.0)
    assert "hidden" not in quiet
    assert (
        beside["arrival_ms"],
        beside["arrival_slowdown"],
        beside["work_slowdown"],
    ) == (6.0, 1.5, 1.1)
    assert beside["hidden"] == (10 + 4 - 11) / 4
    of_long_work = {"nothing": 0.0, "gemm": 100.0}
    _, beside = sending._beside(
        FakeBench(), chain, works, of_long_work, sending.VARIANTS[0]
    )
    assert "hidden" not in beside, "4 of 100 ms are less than what the work varies by"


def test_the_put_kernel_is_launched_as_a_variant_says():
    before = sending.put.PROGRAMS, sending.put.WARPS
    variant = sending.VARIANTS[0]._replace(programs=40, warps=32)
    with sending.configured(variant):
        assert (sending.put.PROGRAMS, sending.put.WARPS) == (40, 32)
    with sending.configured(sending.VARIANTS[-1]):
        assert before == (sending.put.PROGRAMS, sending.put.WARPS)
    assert before == (sending.put.PROGRAMS, sending.put.WARPS)
