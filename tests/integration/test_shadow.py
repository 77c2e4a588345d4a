# SPDX-License-Identifier: BSD-3-Clause
"""``cad.shadow``: a job that trains as torchtitan does, and says what CAD would make of it."""

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.compositions import COMMON, PP2, TP2, VALIDATION, global_batch, stock
from tests.integration.harness import RunResult, parse_job, read_scalars, run
from tests.integration.loaders import CountingLoader
from torchtitan_cad.integration.loading.documents import DocumentRule
from torchtitan_cad.integration.shadow import WAIT_S, Shadow

SHADOW = ("--job.custom_config_module=torchtitan_cad.job_config", "--parallelism.cad", "--cad.shadow")
LINE = re.compile(
    r"cad\.shadow: imbalance (\S+) as loaded, (\S+) with rows reordered \(([\d.]+) x\), "
    r"(\S+) with CAD \(([\d.]+) x\)  plan"
)


def figures_of(result: RunResult) -> list[dict[str, Any]]:
    (path,) = result.dump_folder.rglob("cad_steps.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("name", "args", "nranks"),
    [
        ("fsdp2_accumulation", (*VALIDATION, *global_batch(8)), 2),
        pytest.param("nano_batches", ("--cad.nano_batches=2", "--cad.tolerance=0.02"), 2, marks=pytest.mark.matrix),
        pytest.param("tp2", (*TP2, "--cad.placement=loader"), 4, marks=pytest.mark.matrix),
        pytest.param("pp2", (*PP2, "--model.flavor=tiny_sdpa"), 4, marks=pytest.mark.matrix),
    ],
)
def test_trains_as_torchtitan_does(name: str, args: tuple[str, ...], nranks: int) -> None:
    """By torchtitan's own initialisation: what is measured at the start leaves its random numbers alone."""
    without = stock(nranks, *(arg for arg in args if not arg.startswith("--cad.")))
    shadow = run([*COMMON, *SHADOW, *args], nranks, init_seed=None)
    assert shadow.losses == without.losses
    assert shadow.grad_norms == without.grad_norms
    assert shadow.validation_losses == without.validation_losses

    lines = [match.groups() for log in shadow.logs for match in LINE.finditer(log)]
    steps = figures_of(shadow)
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["imbalance_before"] >= step["imbalance_reordered"] - 1e-6 >= 1 - 2e-6
        assert step["imbalance_after"] >= 1
        assert step["seconds_reordered"] <= step["seconds_before"]
        assert step["speedup_reordered"] >= 1
        assert step["speedup_after"] > 0
        written = [f"{step[f'imbalance_{way}']:.3f}" for way in ("before", "reordered", "after")]
        assert [line[0] for line in lines].count(written[0]) >= 1
        assert any((line[0], line[1], line[3]) == tuple(written) for line in lines)
    scalars = read_scalars(shadow.dump_folder)
    assert scalars["cad/imbalance/reordered"] == pytest.approx([step["imbalance_reordered"] for step in steps])
    assert scalars["cad/speedup/cad"] == pytest.approx([step["speedup_after"] for step in steps])


def new_shadow(loader: CountingLoader, accumulation: int = 1) -> Shadow:
    topology = SimpleNamespace(group_size=1, cp=1)
    job: Any = SimpleNamespace(accumulation=accumulation, topology=topology, documents=DocumentRule(), microbatches=1)
    outlook: Any = None  # fails
    return Shadow(loader, job, outlook, None, 0)


def test_state_is_the_loaders() -> None:
    shadow = new_shadow(CountingLoader(8), accumulation=2)
    batches = iter(shadow)
    assert [int(next(batches)[1][0, 0]) for _ in range(3)] == [0, 1, 2]
    assert shadow.state_dict() == {"next": 3}
    shadow.load_state_dict({"next": 6})
    assert [int(labels[0, 0]) for _, labels in shadow] == [6, 7]
    assert shadow.close()


def test_training_goes_on_without_predictions(caplog: pytest.LogCaptureFixture) -> None:
    shadow = new_shadow(CountingLoader(6))
    assert [int(labels[0, 0]) for _, labels in shadow] == list(range(6))
    begin = time.monotonic()
    assert shadow.figures(1.0) == {}
    assert time.monotonic() - begin < WAIT_S / 2
    assert caplog.text.count("cad.shadow logs nothing from here on, and training goes on: ") == 1


@pytest.mark.parametrize("switch", ["--parallelism.cad", "--parallelism.no-cad"])
def test_without_cad_it_is_said_to_do_nothing(switch: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parse_job(tmp_path, "--cad.shadow", switch)
    assert ("cad.shadow = true does nothing without parallelism.cad = true" in caplog.text) == ("no" in switch)
