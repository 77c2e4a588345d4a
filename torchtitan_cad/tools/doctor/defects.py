# SPDX-License-Identifier: BSD-3-Clause
"""Defects of stock torchtitan 0.2.2 that a job without CAD would meet. ``patches/`` has a file for each."""

import dataclasses
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch.torch_version import TorchVersion
from torchtitan.distributed import ParallelDims

from torchtitan_cad.integration.torchtitan_v0_2.folders import resumed_from

HAS_STRICT_ATTENTION = HAS_STRICT_FSDP = TorchVersion(torch.__version__) >= "2.13"
"""torch refuses fewer key heads unless told of them, and parameters in two groups of FSDP2."""


@dataclasses.dataclass(frozen=True)
class Defect:
    """A defect and its patch.

    Attributes:
        patch: name of its file in ``patches/``, without suffix.
        source: file of torchtitan's that the patch changes.
        code: what is in that file once it is patched.
        symptom: what the job's user would see.
        is_met: tells of a job's config, model args and parallel dimensions whether it would meet the defect.
        level: FAIL if it ends the job.
    """

    patch: str
    source: str
    code: str
    symptom: str
    is_met: Callable[[Any, Any, ParallelDims], bool]
    level: Literal["note", "FAIL"] = "note"


def defects_met(config: Any, args: Any, dims: ParallelDims) -> list[Defect]:
    """List the defects that a job without CAD, or with ``cad.shadow``, would meet with the installed packages.

    ``config`` is valid, ``args`` are those of the flavor.
    """
    (folder,) = find_spec("torchtitan").submodule_search_locations  # type: ignore[union-attr, misc]
    met = (defect for defect in DEFECTS if defect.is_met(config, args, dims))
    return [
        defect
        for defect in met
        if defect.code not in Path(folder, defect.source).read_text()
    ]


def _starts_from_scratch(config: Any) -> bool:
    checkpoint = config.checkpoint
    return not (
        checkpoint.enable and (checkpoint.initial_load_path or resumed_from(config))
    )


def _shares_caches(config: Any) -> bool:
    # With ``cad.shadow`` ranks have keys of their own.
    return config.compile.enable and not getattr(config.parallelism, "cad", False)


def _has_router_bias(args: Any) -> bool:
    return getattr(getattr(args, "moe_args", None), "gate_bias", False)


def _shards_a_tie(args: Any, dims: ParallelDims) -> bool:
    # Under tensor parallelism each of both modules has a parameter of its own.
    return (
        getattr(args, "enable_weight_tying", False)
        and dims.fsdp_enabled
        and not dims.tp_enabled
    )


def _is_varlen(args: Any) -> bool:
    return getattr(args, "attn_type", None) == "varlen"


def _has_fewer_key_heads(args: Any) -> bool:
    return (getattr(args, "n_kv_heads", None) or args.n_heads) != args.n_heads


def _has_microbatches(config: Any) -> bool:
    return (
        config.training.local_batch_size
        > config.parallelism.pipeline_parallel_microbatch_size
    )


DEFECTS = (
    Defect(
        "pp_gradient_scale",
        "train.py",
        "param.grad.div_(",
        symptom="gradients under pipeline parallelism are not divided by the number of tokens",
        is_met=lambda config, args, dims: dims.pp_enabled,
    ),
    Defect(
        "ddp_gradient_scale",
        "train.py",
        "(loss * ddp_degree).backward()",
        symptom="gradients under DDP are divided by the number of ranks once too often",
        is_met=lambda config, args, dims: (
            dims.dp_replicate_enabled and not dims.fsdp_enabled
        ),
    ),
    Defect(
        "cp_validation_loss",
        "components/validate.py",
        'parallel_dims.get_mesh("loss")',
        symptom="context parallelism multiplies the validation loss, or stops validation",
        is_met=lambda config, args, dims: config.validation.enable and dims.cp_enabled,
    ),
    Defect(
        "compile_caches",
        "distributed/parallel_dims.py",
        "_key_compile_caches",
        symptom="a rank of tensor parallelism takes the compiled loss of another from the cache",
        is_met=lambda config, args, dims: _shares_caches(config) and dims.tp_enabled,
    ),
    Defect(
        "router_bias",
        "models/moe/moe.py",
        "self.gate.bias is not None",
        symptom="biases of routers are never initialised, and may begin as NaN",
        is_met=lambda config, args, dims: (
            _has_router_bias(args) and _starts_from_scratch(config)
        ),
    ),
    Defect(
        "tied_embeddings",
        "models/llama4/infra/parallelize.py",
        "is_tied",
        symptom="FSDP2 of this torch refuses tied embeddings, which are sharded apart",
        is_met=lambda config, args, dims: HAS_STRICT_FSDP and _shards_a_tie(args, dims),
        level="FAIL",
    ),
    Defect(
        "varlen_pipeline",
        "models/attention.py",
        "_pack_cu_seqlens",
        symptom="microbatches of a pipeline get the document boundaries of others",
        is_met=lambda config, args, dims: (
            _is_varlen(args) and dims.pp_enabled and _has_microbatches(config)
        ),
    ),
    Defect(
        "varlen_gqa",
        "models/attention.py",
        "_HAS_ENABLE_GQA",
        symptom="varlen attention of this torch refuses fewer key heads than query heads",
        is_met=lambda config, args, dims: (
            HAS_STRICT_ATTENTION and _is_varlen(args) and _has_fewer_key_heads(args)
        ),
        level="FAIL",
    ),
)
