# SPDX-License-Identifier: BSD-3-Clause
"""Jobs with compile, cold and with the caches that they and other jobs have left: the same losses and gradients.

Users' jobs share a folder of compiled graphs, in which torch finds them by keys that do not hold all that graphs hold.
Stock torchtitan runs with patches/compile_caches.patch.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.integration.test_experts import GROUPED
from tests.lib.jobs.compositions import (
    ATTENTION_KEPT,
    CAD,
    COMMON,
    COMPILE,
    CP2,
    EP2,
    ETP2,
    FULL,
    HALVES,
    OP,
    PP2,
    RESEND,
    ROW1,
    SYMMETRIC,
    TP2,
    assert_close,
    dp,
    needs_traced,
)
from tests.lib.jobs.harness import RunResult, parse_job, run
from tests.lib.jobs.patched import torchtitan_with
from tests.lib.sets import matrix, slow
from tests.lib.threaded import needs_linux
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu

enable_cpu()

from torchtitan.distributed import ParallelDims  # noqa: E402

from torchtitan_cad.integration.compile_caches import (  # noqa: E402
    graph_place,
    separate_compile_caches,
)
from torchtitan_cad.integration.torchtitan_v0_2 import plugin  # noqa: E402

STEPS = ("--training.steps=2",)
LOSS = (*COMPILE, "--compile.components=loss")


def train(folder: Path, nranks: int, *args: str) -> RunResult:
    """A run with the caches of ``folder``, by stock torchtitan unless ``args`` have CAD."""
    env = {"TORCHINDUCTOR_CACHE_DIR": str(folder)}
    search = [] if set(CAD) <= set(args) else [torchtitan_with("compile_caches")]
    return run(
        [*COMMON, *STEPS, *args], nranks, env=env, timeout_s=300, pythonpath=search
    )


def assert_same(first: RunResult, last: RunResult) -> None:
    """Losses and gradient norms are equal to the bit, and the last run has compiled nothing anew."""
    assert last.losses == first.losses
    assert last.grad_norms == first.grad_norms
    assert last.cached["hit"] > 0
    assert last.cached["miss"] == 0


def test_a_second_start_takes_every_graph_and_no_other_ranks(tmp_path):
    """Ranks of one group of tensor parallelism compile the loss for different parts of the vocabulary."""
    first, second = (train(tmp_path, 2, *CAD, *TP2, *LOSS) for _ in range(2))
    assert_same(first, second)


SLOW = ("tp2", "tp2_ac_op", "ep2", "ep2_tp2_etp2_loss", "tp2_halves", "ep2_halves")
"""Cases in which four ranks compile blocks, for more than a minute."""
# Name: ranks, and arguments with and without CAD.
BESIDE_STOCK = {
    "fsdp2": (2, COMPILE),
    "tp2_loss": (4, (*TP2, *LOSS)),
    "tp2": (4, (*TP2, *COMPILE)),
    "tp2_ac_op": (4, (*TP2, *COMPILE, *OP)),
    "ep2": (4, (*GROUPED, *EP2, *COMPILE)),
    "ep2_tp2_etp2_loss": (4, (*GROUPED, *TP2, *EP2, *ETP2, *LOSS)),
}


def by_name(names: Iterable[str]) -> list[Any]:
    """Cases of the matrix, or of the slow set."""
    cases = []
    for name in names:
        marks = [slow if name in SLOW else matrix]
        if name == "symm_mem":
            marks.append(needs_linux)
        if name.startswith("traced"):
            marks.append(needs_traced)
        cases.append(pytest.param(name, marks=marks))
    return cases


@pytest.mark.parametrize("first", ["cad", "stock"])
@pytest.mark.parametrize("name", by_name(BESIDE_STOCK))
def test_graphs_of_stock_torchtitan_lie_beside(name, first, tmp_path):
    nranks, job = BESIDE_STOCK[name]
    one, other = ((*job, *CAD), job) if first == "cad" else (job, (*job, *CAD))
    before, between, after = (
        train(tmp_path, nranks, *args) for args in (one, other, one)
    )
    assert_same(before, after)
    assert_close(between.losses[:1], before.losses[:1], "loss")


OPAQUE = (*COMPILE, *HALVES, "--cad.streams=opaque")
TRACED = (*COMPILE, *HALVES, "--cad.streams=traced")
# Name: ranks, arguments of a job with CAD, and of another.
BESIDE_ANOTHER = {
    "symm_mem": (2, COMPILE, (*COMPILE, *SYMMETRIC)),
    "other_plans": (
        2,
        COMPILE,
        (*COMPILE, "--cad.placement=auto", "--cad.min_shard=64"),
    ),
    "resend": (2, COMPILE, (*COMPILE, *RESEND)),
    "ac_op": (2, COMPILE, (*COMPILE, *OP)),
    "ac_full": (2, (*COMPILE, *FULL), (*COMPILE, *ATTENTION_KEPT)),
    "halves": (2, COMPILE, OPAQUE),
    "halves_in_the_middle": (2, OPAQUE, (*OPAQUE, *ROW1)),
    "tp2_cp2": (4, (*TP2, *LOSS), (*TP2, *CP2, *LOSS)),
    "tp2_pp2": (4, (*TP2, *LOSS), (*TP2, *PP2, *LOSS)),
    "tp2_halves": (4, (*TP2, *COMPILE), (*TP2, *OPAQUE)),
    "tp2_of_4_and_of_2": (4, (*TP2, *LOSS), (*dp(tensor_parallel=4), *LOSS)),
    "ep2_halves": (4, (*GROUPED, *EP2, *COMPILE), (*GROUPED, *EP2, *OPAQUE)),
    "traced_opaque": (2, TRACED, OPAQUE),
    "traced_resend": (2, TRACED, (*TRACED, *RESEND)),
}


@pytest.mark.parametrize("name", by_name(BESIDE_ANOTHER))
def test_graphs_of_another_job_lie_beside(name, tmp_path):
    nranks, *jobs = BESIDE_ANOTHER[name]
    before = [train(tmp_path, nranks, *CAD, *job) for job in jobs]
    after = [train(tmp_path, nranks, *CAD, *job) for job in jobs]
    for first, last in zip(before, after, strict=True):
        assert_same(first, last)


def places(**degrees: int) -> list[str]:
    """What the keys of eight ranks hold of them."""
    names = ("dp_replicate", "cp", "tp", "pp", "ep", "etp")
    every = dict.fromkeys(names, 1) | degrees
    found = list[str]()
    for rank in range(8):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
        try:
            dims = ParallelDims(dp_shard=-1, **every, world_size=8)
            found.append(graph_place(dims.get_all_one_dimensional_meshes()))
        finally:
            dist.destroy_process_group()
    return found


def test_replicas_share_graphs():
    assert places() == places(dp_replicate=2) == [""] * 8


@pytest.mark.parametrize(
    "degrees",
    [
        {"tp": 2},
        {"cp": 2},
        {"pp": 2},
        {"ep": 2},
        {"tp": 2, "ep": 4, "etp": 2},
        {"tp": 2, "pp": 2, "cp": 2},
    ],
    ids=str,
)
def test_other_ranks_do_not(degrees):
    """Those of one group differ in their place; those that have the same place differ in their group."""
    found = places(**degrees)
    assert len(set(found)) == 8
    for name, degree in degrees.items():
        for place in range(degree):
            told = f"{name} {place} of {degree}"
            assert sum(told in key for key in found) == 8 // degree


def test_a_later_job_gets_the_tag_that_was_there(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = torch.compiler.config
    # pytest's monkeypatch would leave torch's configuration without this key.
    with config.patch(cache_key_tag="a user's|second"):
        plugin.on_config(parse_job(tmp_path))
        for _ in range(2):
            separate_compile_caches({})
            tag = config.cache_key_tag
            assert tag.startswith("a user's|second|torchtitan_cad ")
            assert tag.count("torchtitan_cad") == 1
        plugin.restore()
        assert config.cache_key_tag == "a user's|second"
