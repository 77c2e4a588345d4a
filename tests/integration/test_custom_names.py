# SPDX-License-Identifier: BSD-3-Clause
"""Flavors, datasets and models that `experimental.custom_import` registers are known when a job is checked."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.llama3 import llama3_args
from torchtitan.protocols.train_spec import _extra_train_specs, get_train_spec

from tests.lib.jobs.compositions import CAD, COMMON
from tests.lib.jobs.harness import parse_job, run
from tests.lib.refusals import refusal
from torchtitan_cad.integration.torchtitan_v0_2 import plugin
from torchtitan_cad.integration.torchtitan_v0_2.model import cad_model_class
from torchtitan_cad.integration.torchtitan_v0_2.models import (
    ADAPTERS,
    check_forwards,
)

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


@pytest.mark.parametrize("options", [("--training.dataset=mine",), MINE])
def test_registered_names_are_accepted(options, tmp_path):
    """Without CAD; with it they are in the job below."""
    parse_job(tmp_path, IMPORT, *options, "--parallelism.no-cad")


@pytest.mark.parametrize(
    "options",
    [
        (IMPORT, "--model.flavor=other"),
        (IMPORT, "--training.dataset=other"),
        ("--model.name=mine",),
        (IMPORT, "--model.name=own_parallelize", MINE[1]),
        (IMPORT, "--model.name=own_masks", MINE[1]),
        (IMPORT, "--model.name=no_masks", MINE[1]),
        ("--experimental.custom_import=no.such",),
    ],
)
def test_other_names_are_refused(options, tmp_path):
    with refusal():
        parse_job(tmp_path, *options)


def test_a_derived_model_trains_as_its_base():
    """The flavor is llama3's as the module registers it, too."""
    job = (*COMMON, *CAD, IMPORT, "--training.steps=1")
    derived = run([*job, *MINE])
    base = run([*job, "--model.flavor=mine"])
    assert derived.losses == base.losses
    for log in derived.logs:
        assert "Applied Core Attention Disaggregation to the model" in log


def small_model(name: str, folder: Path):
    """Build a registered model on the meta device as a job with CAD does."""
    config = parse_job(folder, IMPORT, f"--model.name={name}", MINE[1])
    try:
        plugin.on_config(config)
        spec = get_train_spec(name)
        with torch.device("meta"):
            return spec.model_cls(spec.model_args["small"])
    finally:
        plugin.restore()


def own_forward(*args) -> None:
    """Stand for a user's, in a model that a fork has beside torchtitan's."""


own_forward.__module__ = "torchtitan.models.mine.model"


def test_a_models_own_forward_is_not_replaced(tmp_path):
    """One nano-batch calls it; two would run torchtitan's in its place."""
    model = small_model("own_forward", tmp_path)
    check_forwards(model, halves=False)
    with refusal(remedy="cad.nano_batches"):
        check_forwards(model, halves=True)


@pytest.mark.parametrize("own", ["block", "attention", "inner_attention"])
def test_a_parts_own_forward_is_not_replaced(own, tmp_path, monkeypatch):
    model = small_model("mine", tmp_path)
    block = model.layers["0"]
    attention = block.attention
    inner = attention.inner_attention
    part = {"block": block, "attention": attention, "inner_attention": inner}[own]
    check_forwards(model, halves=True)
    monkeypatch.setattr(type(part), "forward", own_forward)
    is_replaced_by_one = part is not block
    if not is_replaced_by_one:
        check_forwards(model, halves=False)
    with refusal():
        check_forwards(model, halves=not is_replaced_by_one)


def test_masks_of_a_users_own_are_refused_under_any_name(tmp_path):
    parse_job(tmp_path, IMPORT, *MINE)
    own = dataclasses.replace(
        get_train_spec("own_masks"), model_args=get_train_spec("llama3").model_args
    )
    _extra_train_specs["llama3"] = own
    with refusal():
        parse_job(tmp_path, "--model.name=llama3", "--model.flavor=debugmodel")


def test_a_users_attention_is_not_replaced_by_that_of_a_projection(monkeypatch):
    with torch.device("meta"):
        spec = get_train_spec("deepseek_v3")
        adapter = ADAPTERS["deepseek_v3"]
        args = spec.model_args["debugmodel"]
        args = dataclasses.replace(args, n_dense_layers=args.n_layers)
        model = cad_model_class(spec.model_cls, adapter)(args)
    check_forwards(model, halves=False)
    attention = type(model.layers["0"].attention)
    monkeypatch.setattr(attention, "forward", lambda *args: None)
    with refusal(remedy="parallelism.cad"):
        check_forwards(model, halves=False)
