# SPDX-License-Identifier: BSD-3-Clause
"""A torchtitan job as the simulation sees it, and the keys by which it takes other settings."""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.protocols.train_spec import get_train_spec

from torchtitan_cad.demo.datasets import STDLIB_DATASET, read_sources
from torchtitan_cad.demo.lengths import parse_lengths
from torchtitan_cad.integration.config import Cad
from torchtitan_cad.integration.topology import TICK_SCHEDULES
from torchtitan_cad.integration.torchtitan_v0_2 import plugin
from torchtitan_cad.integration.torchtitan_v0_2.inputs import SYNTHETIC
from torchtitan_cad.integration.torchtitan_v0_2.job import cad_table
from torchtitan_cad.integration.torchtitan_v0_2.manager import quiet, read_config
from torchtitan_cad.integration.torchtitan_v0_2.model import update_without_cp
from torchtitan_cad.integration.torchtitan_v0_2.models import ADAPTERS, adapter_of
from torchtitan_cad.integration.torchtitan_v0_2.room import checkpointing_kind
from torchtitan_cad.planning.keeping import Checkpointing
from torchtitan_cad.tools.simulation.batches import DEFAULT, named_lengths
from torchtitan_cad.tools.simulation.inputs import (
    OPEN,
    Cluster,
    Configuration,
    Documents,
    Inputs,
    Model,
    Schedule,
)

RANKS = 64
"""Taken where neither the job nor the caller says how many there are."""
DRAWN = 5000
"""Documents drawn from a synthetic dataset."""
CHARACTERS_PER_TOKEN = 3.0
"""characters / token: of the demo's datasets with the tokenizer of `torchtitan-cad prepare` (2048 tokens)."""


@dataclasses.dataclass(frozen=True, eq=False)
class SimulatedJob:
    """Numbers of a job.

    Attributes:
        inputs: the job as it is written, but that systems may divide its step anew; a schedule that is not simulated
            counts as the nearer of the two that are.
        notes: what was assumed, and why, and what the simulation replaces.
    """

    inputs: Inputs
    notes: list[str]
    config: JobConfig

    def settings(self, choice: Configuration) -> dict[str, Any]:
        """Return the TOML keys that the job would have to change to take a choice, with values."""
        changes = choice.changes(self.inputs.configuration)
        wanted: dict[str, Any] = {"parallelism.cad": True}
        for name in ("nano_batches", "tolerance", "backward"):
            if name in changes:
                wanted[f"cad.{name}"] = changes[name]
        if "placement" in changes:
            is_balanced = choice.placement == "balanced"
            wanted["cad.placement"] = "auto" if is_balanced else choice.placement
        if "checkpointing" in changes:
            wanted |= _checkpointing_settings(choice.checkpointing)
        if "schedule" in changes:
            wanted["parallelism.pipeline_parallel_schedule"] = choice.schedule
        if changes.keys() & {"cp", "pp", "microbatches"}:
            wanted |= self._division_settings(choice)
        return {key: value for key, value in wanted.items() if self._get(key) != value}

    def _division_settings(self, choice: Configuration) -> dict[str, Any]:
        """Return the keys that divide a step as a choice does."""
        cluster = self.inputs.cluster
        documents = self.inputs.documents
        dp = cluster.ranks // (cluster.tp * choice.pp * choice.cp)
        rows = documents.step_tokens // documents.row_tokens
        rows_of_rank = rows // dp
        per_microbatch = rows_of_rank // choice.microbatches
        wanted: dict[str, Any] = {
            "parallelism.context_parallel_degree": choice.cp,
            "parallelism.pipeline_parallel_degree": choice.pp,
        }
        if choice.pp > 1:
            wanted["training.local_batch_size"] = rows_of_rank
            wanted["parallelism.pipeline_parallel_microbatch_size"] = per_microbatch
        else:
            wanted["training.local_batch_size"] = per_microbatch
        if choice.pp == 1 and choice.microbatches > 1:
            wanted["training.global_batch_size"] = rows
        if self.config.parallelism.data_parallel_shard_degree > 1:
            sharded = dp // cluster.replicas
            wanted["parallelism.data_parallel_shard_degree"] = sharded
        return wanted

    def _get(self, key: str) -> Any:
        table, name = key.split(".")
        return getattr(getattr(self.config, table), name)


