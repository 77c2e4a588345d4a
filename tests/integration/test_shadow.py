# SPDX-License-Identifier: BSD-3-Clause
"""``cad.shadow``: a job that trains as torchtitan does, and records its documents."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.lib.jobs.compositions import COMMON, options, stock
from tests.lib.jobs.harness import parse_job, read_scalars, run
from tests.lib.jobs.loaders import EOS, CountingLoader, groups, on_all
from tests.lib.sets import matrix
from torchtitan_cad.integration.config import Cad
from torchtitan_cad.integration.loading.documents import DocumentRule
from torchtitan_cad.integration.report.steps_file import DOCUMENTS_NAME
from torchtitan_cad.integration.shadow import Shadow
from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.tools.recorded_documents import find_record, read_record

LINE = re.compile(r"cad\.shadow: imbalance ([\d.]+) as loaded")


@pytest.mark.parametrize(
    ("words", "nranks", "microbatches"),
    [
        ("validation batch8", 2, 2),
        pytest.param("pp2 --model.flavor=tiny_sdpa", 4, 4, marks=matrix),
    ],
)
def test_trains_as_torchtitan_does(words, nranks, microbatches):
    """By torchtitan's own initialisation: what happens at the start leaves its random numbers alone."""
    args = options(words)
    switches = options("cad_defaults --cad.shadow")
    without = stock(nranks, *args)
    shadow = run([*COMMON, *switches, *args], nranks, init_seed=None)
    assert shadow.losses == without.losses
    assert shadow.grad_norms == without.grad_norms
    assert shadow.validation_losses == without.validation_losses

    path = find_record(shadow.dump_folder)
    assert path is not None
    record = read_record(path, 10)
    assert len(record.batches) == 3
    assert record.ranks == nranks
    assert record.microbatches == microbatches
    for rows in record.batches:
        assert [sum(row) for row in rows] == [1024] * 8
        assert max(map(len, rows)) > 1
    lines = [line for log in shadow.logs for line in LINE.findall(log)]
    imbalances = read_scalars(shadow.dump_folder)["cad/imbalance/before"]
    assert {f"{imbalance:.3f}" for imbalance in imbalances} == set(lines)


def new_shadow(
    loader: CountingLoader,
    group: dist.ProcessGroup | None = None,
    *,
    rank: int = 0,
    cp: int = 1,
    dp: int = 1,
    microbatches: int = 1,
) -> Shadow:
    job = SimpleNamespace(
        topology=SimpleNamespace(group_size=dp * cp, cp=cp),
        documents=DocumentRule(EOS),
        microbatches=microbatches,
        cad=Cad(min_shard=1),
        kinds=(AttentionKind("full", 1, AttentionShape(4, 2, 32, 4)),),
    )
    return Shadow(loader, job, "", group, rank)


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_state_is_the_loaders():
    shadow = new_shadow(CountingLoader(8))
    shadow.load_state_dict({"next": 6})
    assert [int(labels[0, 0]) for _, labels in shadow] == [6, 7]
    assert shadow.state_dict() == {"next": 8}


def record(shadow: Shadow, steps: range, folder: Path) -> None:
    shadow.dump_folder = str(folder)
    batches = iter(shadow)
    for step in steps:
        next(batches)
        shadow.end_step(step)


def test_all_data_parallel_ranks_are_recorded_in_their_order(tmp_path):
    """Of ranks that share rows by context parallelism the first sends them. Batches have 4 rows of 8 tokens."""
    group_of = groups(size=4)

    def shadow_of(rank):
        ids = (torch.arange(8) >= 2).expand(4, 8).long()
        if rank < 2:  # the first data-parallel rank
            ids = ids.clone()
            ids[3, 5:] = 2
        loader = CountingLoader(1, extra={"document_ids": ids})
        group = group_of(rank)
        shadow = new_shadow(loader, group, rank=rank, cp=2, dp=2, microbatches=2)
        record(shadow, range(1, 2), tmp_path)
        return shadow

    first, *others = on_all(range(4), shadow_of)
    usual = [2, 6]
    other = [2, 3, 3]
    found = read_record(tmp_path / DOCUMENTS_NAME, 1)
    assert found.batches == [[usual] * 3 + [other] + [usual] * 4]
    # causal pairs, in tiles of one token
    light = 3 + 21 + 3 + 6 + 6
    heavy = 2 * (3 + 21)
    imbalance = (1 + heavy / ((light + heavy) / 2)) / 2
    assert first.drain_imbalances() == [pytest.approx(imbalance)]
    assert first.drain_imbalances() == []  # once each
    assert [shadow.drain_imbalances() for shadow in others] == [[]] * 3


def test_a_resumed_run_appends_and_its_steps_count(tmp_path):
    """What a kill has cut is removed."""
    path = tmp_path / DOCUMENTS_NAME
    record(new_shadow(CountingLoader(7)), range(1, 8), tmp_path)
    path.write_text(path.read_text() + '{"version": 1, "st')
    record(new_shadow(CountingLoader(7)), range(5, 7), tmp_path)
    found = read_record(path, 10)
    assert found.batches == [[[8]] * 4] * 6
    assert found.ranks == 1
    assert found.microbatches == 1


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    (tmp_path / "file").touch()
    record(new_shadow(CountingLoader(7)), range(1, 4), tmp_path / "file")
    (warning,) = [line for line in caplog.records if line.levelname == "WARNING"]
    assert "Not a directory" in warning.message


def test_it_needs_none_of_the_kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    parse_job(tmp_path, "--cad.shadow", "--cad.kernel=flash_attn")
