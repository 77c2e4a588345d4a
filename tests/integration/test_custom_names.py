# SPDX-License-Identifier: BSD-3-Clause
"""Flavors, datasets and models that `experimental.custom_import` registers are known when a job is checked."""

import sys
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

from tests.lib.jobs.harness import parse_job
from tests.lib.refusals import refusal
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu

enable_cpu()

# torchtitan must not be imported before enable_cpu().
from torchtitan.hf_datasets.text_datasets import DATASETS  # noqa: E402
from torchtitan.models.llama3 import llama3_args  # noqa: E402
from torchtitan.protocols.train_spec import _extra_train_specs, get_train_spec  # noqa: E402

from torchtitan_cad.integration.torchtitan_v0_2 import plugin  # noqa: E402
from torchtitan_cad.integration.torchtitan_v0_2.job import attention_kinds  # noqa: E402

MODULE = "tests.lib.jobs.custom_names"
IMPORT = f"--experimental.custom_import={MODULE}"
MINE = ("--model.name=mine", "--model.flavor=small")


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the module registers is registered in this test alone."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    sys.modules.pop(MODULE, None)
    with (
        patch.dict(DATASETS),
        patch.dict(llama3_args),
        patch.dict(_extra_train_specs),
    ):
        yield


@pytest.mark.parametrize("switch", ["--parallelism.cad", "--parallelism.no-cad"])
@pytest.mark.parametrize(
    "options", [("--model.flavor=mine",), ("--training.dataset=mine",), MINE], ids=str
)
def test_registered_names_are_accepted(options, switch, tmp_path):
    parse_job(tmp_path, IMPORT, *options, switch)


def test_a_derived_model_gets_the_adapter_of_its_base(tmp_path):
    config = parse_job(tmp_path, IMPORT, *MINE)
    args = get_train_spec("mine").model_args["small"]
    (kind,) = attention_kinds(config, args, torch.float32)
    assert (kind.name, kind.layers) == ("full", 2)
    assert (kind.shape.num_heads, kind.shape.head_dim) == (2, 32)
    try:
        plugin.on_config(config)
        model = get_train_spec("mine").model_cls
        assert issubclass(model, sys.modules[MODULE].Derived)
        assert hasattr(model, "adapter")
    finally:
        plugin.restore()


@pytest.mark.parametrize(
    "options",
    [
        (IMPORT, "--model.flavor=other"),
        (IMPORT, "--training.dataset=other"),
        ("--model.name=mine",),
        (IMPORT, "--model.name=own_parallelize", MINE[1]),
        ("--experimental.custom_import=no.such",),
    ],
)
def test_other_names_are_refused(options, tmp_path):
    with refusal():
        parse_job(tmp_path, *options)