def _checkpointing_settings(kind: Checkpointing) -> dict[str, Any]:
    """Return the keys for a kind of activation checkpointing."""
    if kind in ("linear", "full"):
        return {
            "activation_checkpoint.mode": "full",
            "cad.recompute_attention": kind == "full",
        }
    if kind == "selective":
        return {
            "activation_checkpoint.mode": "selective",
            "activation_checkpoint.selective_ac_option": "op",
        }
    return {"activation_checkpoint.mode": "none"}


def read_simulated_job(args: Sequence[str], ranks: int | None) -> SimulatedJob:
    """Return the numbers of a job, which is neither trained nor has to be able to: it may lack its tokenizer.

    ``args`` are as for `-m torchtitan.train`; ``ranks`` None: the job is to say. Raises ValueError for a file that
    cannot be read, or a job that CAD cannot run.
    """
    config = read_config(args)
    name = config.model.name
    parallelism = config.parallelism
    training = config.training
    cad = config.cad
    notes: list[str] = []
    degrees = parallelism.tensor_parallel_degree * parallelism.pipeline_parallel_degree
    degrees *= parallelism.context_parallel_degree
    if ranks is None:
        ranks = _ranks(config, degrees, notes)
    if adapter_of(name) is None:
        raise ValueError(
            f"model.name = {name!r}: set it to one of {', '.join(ADAPTERS)}, which cad knows"
        )
    plugin.check(config, ranks)
    dp = ranks // degrees
    replicas = parallelism.data_parallel_replicate_degree
    local = training.local_batch_size
    rows = max(training.global_batch_size, local * dp)
    cluster = Cluster(
        ranks,
        ranks_per_node=cad.ranks_per_node or Cluster.ranks_per_node,
        tp=parallelism.tensor_parallel_degree,
        fsdp=dp * parallelism.context_parallel_degree > replicas,
        replicas=replicas,
    )
    model = _model(config, notes)
    step_tokens = rows * training.seq_len
    documents = Documents(_lengths(config, notes), training.seq_len, step_tokens)
    configuration = _configuration(config, rows // (local * dp), notes)
    open_fields = OPEN - {"pp", "checkpointing"}
    inputs = Inputs(model, cluster, documents, configuration, open=open_fields)
    return SimulatedJob(inputs, notes, config)


def _configuration(
    config: JobConfig, accumulation: int, notes: list[str]
) -> Configuration:
    """Read the configuration of a job that accumulates the gradients of several local batches."""
    parallelism = config.parallelism
    cad = cad_table(config)
    checkpointing = config.activation_checkpoint
    pp = parallelism.pipeline_parallel_degree
    schedule = parallelism.pipeline_parallel_schedule
    mode = checkpointing.mode
    per_batch = (
        config.training.local_batch_size
        // parallelism.pipeline_parallel_microbatch_size
        if pp > 1
        else 1
    )
    kind = checkpointing_kind(config)
    simulated = "CAD1F1B" if schedule in TICK_SCHEDULES else "1F1B"
    if pp > 1 and schedule not in ("1F1B", "CAD1F1B"):
        notes.append(f"schedule: {schedule} is simulated as {simulated}")
    if kind == "selective" and (
        mode != "selective" or checkpointing.selective_ac_option != "op"
    ):
        notes.append(
            f"activation checkpointing: {mode} is simulated as selective with selective_ac_option = op"
        )
    if pp > 1 and accumulation > 1:
        notes.append(
            "gradient accumulation: simulated as one pipeline, without a bubble between its parts"
        )
    table = {field.name: getattr(cad, field.name) for field in dataclasses.fields(Cad)}
    if cad.placement == "auto":
        table["placement"] = "balanced"
    return Configuration(
        **table,
        pp=pp,
        cp=parallelism.context_parallel_degree,
        microbatches=accumulation * per_batch,
        checkpointing=kind,
        schedule=cast(Schedule, simulated),
    )


def _ranks(config: JobConfig, degrees: int, notes: list[str]) -> int:
    degrees *= config.parallelism.data_parallel_replicate_degree
    if (sharded := config.parallelism.data_parallel_shard_degree) > 0:
        return degrees * sharded
    ranks = -(-RANKS // max(1, degrees)) * degrees
    notes.append(
        f"ranks: {ranks}, as data_parallel_shard_degree = {sharded} leaves it open (--ranks)"
    )
    return ranks


def model_args(config: JobConfig) -> Any:
    """Return the arguments of the job's model, updated from its config as in training with CAD."""
    args: Any = copy.deepcopy(
        get_train_spec(config.model.name).model_args[config.model.flavor]
    )
    args.attn_type = "sdpa"  # CAD replaces what torchtitan may refuse
    update_without_cp(args.update_from_config, config)
    return args


def build_on_meta(config: JobConfig, args: Any) -> torch.nn.Module:
    """Build the job's model without memory for its parameters."""
    with torch.device("meta"):
        return get_train_spec(config.model.name).model_cls(args)


def _model(config: JobConfig, notes: list[str]) -> Model:
    """Read the model, whose layers count as the mean one in all but their kinds of attention."""
    name = config.model.name
    parallelism = config.parallelism
    adapter = adapter_of(name)
    assert adapter is not None, "the config has been checked"
    with quiet():
        args = model_args(config)
    parameters = build_on_meta(config, args).named_parameters()
    weights = {
        name: weight.numel() for name, weight in parameters if not name.endswith("bias")
    }
    shared = _width(args, weights, ".feed_forward.", ".shared_experts.")
    routed = _width(args, weights, ".experts.")
    active = 0
    ranks = 1.0
    if routed:
        active = routed * args.moe_args.top_k // args.moe_args.num_experts
        degree = parallelism.expert_parallel_degree
        if degree > 1:  # else TP divides experts, too
            ranks = (
                degree
                * parallelism.expert_tensor_parallel_degree
                / parallelism.tensor_parallel_degree
            )
        notes.append(
            "experts: all as busy; what expert parallelism exchanges is not simulated, and they cannot train in ticks"
        )
    kinds = adapter.kinds(
        args,
        config.training.seq_len,
        1,
        TORCH_DTYPE_MAP[config.training.mixed_precision_param].itemsize,
    )
    shape = kinds[0].shape
    return Model(
        layers=args.n_layers,
        hidden=args.dim,
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        ffn=shared + active,
        vocabulary=args.vocab_size,
        dtype_bytes=shape.dtype_bytes,
        shared_ffn=shared,
        idle_ffn=routed - active,
        expert_ranks=ranks,
        query_rank=getattr(args, "q_lora_rank", 0),
        key_rank=getattr(args, "kv_lora_rank", 0),
        attention=kinds,
    )


def _width(args: Any, weights: dict[str, int], *parts: str) -> int:
    """Return the width of the gated MLP that has as many parameters as the mean layer has in parts of these names."""
    count = sum(
        size for name, size in weights.items() if any(part in name for part in parts)
    )
    return round(count / (3 * args.dim * args.n_layers))


def _lengths(config: JobConfig, notes: list[str]) -> np.ndarray:
    training = config.training
    if config.cad.documents == "row":
        notes.append('documents: whole rows, as cad.documents = "row"')
        return np.array([training.seq_len])
    own = config.cad.documents == "positions"  # of a loader that is not read
    if training.dataset == SYNTHETIC and not own:
        drawn = parse_lengths(training.dataset_path)
        notes.append(f"documents: {training.dataset_path} (training.dataset_path)")
        lengths = [
            drawn.draw(i, np.random.default_rng((drawn.seed, i))) for i in range(DRAWN)
        ]
        return np.array(lengths, dtype=np.int64)
    if training.dataset == STDLIB_DATASET and not own:
        notes.append(
            f"documents: the dataset's files, {CHARACTERS_PER_TOKEN} characters a token (approximate)"
        )
        texts = read_sources(training.dataset_path)
        return np.array([1 + round(len(text) / CHARACTERS_PER_TOKEN) for text in texts])
    notes.append(
        f"documents: {DEFAULT} (default), as the lengths of training.dataset = {training.dataset!r} are not known "
        "without reading it (--documents)"
    )
    return named_lengths(DEFAULT)
