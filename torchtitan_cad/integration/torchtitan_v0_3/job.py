# SPDX-License-Identifier: BSD-3-Clause
"""Reads a ``Job`` from torchtitan 0.3.0's config."""

import math
from typing import Any, Literal

import torch
import torch.distributed as dist
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.deepseek_v3.model import Attention as LatentAttention
from torchtitan.trainer import Trainer

from torchtitan_cad.integration.config import Cad
from torchtitan_cad.integration.job import Job
from torchtitan_cad.integration.loading.documents import DocumentRule
from torchtitan_cad.integration.topology import Topology
from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.planning.model.kind import AttentionKind

KindName = Literal["full", "window"]


def read_job(config: Any, device: torch.device) -> Job:
    """Return the job of a config with ``cad`` in this process, whose default process group is there."""
    cad: Cad = config.cad
    training = config.training
    topology = Topology.from_job(config.parallelism, dist.get_world_size())
    dtype = TORCH_DTYPE_MAP[training.mixed_precision_param]
    model = config.model_spec.model
    microbatches = microbatches_of(config)
    batches = max(
        1, training.global_batch_size // (training.local_batch_size * topology.dp)
    )
    return Job(
        cad=cad.deterministic() if config.debug.deterministic else cad,
        topology=topology,
        kinds=recipe_kinds(config, topology.tp),
        dtype=dtype,
        experts_per_token=max(
            (layer.moe.router.top_k for layer in model.layers if layer.moe is not None),
            default=0,
        ),
        device=device,
        documents=DocumentRule(by_positions=True),
        row_tokens=training.seq_len,
        # The loader gives one microbatch at a time, and a step has those of all its batches.
        rows=training.local_batch_size // microbatches,
        microbatches=1,
        accumulation=batches * microbatches,
        checkpoints=config.checkpoint.enable,
        deterministic=config.debug.deterministic,
        start_timeout_s=config.comm.init_timeout_seconds,
        step_timeout_s=config.comm.train_timeout_seconds,
    )


def microbatches_of(config: Trainer.Config) -> int:
    """Count the microbatches that a pipeline makes of a batch; 1 without one."""
    parallelism = config.parallelism
    if parallelism.pipeline_parallel_degree == 1:
        return 1
    return (
        config.training.local_batch_size
        // parallelism.pipeline_parallel_microbatch_size
    )


def recipe_kinds(config: Trainer.Config, tp: int) -> tuple[AttentionKind, ...]:
    """Return the kinds of a model's attention in one of ``tp`` ranks."""
    model = config.model_spec.model
    seq_len = config.training.seq_len
    dtype = TORCH_DTYPE_MAP[config.training.mixed_precision_param]
    layers: dict[KindName, list[Any]] = {"full": [], "window": []}
    for layer in model.layers:
        layers[layer_kind(layer.attention, seq_len)].append(layer.attention)
    kinds = []
    for name, attentions in layers.items():
        if attentions:
            attention = attentions[0]
            shape = AttentionShape(
                num_heads=attention.n_heads // tp,
                num_kv_heads=key_heads(attention) // tp,
                head_dim=_head_dim(attention),
                dtype_bytes=dtype.itemsize,
                value_dim=getattr(attention, "v_head_dim", None),
                shared_dim=getattr(attention, "qk_rope_head_dim", 0),
                window=attention.sliding_window_size if name == "window" else None,
            )
            scale = score_scale(attention)
            kinds.append(AttentionKind(name, len(attentions), shape, scale=scale))
    return tuple(kinds)


def layer_kind(attention: Any, seq_len: int) -> KindName:
    """Name the kind of attention of a layer, on rows of ``seq_len`` tokens."""
    window = getattr(attention, "sliding_window_size", None)
    return "full" if window is None or seq_len <= window else "window"


def key_heads(attention: Any) -> int:
    """Return a layer's heads of keys and values, of which its query heads are a multiple."""
    return getattr(attention, "n_kv_heads", None) or attention.n_heads


def score_scale(attention: Any) -> float | None:
    """Return the factor on a layer's scores, as its module computes it; None: 1 / sqrt(head_dim)."""
    rope = attention.rope
    if (
        isinstance(attention, GQAttention.Config)
        or rope.scaling != "yarn"
        or rope.rope_factor <= 1.0
    ):
        return None
    mscale = 0.1 * getattr(attention, "mscale", 1.0) * math.log(rope.rope_factor) + 1.0
    return _head_dim(attention) ** -0.5 * mscale * mscale


def _head_dim(attention: Any) -> int:
    if isinstance(attention, LatentAttention.Config):
        return attention.qk_nope_head_dim + attention.qk_rope_head_dim
    return attention.head_dim or attention.dim // attention.n_heads
