# SPDX-License-Identifier: BSD-3-Clause
"""Recipes small enough for CPU ranks: torchtitan's debug models with fewer layers, on packed documents.

Without CAD they attend as a dense softmax in the precision of the job, where torchtitan's own varlen attention casts to
bfloat16.
"""

import random
from dataclasses import dataclass
from importlib import import_module

import torch
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import Configurable
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

from tests.lib.texts import text_dataset
from torchtitan_cad.recipes import cad

RECIPES = ("llama3", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss")


class DenseAttention(VarlenAttention):
    """torchtitan's varlen attention as a softmax over a dense mask, in the precision of its arguments."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def forward(
        self,
        q_BLNH,
        k_BLNH,
        v_BLNH,
        *,
        attention_masks,
        scale=None,
        out_transform=None,
        **_,
    ):
        rows, tokens, heads, head_dim = q_BLNH.shape
        starts = torch.zeros(rows * tokens, dtype=torch.int64)
        starts[attention_masks.cu_seq_q[:-1].long()] = 1
        document = starts.cumsum(0).view(rows, 1, tokens)
        place = torch.arange(tokens)
        distance = place[:, None] - place[None, :]
        mask = (document.transpose(1, 2) == document) & (distance >= 0)
        if self.window_size[0] >= 0:
            mask &= distance <= self.window_size[0]
        k, v = (
            x.repeat_interleave(heads // x.shape[2], dim=2) for x in (k_BLNH, v_BLNH)
        )
        scores = torch.einsum("bqnh,bknh->bnqk", q_BLNH, k) * (scale or head_dim**-0.5)
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
        lse = scores.logsumexp(dim=-1)
        out = torch.einsum("bnqk,bknh->bqnh", (scores - lse.unsqueeze(-1)).exp(), v)
        return out if out_transform is None else out_transform(out, lse.transpose(1, 2))


# what it stands for, to the checks of recipes
DenseAttention.forward.__module__ = VarlenAttention.__module__


def recipe(name):
    """Return the config of a small job: three steps, fp32, without CUDA graphs."""
    family, moe, _ = name.removesuffix("_deep").partition("_moe")
    module = import_module(f"torchtitan.models.{family}")
    registry = import_module(f"torchtitan.models.{family}.config_registry")
    config = getattr(registry, f"{family}_debugmodel")()
    flavor = f"debugmodel{moe}"
    config.model_spec = module.model_registry(flavor, attn_backend="varlen")
    model = config.model_spec.model
    del model.layers[4 if name.endswith("_deep") else 2 :]
    for _, inner, parent, key in model.traverse(VarlenAttention.Config):
        setattr(parent, key, DenseAttention.Config(window_size=inner.window_size))
    _shrink_experts(model)
    config.optimizer = default_adamw(lr=8e-4, eps=1e-5)
    config.dataloader.dataset = "packed_documents"
    config.validator.dataloader.dataset = "packed_documents"
    config.activation_checkpoint = None
    training = config.training
    training.local_batch_size = 2
    training.seq_len = 128
    training.steps = 3
    training.mixed_precision_param = "float32"
    training.disable_cuda_graphs = True
    config.debug.seed = 0
    config.debug.enable_structured_logging = False
    config.parallelism.pipeline_parallel_schedule = "1F1B"
    return config


def _shrink_experts(model):
    """Leave four small experts a layer, of which a token passes two."""
    for _, part, _, _ in model.traverse(Configurable.Config, recurse=True):
        for key, value in {
            "num_experts": 4,
            "top_k": 2,
            "num_expert_groups": None,
            "num_limited_groups": None,
        }.items():
            if hasattr(part, key):
                setattr(part, key, value)
        if hasattr(part, "gate"):
            part.gate.out_features = 4
        if hasattr(part, "num_experts") and hasattr(part, "hidden_dim"):
            part.hidden_dim = 64


def with_cad(name):
    """Return the same job with CAD."""
    return cad(recipe(name), tolerance=0.02, min_shard=8)


def _load(path):
    rng = random.Random(0)
    lengths = [max(1, int(rng.lognormvariate(2.0, 1.2))) for _ in range(512)]
    return text_dataset(rng, lengths)


def compute_in_fp32():
    """Let experts compute in the precision of the job: they cast to bfloat16, whose rounding hides differences.

    Compiled experts cannot: torch 2.15 takes their products for bfloat16.
    """
    torch.Tensor.bfloat16 = lambda self: self  # type: ignore[method-assign]


def _keep_dtype(forward):
    """Let gpt_oss's experts return the dtype of their tokens, as others do; in fp32 stock torchtitan 0.3.0 stops."""

    def forward_in_dtype(self, x, counts):
        return forward(self, x, counts).type_as(x)

    return forward_in_dtype


GptOssGroupedExperts.forward = _keep_dtype(GptOssGroupedExperts.forward)
DATASETS["packed_documents"] = DatasetConfig(
    "packed_documents", _load, lambda sample: sample["text"]
)
