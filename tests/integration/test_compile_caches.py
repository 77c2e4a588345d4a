# SPDX-License-Identifier: BSD-3-Clause
"""Jobs with compile, cold and with the caches that they and other jobs have left: the same losses and gradients.

Users' jobs share a folder of compiled graphs, in which torch finds them by keys that do not hold all that graphs hold.
Stock torchtitan runs with patches/compile_caches.patch.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.integration.test_experts import EP2, ETP2, GROUPED
from tests.lib.jobs import compositions as c
from tests.lib.jobs.harness import RunResult, parse_job, run
from tests.lib.jobs.patched import torchtitan_with
from tests.lib.threaded import needs_linux
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu

enable_cpu()

from torchtitan.distributed import ParallelDims  # noqa: E402

from torchtitan_cad.integration.compile_caches import (  # noqa: E402
    graph_place,
    separate_compile_caches,
)
from torchtitan_cad.integration.torchtitan_v0_2 import plugin  # noqa: E402

matrix, slow = pytest.mark.matrix, pytest.mark.slow
STEPS = ("--training.steps=2",)
LOSS = (*c.COMPILE, "--compile.components=loss")
HALVES = ("--cad.nano_batches=2",)


def train(folder: Path, nranks: int, *args: str) -> RunResult:
    """A run with the caches of ``folder``, by stock torchtitan unless ``args`` have CAD."""
    env = {"TORCHINDUCTOR_CACHE_DIR": str(folder)}
    search = [] if set(c.CAD) <= set(args) else [torchtitan_with("compile_caches")]
    return run(
        [*c.COMMON, *STEPS, *args], nranks, env=env, timeout_s=300, pythonpath=search
    )


def assert_same(results: Sequence[RunResult]) -> None:
    """Losses and gradient norms are equal to the bit, and the last run has compiled nothing anew."""
    first, *others = results
    for result in others:
        assert (result.losses, result.grad_norms) == (first.losses, first.grad_norms)
    *_, last = results
    assert last.cached["hit"] > 0
    assert last.cached["miss"] == 0


def test_a_second_start_takes_every_graph_and_no_other_ranks(tmp_path):
    """Ranks of one group of tensor parallelism compile the loss for different parts of the vocabulary."""
    assert_same([train(tmp_path, 2, *c.CAD, *c.TP2, *LOSS) for _ in range(2)])


SLOW = {
    *("tp2", "tp2_ac_op", "tp2_ac_full", "tp2_without_loss_parallel"),
    *("ep2", "ep2_tp2_loss", "ep2_tp2_etp2_loss", "tp2_halves", "ep2_halves"),
}
"""Cases in which four ranks compile blocks, for more than a minute."""
# Name: ranks, and arguments with and without CAD.
BESIDE_STOCK = {
    "fsdp2": (2, c.COMPILE),
    "tp2_loss": (4, (*c.TP2, *LOSS)),
    "tp2": (4, (*c.TP2, *c.COMPILE)),
    "tp2_ac_op": (4, (*c.TP2, *c.COMPILE, *c.OP)),
    "tp2_ac_full": (4, (*c.TP2, *c.COMPILE, *c.FULL)),
    "tp2_without_loss_parallel": (
        4,
        (*c.TP2, *c.COMPILE, "--parallelism.disable_loss_parallel"),
    ),
    "ep2": (4, (*GROUPED, *EP2, *c.COMPILE)),
    "ep2_tp2_loss": (4, (*GROUPED, *c.TP2, *EP2, *LOSS)),
    "ep2_tp2_etp2_loss": (4, (*GROUPED, *c.TP2, *EP2, *ETP2, *LOSS)),
}


def marked(name: str, *values: object) -> object:
    """Return a case of the matrix; one in ``SLOW`` runs with the slow tests."""
    return pytest.param(*values, id=name, marks=slow if name in SLOW else matrix)


@pytest.mark.parametrize("first", ["cad", "stock"])
@pytest.mark.parametrize("name", [marked(name, name) for name in BESIDE_STOCK])
def test_graphs_of_stock_torchtitan_lie_beside(name, first, tmp_path):
    nranks, args = BESIDE_STOCK[name]
    with_cad, without = (*args, *c.CAD), args
    order = (
        [with_cad, without, with_cad]
        if first == "cad"
        else [without, with_cad, without]
    )
    before, between, after = (train(tmp_path, nranks, *job) for job in order)
    assert_same([before, after])
    c.assert_close(between.losses[:1], before.losses[:1], "loss")


TRACED = (*c.COMPILE, *HALVES, "--cad.streams=traced")
OPAQUE = (*c.COMPILE, *HALVES, "--cad.streams=opaque")
# Name: ranks, and arguments of two jobs with CAD.
BESIDE_ANOTHER = {
    "other_plans": (
        2,
        c.COMPILE,
        (*c.COMPILE, "--cad.placement=auto", "--cad.planner=greedy"),
    ),
    "other_rows": (2, c.COMPILE, (*c.COMPILE, "--training.local_batch_size=4")),
    "resend": (2, c.COMPILE, (*c.COMPILE, *c.RESEND)),
    "ac_op": (2, c.COMPILE, (*c.COMPILE, *c.OP)),
    "ac_full": (2, (*c.COMPILE, *c.FULL), (*c.COMPILE, *c.ATTENTION_KEPT)),
    "halves": (2, c.COMPILE, OPAQUE),
    "halves_in_the_middle": (2, OPAQUE, (*OPAQUE, *c.ROW1)),
    "cp2": (2, c.COMPILE, (*c.COMPILE, *c.CP2)),
    "tp2_cp2": (4, (*c.TP2, *LOSS), (*c.TP2, *c.CP2, *LOSS)),
    "tp2_pp2": (4, (*c.TP2, *LOSS), (*c.TP2, *c.PP2, *LOSS)),
    "tp2_halves": (4, (*c.TP2, *c.COMPILE), (*c.TP2, *OPAQUE)),
    "tp2_of_4_and_of_2": (4, (*c.TP2, *LOSS), (*c.dp(tensor_parallel=4), *LOSS)),
    "ep2_halves": (4, (*GROUPED, *EP2, *c.COMPILE), (*GROUPED, *EP2, *OPAQUE)),
}
BESIDE_TRACED = {
    "opaque": (2, TRACED, OPAQUE),
    "resend": (2, TRACED, (*TRACED, *c.RESEND)),
    "ac_op": (2, TRACED, (*TRACED, *c.OP)),
    "in_the_middle": (2, TRACED, (*TRACED, *c.ROW1)),
}


def cases() -> list[object]:
    symmetric = pytest.param(
        2,
        c.COMPILE,
        (*c.COMPILE, *c.SYMMETRIC),
        id="symm_mem",
        marks=[matrix, needs_linux],
    )
    plain = [marked(name, *case) for name, case in BESIDE_ANOTHER.items()]
    traced = [
        pytest.param(*case, id=f"traced_{name}", marks=[matrix, c.needs_traced])
        for name, case in BESIDE_TRACED.items()
    ]
    return [symmetric, *plain, *traced]


@pytest.mark.parametrize(("nranks", "one", "other"), cases())
def test_graphs_of_another_job_lie_beside(nranks, one, other, tmp_path):
    runs = [train(tmp_path, nranks, *c.CAD, *job) for job in (one, other, one, other)]
    assert_same(runs[::2])
    assert_same(runs[1::2])


def places(**degrees: int) -> list[str]:
    """What the keys of eight ranks hold of them."""
    found = list[str]()
    for rank in range(8):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
        try:
            degree = (
                dict.fromkeys(("dp_replicate", "cp", "tp", "pp", "ep", "etp"), 1)
                | degrees
            )
            found.append(
                graph_place(
                    ParallelDims(
                        dp_shard=-1, **degree, world_size=8
                    ).get_all_one_dimensional_meshes()
                )
            )
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
        counts = [
            sum(f"{name} {place} of {degree}" in each for each in found)
            for place in range(degree)
        ]
        assert counts == [8 // degree] * degree


def test_a_later_job_gets_the_tag_that_was_there(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    # pytest's monkeypatch would leave torch's configuration without this key.
    with torch.compiler.config.patch(cache_key_tag="a user's|second"):
        plugin.on_config(parse_job(tmp_path))
        tags = set[str]()
        for _ in range(2):
            separate_compile_caches({})
            tags.add(torch.compiler.config.cache_key_tag)
        (tag,) = tags
        assert tag.startswith("a user's|second|torchtitan_cad ")
        plugin.restore()
        assert torch.compiler.config.cache_key_tag == "a user's|second"
