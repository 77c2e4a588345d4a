# SPDX-License-Identifier: BSD-3-Clause
"""What `python -m torchtitan_cad.train` says in one line of a command that cannot be."""

from types import SimpleNamespace
from typing import Any

import pytest
import torchtitan.train as titan_train
from torchtitan.hf_datasets.text_datasets import DATASETS

from torchtitan_cad.integration.torchtitan_v0_3 import entry
from torchtitan_cad.integration.torchtitan_v0_3.parts import add_demo_texts
from torchtitan_cad.recipes import llama3

LLAMA = ("--module=llama3", "--config=llama3_debugmodel")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--module=torchtitan_cad.recipes.llama4", "--config=llama4_debugmodel"],
            r"Cannot import module 'torchtitan_cad\.recipes\.llama4'",
        ),
        (
            [*LLAMA, "--cad.tolerance=0.1"],
            r"--cad\.tolerance.*: set --module to torchtitan_cad\.recipes\.<model>$",
        ),
        (
            [
                "--module=torchtitan.models.qwen3",
                "--config=qwen3_moe_debug",
                "--cad.shadow",
            ],
            r"--cad\.shadow.*: set --module to torchtitan_cad\.recipes\.<model>$",
        ),
        (["--config=llama3_8b"], "--module is required"),
        (
            ["--module", "torchtitan_cad.recipes.llama3", "--cad.shadow"],
            "--config is required",
        ),
        (
            ["--module=torchtitan_cad.recipes.llama3", "--config=llama3_9b"],
            "'llama3_9b' not found .*llama3_8b",
        ),
        ([*LLAMA, "--training.stepz=3"], "--training.stepz.*; --help lists"),
    ],
)
def test_a_command_that_cannot_be(arguments: list[str], message: str) -> None:
    with pytest.raises((ValueError, ImportError), match=message) as refused:
        entry.parse(arguments)
    assert "\n" not in str(refused.value)


def read_job(*arguments: str) -> Any:
    """Return the config that a job of these arguments would train."""
    configs: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("init_logger", "ConfigManager"):
            patch.setattr(titan_train, name, getattr(titan_train, name))

        def main() -> None:
            configs.append(titan_train.ConfigManager().parse_args())

        patch.setattr(titan_train, "main", main)
        entry.run_recipe([*arguments], SimpleNamespace(building=True))
    return configs[0]


def test_stock_attention_without_gradients_on_cpu() -> None:
    with pytest.raises(ValueError, match=r"has FlexAttention, .* CPU; take a recipe"):
        read_job(*LLAMA)
    config = read_job("--module=llama3", "--config=llama3_debugmodel_varlen_attn")
    assert not hasattr(config, "cad")


@pytest.mark.parametrize("part", ["dataloader", "validator"])
def test_a_recipe_names_a_dataset_of_the_demo(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(DATASETS, "python_stdlib", raising=False)
    config = llama3.llama3_debugmodel()
    add_demo_texts(config)
    assert "python_stdlib" not in DATASETS
    loader = getattr(config, part)
    loader = getattr(loader, "dataloader", loader)
    loader.dataset = "python_stdlib"
    add_demo_texts(config)
    assert "python_stdlib" in DATASETS


def test_a_command_names_a_dataset_of_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(DATASETS, "python_stdlib", raising=False)
    varlen = ("--module=llama3", "--config=llama3_debugmodel_varlen_attn")
    read_job(*varlen, "--dataloader.dataset=python_stdlib")
    assert "python_stdlib" in DATASETS
