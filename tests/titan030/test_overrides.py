# SPDX-License-Identifier: BSD-3-Clause
"""Overrides that change what CAD relies on are refused; others have their effect."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import apply_overrides, derive, override
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.models.gpt_oss.model import Attention as SinkAttention

from tests.titan030 import tiny
from tests.titan030.harness import run
from torchtitan_cad.integration.torchtitan_v0_3.attention import CadAttention
from torchtitan_cad.integration.torchtitan_v0_3.checks import (
    check_overridden,
    relied_on,
)
from torchtitan_cad.integration.torchtitan_v0_3.trainer import _with_cad


class OwnAttention(SinkAttention):
    """Attention of a user's own."""

    @dataclass(kw_only=True, slots=True)
    class Config(SinkAttention.Config):
        pass


@override(target=BaseDataLoader.Config, fqns=["dataloader"])
def unwrap_loader(config):
    return config.inner


@override(target=MetricsProcessor.Config)
def stock_metrics(config):
    return MetricsProcessor.Config()


@override(target=CadAttention.Config)
def own_inner_attention(config):
    return VarlenAttention.Config()


@override(target=SinkAttention.Config)
def own_attention(config):
    return derive(config, OwnAttention.Config)


@override(target=SinkAttention.Config)
def shorter_window(config):
    window = config.sliding_window_size
    return replace(config, sliding_window_size=window and window // 2)


@override(target=CheckpointManager.Config)
def save(config):
    return replace(config, enable=True)


@override(target=HuggingFaceTextDataLoader.Config)
def another_dataset(config):
    return replace(config, dataset="c4_test")


@override(target=MetricsProcessor.Config)
def log_seldom(config):
    return replace(config, log_freq=7)


@pytest.fixture
def two_ranks(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)


def overridden(function):
    """Return a config of gpt_oss with CAD and an override, what CAD relied on before, and a device."""
    config = _with_cad(tiny.with_cad("gpt_oss"))
    config.override.imports = [f"{__name__}.{function.__name__}"]
    device = torch.device("cpu")
    before = relied_on(config, device)
    apply_overrides(config.override, config)
    return config, before, device


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(
    ("function", "changed"),
    [
        (unwrap_loader, "dataloader"),
        (stock_metrics, "metrics"),
        (own_inner_attention, r"layers\.0\.attention"),
        (own_attention, r"layers\.0\.attention"),
        (save, "checkpoints"),
        (shorter_window, "kinds"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cad_relies_on_stays(function, changed):
    with pytest.raises(
        ValueError,
        match=rf"override.imports = .*{function.__name__}'\] changes {changed}, on which CAD",
    ) as refused:
        check_overridden(*overridden(function))
    assert "\n" not in str(refused.value)


@pytest.mark.usefixtures("two_ranks")
def test_other_overrides_have_their_effect():
    config, *others = overridden(another_dataset)
    check_overridden(config, *others)
    assert config.dataloader.inner.dataset == "c4_test"
    config, *others = overridden(log_seldom)
    check_overridden(config, *others)
    assert config.metrics.log_freq == 7


def test_a_job_is_refused():
    with pytest.raises(AssertionError, match="changes dataloader, on which CAD"):
        run("llama3", f"--override.imports={__name__}.unwrap_loader", nranks=1)
