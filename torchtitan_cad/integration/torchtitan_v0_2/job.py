# SPDX-License-Identifier: BSD-3-Clause
"""Reads a ``Job`` from torchtitan 0.2.2's config."""

from typing import Any

import torch
import torch.distributed as dist
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.tools import utils

from torchtitan_cad.integration.config import Cad
from torchtitan_cad.integration.job import Job
from torchtitan_cad.integration.loading.documents import DocumentRule
from torchtitan_cad.integration.topology import Topology
from torchtitan_cad.integration.torchtitan_v0_2.models import adapter_of, key_heads
from torchtitan_cad.planning.model.kind import AttentionKind


def read_job(config: JobConfig, model_args: Any, eos_id: int | None) -> Job:
    """Return the job of this process, whose default process group is there.

    Raises ValueError for heads that cannot be divided over TP ranks, or a missing EOS.
    """
    parallelism = config.parallelism
    training = config.training
    topology = Topology.from_job(parallelism, dist.get_world_size())
    dtype = attention_dtype(config, topology)
    rows = training.local_batch_size
    steps = training.global_batch_size // (rows * topology.dp)
    return Job(
        cad=cad_table(config),
        topology=topology,
        kinds=attention_kinds(config, model_args, dtype),
        dtype=dtype,
        experts_per_token=model_args.moe_args.top_k
        if hasattr(model_args, "moe_args")
        else 0,
        device=torch.device(utils.device_type, utils.device_module.current_device()),
        documents=document_rule(config.cad, eos_id, model_args.vocab_size),
        row_tokens=training.seq_len,
        rows=rows,
        microbatches=1
        if topology.pp == 1
        else rows // parallelism.pipeline_parallel_microbatch_size,
        accumulation=max(1, steps),
        checkpoints=config.checkpoint.enable,
        deterministic=config.debug.deterministic,
        start_timeout_s=config.comm.init_timeout_seconds,
        step_timeout_s=config.comm.train_timeout_seconds,
    )


def cad_table(config: JobConfig) -> Cad:
    """Return the ``[cad]`` table, without what ``debug.deterministic`` forbids to measure."""
    return config.cad.deterministic() if config.debug.deterministic else config.cad


def attention_dtype(config: JobConfig, topology: Topology) -> torch.dtype:
    """Return the dtype of queries, keys and values.

    FSDP2 casts to ``training.mixed_precision_param``, and so does autocast, which torchtitan uses with neither TP nor a
    pipeline; else all is computed in ``training.dtype``.
    """
    shards = topology.dp // config.parallelism.data_parallel_replicate_degree
    has_fsdp = shards * topology.cp > 1
    training = config.training
    # autocast to fp32 switches itself off
    has_autocast = topology.tp == topology.pp == 1
    has_autocast = has_autocast and training.mixed_precision_param != "float32"
    casts = has_fsdp or has_autocast
    return TORCH_DTYPE_MAP[training.mixed_precision_param if casts else training.dtype]


def attention_kinds(
    job_config: JobConfig, model_args: Any, dtype: torch.dtype
) -> tuple[AttentionKind, ...]:
    """Return the kinds of the model's attention in a TP rank. Raises ValueError if TP does not divide the heads."""
    adapter = adapter_of(job_config.model.name)
    tp = job_config.parallelism.tensor_parallel_degree
    assert adapter is not None, "the config has been checked"
    heads = key_heads(model_args)
    if heads % tp:
        raise ValueError(
            f"parallelism.tensor_parallel_degree = {tp} does not divide the {heads} key heads of model.flavor = "
            f"{job_config.model.flavor!r}; set it to a divisor of {heads}"
        )
    return adapter.kinds(model_args, job_config.training.seq_len, tp, dtype.itemsize)


def document_rule(cad: Cad, eos_id: int | None, vocab_size: int) -> DocumentRule:
    """Return how documents are told apart, for a tokenizer with ``eos_id`` and a model of ``vocab_size`` tokens.

    Raises ValueError if no token ends them that should, or one that no batch can hold.
    """
    if cad.documents != "eos":
        return DocumentRule(by_positions=cad.documents == "positions")
    if cad.eos_id is not None and not 0 <= cad.eos_id < vocab_size:
        raise ValueError(
            f"cad.eos_id = {cad.eos_id} is no token: the model has {vocab_size}; set one of them"
        )
    end = eos_id if cad.eos_id is None else cad.eos_id
    if end is None:
        raise ValueError(
            "cad.documents = 'eos' needs a tokenizer with an EOS token; use one, set cad.eos_id to the token that ends "
            "documents, or cad.documents to 'row'"
        )
    return DocumentRule(end)
