# SPDX-License-Identifier: BSD-3-Clause
"""What `python -m torchtitan_cad.train` says in one line of a command that cannot be."""

from types import SimpleNamespace

import pytest
import torchtitan.train as titan_train
from torchtitan.hf_datasets.text_datasets import DATASETS

from torchtitan_cad.integration.torchtitan_v0_3 import entry

LLAMA = ("--module=llama3", "--config=llama3_debugmodel")
VARLEN = ("--module=llama3", "--config=llama3_debugmodel_varlen_attn")
CAD = "--module=torchtitan_cad.recipes.llama3"


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
        ([*CAD.split("="), "--cad.shadow"], "--config is required"),
        ([CAD, "--config=llama3_9b"], "'llama3_9b' not found .*llama3_8b"),
        ([CAD, LLAMA[1], "--cad.tolerence=0.1"], r"cad\.tolerence"),
        ([*LLAMA, "--training.stepz=3"], "--training.stepz.*; --help lists"),
    ],
)
def test_a_command_that_cannot_be(arguments, message):
    with pytest.raises((ValueError, ImportError), match=message) as refused:
        entry.parse(arguments)
    assert "\n" not in str(refused.value)


def read_job(*arguments):
    """Return the config that a job of these arguments would train."""
    configs = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("init_logger", "ConfigManager"):
            patch.setattr(titan_train, name, getattr(titan_train, name))

        def main():
            configs.append(titan_train.ConfigManager().parse_args())

        patch.setattr(titan_train, "main", main)
        entry.run_recipe([*arguments], SimpleNamespace(building=True))
    return configs[0]


def test_stock_attention_without_gradients_on_cpu():
    with pytest.raises(ValueError, match=r"has FlexAttention, .* CPU; take a recipe"):
        read_job(*LLAMA)
    assert not hasattr(read_job(*VARLEN), "cad")


@pytest.mark.parametrize("part", ["dataloader", "validator.dataloader"])
def test_a_command_names_a_dataset_of_the_demo(part, monkeypatch):
    monkeypatch.delitem(DATASETS, "python_stdlib", raising=False)
    read_job(*VARLEN)
    assert "python_stdlib" not in DATASETS
    read_job(*VARLEN, f"--{part}.dataset=python_stdlib")
    assert "python_stdlib" in DATASETS
