# SPDX-License-Identifier: BSD-3-Clause
"""Jobs with compile, cold and with the caches that they and other jobs have left: the same losses and gradients.

Users' jobs share a folder of compiled graphs, in which torch finds them by keys that do not hold all that graphs hold.
Stock torchtitan runs with patches/compile_caches.patch.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.distributed import ParallelDims

from tests.lib.jobs.compositions import (
    CAD,
    COMMON,
    assert_close,
    needs_traced,
    options,
)
from tests.lib.jobs.harness import RunResult, parse_job, run
from tests.lib.jobs.patched import torchtitan_with
from tests.lib.sets import matrix, slow
from tests.lib.threaded import needs_linux
from torchtitan_cad.integration.compile_caches import (
    graph_place,
    separate_compile_caches,
)
from torchtitan_cad.integration.torchtitan_v0_2 import plugin

STEPS = ("--training.steps=2",)


def train(folder: Path, nranks: int, words: str) -> RunResult:
    """A run with the caches of ``folder``, by stock torchtitan unless the words have CAD."""
    args = options(words)
    env = {"TORCHINDUCTOR_CACHE_DIR": str(folder)}
    search = [] if set(CAD) <= set(args) else [torchtitan_with("compile_caches")]
    return run(
        [*COMMON, *STEPS, *args], nranks, env=env, timeout_s=300, pythonpath=search
    )


def assert_same(first: RunResult, last: RunResult) -> None:
    """Losses and gradient norms are equal to the bit, and the last run has compiled nothing anew."""
    assert last.losses == first.losses
    assert last.grad_norms == first.grad_norms
    ends = [figures[-1] for figures in last.figures]
    assert sum(end["hit"] for end in ends) > 0
    assert not any(end["miss"] for end in ends)


def test_a_second_start_takes_every_graph_and_no_other_ranks(tmp_path):
    """Ranks of one group of tensor parallelism compile the loss for different parts of the vocabulary."""
    first, second = (train(tmp_path, 2, "cad tp2 compile_loss") for _ in range(2))
    assert_same(first, second)


def case(nranks: int, *jobs: str):
    """A case of the matrix, or of the slow set, in which four ranks compile blocks for more than a minute."""
    words = " ".join(jobs)
    is_slow = nranks == 4 and ("compile_loss" not in words or "grouped" in words)
    marks = [slow if is_slow else matrix]
    if "symm_mem" in words:
        marks.append(needs_linux)
    if "traced" in words:
        marks.append(needs_traced)
    return pytest.param(nranks, *jobs, marks=marks)


BESIDE_STOCK = [
    case(2, "compile"),
    case(4, "tp2 compile_loss"),
    case(4, "tp2 compile"),
    case(4, "tp2 compile ac_op"),
    case(4, "grouped ep2 compile"),
    case(4, "grouped tp2 ep2 etp2 compile_loss"),
]


@pytest.mark.parametrize("first", ["cad", "stock"])
@pytest.mark.parametrize(("nranks", "job"), BESIDE_STOCK)
def test_graphs_of_stock_torchtitan_lie_beside(nranks, job, first, tmp_path):
    cad = f"{job} cad"
    one, other = (cad, job) if first == "cad" else (job, cad)
    before, between, after = (
        train(tmp_path, nranks, words) for words in (one, other, one)
    )
    assert_same(before, after)
    assert_close(between.losses[:1], before.losses[:1], "loss")


BESIDE_ANOTHER = [
    case(2, "compile", "compile symm_mem"),
    case(2, "compile", "compile placed --cad.min_shard=64"),
    case(2, "compile", "compile resend"),
    case(2, "compile", "compile ac_op"),
    case(2, "compile ac_full", "compile attention_kept"),
    case(2, "compile", "compile halves opaque"),
    case(2, "compile halves opaque", "compile halves opaque row1"),
    case(4, "tp2 compile_loss", "tp2 cp2 compile_loss"),
    case(4, "tp2 compile_loss", "tp2 pp2 compile_loss"),
    case(4, "tp2 compile", "tp2 compile halves opaque"),
    case(4, "tp2 compile_loss", "tp4 compile_loss"),
    case(4, "grouped ep2 compile", "grouped ep2 compile halves opaque"),
    case(2, "compile halves traced", "compile halves opaque"),
    case(2, "compile halves traced", "compile halves traced resend"),
]


@pytest.mark.parametrize(("nranks", "first", "second"), BESIDE_ANOTHER)
def test_graphs_of_another_job_lie_beside(nranks, first, second, tmp_path):
    one, other, one_again, other_again = (
        train(tmp_path, nranks, f"cad {job}") for job in (first, second, first, second)
    )
    assert_same(one, one_again)
    assert_same(other, other_again)


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
    assert len(set(places(**degrees))) == 8


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
