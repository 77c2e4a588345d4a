# SPDX-License-Identifier: BSD-3-Clause
"""Names that a user's module registers; jobs of test_custom_names.py import it (`custom_import`)."""

import dataclasses

from torch import nn
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.llama3 import (
    Transformer,
    TransformerModelArgs,
    get_train_spec,
    llama3_args,
)
from torchtitan.protocols.train_spec import _extra_train_specs


class Derived(Transformer):
    """A user's model."""


class OwnMasks(Transformer):
    """A user's model that masks what CAD would not."""

    def get_attention_masks(self, *args, **options):
        return super().get_attention_masks(*args, **options)


class NoMasks(nn.Module):
    """A user's model that has nothing of torchtitan's."""


class OwnForward(Transformer):
    """A user's model that scales its outputs."""

    def forward(self, *args, **options):
        return super().forward(*args, **options) / 2


def parallelize(model, *_):
    """Stand for a user's own function."""
    return model


stock = get_train_spec()
args = TransformerModelArgs(dim=64, n_layers=2, n_heads=2, vocab_size=2048)
llama3_args["mine"] = args
DATASETS["mine"] = DatasetConfig(
    path="mine", loader=lambda path: [], sample_processor=str
)
_extra_train_specs["mine"] = dataclasses.replace(
    stock, model_cls=Derived, model_args={"small": args}
)
OTHERS = {
    "own_masks": OwnMasks,
    "own_forward": OwnForward,
    "no_masks": NoMasks,
}
for name, model_cls in OTHERS.items():
    _extra_train_specs[name] = dataclasses.replace(
        _extra_train_specs["mine"], model_cls=model_cls
    )
_extra_train_specs["own_parallelize"] = dataclasses.replace(
    _extra_train_specs["mine"], parallelize_fn=parallelize
)
