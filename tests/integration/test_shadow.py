# SPDX-License-Identifier: BSD-3-Clause
"""``cad.shadow``: a job that trains as torchtitan does, and records its documents."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.lib.jobs.compositions import (
    COMMON,
    PP2,
    TP2,
    VALIDATION,
    global_batch,
    stock,
)
from tests.lib.jobs.harness import parse_job, read_scalars, run
from tests.lib.jobs.loaders import EOS, CountingLoader, gloo_group
from torchtitan_cad.integration.config import Cad
from torchtitan_cad.integration.loading.documents import DocumentRule
from torchtitan_cad.integration.report.steps_file import DOCUMENTS_NAME
from torchtitan_cad.integration.shadow import Shadow
from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.tools.recorded_documents import find_record, read_record

SHADOW = (
    "--job.custom_config_module=torchtitan_cad.job_config",
    "--parallelism.cad",
    "--cad.shadow",
)
LINE = re.compile(r"cad\.shadow: imbalance ([\d.]+) as loaded")


@pytest.mark.parametrize(
    ("args", "nranks", "rows", "microbatches"),
    [
        ((*VALIDATION, *global_batch(8)), 2, 8, 2),
        pytest.param(
            (*TP2, "--cad.placement=loader"),
            4,
            4,
            1,
            marks=pytest.mark.matrix,
            id="tp2",
        ),
        pytest.param(
            (*PP2, "--model.flavor=tiny_sdpa"),
            4,
            8,
            4,
            marks=pytest.mark.matrix,
            id="pp2",
        ),
    ],
)
def test_trains_as_torchtitan_does(args, nranks, rows, microbatches):
    """By torchtitan's own initialisation: what happens at the start leaves its random numbers alone."""
    without = stock(nranks, *(arg for arg in args if not arg.startswith("--cad.")))
    shadow = run([*COMMON, *SHADOW, *args], nranks, init_seed=None)
    assert shadow.losses == without.losses
    assert shadow.grad_norms == without.grad_norms
    assert shadow.validation_losses == without.validation_losses

    path = find_record(shadow.dump_folder)
    assert path is not None
    record = read_record(path, 10)
    assert (record.last_step, record.ranks, record.microbatches) == (
        3,
        nranks,
        microbatches,
    )
    assert [len(batch) for batch in record.batches] == [rows] * 3
    assert {sum(row) for batch in record.batches for row in batch} == {1024}
    assert max(len(row) for batch in record.batches for row in batch) > 1
    lines = [line for log in shadow.logs for line in LINE.findall(log)]
    imbalances = read_scalars(shadow.dump_folder)["cad/imbalance/before"]
    assert len(imbalances) == 3
    assert {f"{imbalance:.3f}" for imbalance in imbalances} <= set(lines)


def new_shadow(
    loader: CountingLoader,
    *,
    rank: int = 0,
    cp: int = 1,
    dp: int = 1,
    microbatches: int = 1,
    group: dist.ProcessGroup | None = None,
) -> Shadow:
    kind = AttentionKind("full", 1, AttentionShape(4, 2, 32, 4))
    job: Any = SimpleNamespace(
        topology=SimpleNamespace(group_size=dp * cp, cp=cp),
        documents=DocumentRule(EOS),
        microbatches=microbatches,
        cad=Cad(min_shard=1),
        kinds=(kind,),
    )
    return Shadow(loader, job, "", group, rank)


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_state_is_the_loaders():
    shadow = new_shadow(CountingLoader(8))
    batches = iter(shadow)
    assert [int(next(batches)[1][0, 0]) for _ in range(3)] == [0, 1, 2]
    assert shadow.state_dict() == {"next": 3}
    shadow.load_state_dict({"next": 6})
    assert [int(labels[0, 0]) for _, labels in shadow] == [6, 7]


def test_all_data_parallel_ranks_are_recorded_in_their_order(tmp_path):
    """Of ranks that share rows by context parallelism the first sends them. Batches have 4 rows of 8 tokens."""
    store = dist.HashStore()

    def run(rank: int) -> Shadow:
        ids = torch.zeros(4, 8, dtype=torch.long)
        ids[:, 2:] = 1
        if rank < 2:
            ids[3, 5:] = 2
        loader = CountingLoader(1, extra={"document_ids": ids})
        group = gloo_group(store, rank, 4, timeout_s=60)
        shadow = new_shadow(loader, rank=rank, cp=2, dp=2, microbatches=2, group=group)
        record(shadow, range(1, 2), tmp_path)
        return shadow

    with ThreadPoolExecutor(4) as pool:
        shadows = list(pool.map(run, range(4)))
    (line,) = (tmp_path / DOCUMENTS_NAME).read_text().splitlines()
    usual = [[2, 6], [2, 6]]
    assert json.loads(line) == {
        "version": 1,
        "step": 1,
        "ranks": 1,
        "row_tokens": 8,
        "microbatches": [[usual, usual], [[[2, 6], [2, 3, 3]], usual]],
    }
    by_rank = [[2, 6]] * 3 + [[2, 3, 3]] + [[2, 6]] * 4
    assert read_record(tmp_path / DOCUMENTS_NAME, 1).batches == [by_rank]
    # causal pairs, in tiles of one token
    light, heavy = 3 + 21 + 3 + 6 + 6, 2 * (3 + 21)
    imbalance = (1 + heavy / ((light + heavy) / 2)) / 2
    found = [shadow.drain_imbalances() for shadow in shadows]
    assert found == [[pytest.approx(imbalance)], [], [], []]
    assert shadows[0].drain_imbalances() == []


def test_documents_end_where_the_job_says(tmp_path):
    record(new_shadow(CountingLoader(EOS + 1)), range(1, EOS + 2), tmp_path)
    # the last is all EOS
    assert read_record(tmp_path / DOCUMENTS_NAME, 2).batches == [
        [[8]] * 4,
        [[1] * 8] * 4,
    ]


def record(shadow: Shadow, steps: range, folder: Path) -> None:
    shadow.dump_folder = str(folder)
    batches = iter(shadow)
    for step in steps:
        next(batches)
        shadow.end_step(step)


def test_a_resumed_run_appends_and_its_steps_count(tmp_path):
    """What a kill has cut is removed."""
    path = tmp_path / DOCUMENTS_NAME
    for steps, end in ((range(1, 8), '{"version": 1, "st'), (range(5, 7), "")):
        record(new_shadow(CountingLoader(7)), steps, tmp_path)
        path.write_text(path.read_text() + end)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        5,
        6,
    ]
    every = read_record(path, 10)
    assert (every.batches, every.ranks, every.microbatches, every.last_step) == (
        [[[8]] * 4] * 6,
        1,
        1,
        6,
    )
    assert len(read_record(path, 2).batches) == 2


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    (tmp_path / "file").touch()
    record(new_shadow(CountingLoader(7)), range(1, 4), tmp_path / "file")
    (warning,) = [
        record.message for record in caplog.records if record.levelname == "WARNING"
    ]
    assert "Not a directory" in warning


@pytest.mark.parametrize("switch", ["--parallelism.cad", "--parallelism.no-cad"])
def test_without_cad_it_is_said_to_do_nothing(switch, tmp_path, caplog):
    parse_job(tmp_path, "--cad.shadow", switch)
    assert (
        "cad.shadow = true does nothing without parallelism.cad = true" in caplog.text
    ) == ("no" in switch)
