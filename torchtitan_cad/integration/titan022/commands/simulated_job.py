"""Reads the inputs of a simulation (``torchtitan_cad.simulation``) from a torchtitan job."""

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.protocols.train_spec import get_train_spec

from torchtitan_cad.demo.datasets import read_sources
from torchtitan_cad.demo.synthetic import parse_lengths
from torchtitan_cad.integration.titan022 import plugin
from torchtitan_cad.integration.titan022.checks import SUPPORTED_MODELS
from torchtitan_cad.integration.titan022.commands.reading import read_config
from torchtitan_cad.integration.titan022.inputs import SYNTHETIC
from torchtitan_cad.planning import PlannerConfig
from torchtitan_cad.simulation.inputs import Checkpointing, Cluster, Model, Settings
from torchtitan_cad.simulation.lengths import DEFAULT, named_lengths

RANKS = 64
"""Taken where neither the job nor the caller says how many there are."""

DRAWN = 5000
"""Documents drawn from a synthetic dataset."""

CHARACTERS_PER_TOKEN = 3.1
"""Of the standard library's sources with the tokenizer of `torchtitan-cad prepare` (2048 tokens)."""


@dataclasses.dataclass(frozen=True, eq=False)
class SimulatedJob:
    """Numbers of a job; ``notes`` say which of them were assumed, and why.

    Attributes:
        step_tokens: of one step over all ranks.
        lengths: int64 samples of the documents' lengths.
    """

    model: Model
    cluster: Cluster
    row_tokens: int
    step_tokens: int
    lengths: np.ndarray
    settings: Settings
    profile: str | None
    notes: tuple[str, ...]
    microbatches: int
    """Of a step, on every data-parallel rank."""
    config: JobConfig


def read_simulated_job(args: Sequence[str], ranks: int | None) -> SimulatedJob:
    """Return the numbers of a job, which is neither trained nor has to be able to: it may lack its tokenizer.

    Args:
        args: as for `-m torchtitan.train`, `--job.config_file` among them.
        ranks: GPUs; None if the job is to say.

    Raises:
        ValueError: a file that cannot be read, or a job that CAD cannot run; names key, value and remedy.
    """
    config, _ = read_config(args)
    name, parallelism = config.model.name, config.parallelism
    notes: list[str] = []
    if ranks is None:
        ranks = _ranks(config, notes)
    if name not in SUPPORTED_MODELS:
        raise ValueError(f"model.name = {name!r}: set it to one of {', '.join(SUPPORTED_MODELS)}, which cad knows")
    plugin.check(config, ranks)
    cad: Any = config.cad
    cluster = Cluster(
        ranks,
        ranks_per_node=cad.ranks_per_node or Cluster.ranks_per_node,
        tp=parallelism.tensor_parallel_degree,
        pp=parallelism.pipeline_parallel_degree,
        cp=parallelism.context_parallel_degree,
        fsdp=parallelism.data_parallel_shard_degree != 1,
        replicas=parallelism.data_parallel_replicate_degree,
    )
    dp = ranks // math.prod(
        getattr(parallelism, f"{kind}_parallel_degree") for kind in ("tensor", "pipeline", "context")
    )
    rows, local = config.training.global_batch_size, config.training.local_batch_size
    per_pass = local // parallelism.pipeline_parallel_microbatch_size if parallelism.pipeline_parallel_degree > 1 else 1
    return SimulatedJob(
        model=_model(config),
        cluster=cluster,
        row_tokens=config.training.seq_len,
        step_tokens=(rows if rows > 0 else local * dp) * config.training.seq_len,
        lengths=_lengths(config, notes),
        settings=Settings(
            _planner(cad, notes),
            auto_tolerance=cad.tolerance == "auto",
            node_aware=cad.ranks_per_node is not None,
            backward=cad.backward,
            placement="loader" if cad.placement == "loader" else "balanced",
            receive_buffer_gb=cad.receive_buffer_gb,
        ),
        profile=cad.profile,
        notes=tuple(notes),
        microbatches=per_pass * max(1, rows // (local * dp)),
        config=config,
    )


def _ranks(config: JobConfig, notes: list[str]) -> int:
    parallelism, sharded = config.parallelism, config.parallelism.data_parallel_shard_degree
    degrees = math.prod(
        (
            parallelism.data_parallel_replicate_degree,
            parallelism.tensor_parallel_degree,
            parallelism.pipeline_parallel_degree,
            parallelism.context_parallel_degree,
        )
    )
    if sharded > 0:
        return degrees * sharded
    ranks = -(-RANKS // max(1, degrees)) * degrees
    notes.append(f"ranks: {ranks}, as data_parallel_shard_degree = {sharded} leaves it open (--ranks)")
    return ranks


def _model(config: JobConfig) -> Model:
    spec = get_train_spec(config.model.name)
    args = copy.deepcopy(spec.model_args[config.model.flavor])
    if getattr(args, "moe_enabled", False):
        raise ValueError(f"model.flavor = {config.model.flavor!r} has experts: choose one without, or give numbers")
    args.attn_type = "sdpa"
    with torch.device("meta"):
        built = spec.model_cls(args)
    wide = next(p.shape[0] for name, p in built.named_parameters() if name.endswith("feed_forward.w1.weight"))
    mode, again = config.activation_checkpoint.mode, "full" if config.cad.recompute_attention else "linear"
    checkpointing = "none" if mode == "none" else again if mode == "full" else "selective"
    return Model(
        layers=args.n_layers,
        hidden=args.dim,
        heads=args.n_heads,
        kv_heads=getattr(args, "n_kv_heads", None) or args.n_heads,
        head_dim=getattr(args, "head_dim", None) or args.dim // args.n_heads,
        ffn=wide,
        vocabulary=args.vocab_size,
        dtype_bytes=TORCH_DTYPE_MAP[config.training.mixed_precision_param].itemsize,
        checkpointing=cast(Checkpointing, checkpointing),
    )


def _planner(cad: Any, notes: list[str]) -> PlannerConfig:
    """Without what holds for the job's own groups of ranks and nano-batches alone."""
    if cad.rank_speeds is not None:
        notes.append("not simulated: cad.rank_speeds")
    return dataclasses.replace(cad.planner_config(), rank_speeds=None)


def _lengths(config: JobConfig, notes: list[str]) -> np.ndarray:
    training = config.training
    if config.cad.documents == "row":
        notes.append('documents: whole rows, as cad.documents = "row"')
        return np.array([training.seq_len])
    if training.dataset == SYNTHETIC:
        drawn = parse_lengths(training.dataset_path)
        notes.append(f"documents: {training.dataset_path} (training.dataset_path)")
        lengths = [drawn.draw(i, np.random.default_rng((drawn.seed, i))) for i in range(DRAWN)]
        return np.array(lengths, dtype=np.int64)
    if training.dataset == "python_stdlib":
        notes.append(f"documents: the dataset's files, {CHARACTERS_PER_TOKEN} characters a token (approximate)")
        texts = read_sources(training.dataset_path) if training.dataset_path else read_sources()
        return np.array([1 + round(len(text) / CHARACTERS_PER_TOKEN) for text in texts])
    notes.append(
        f"documents: {DEFAULT} (default), as the lengths of training.dataset = {training.dataset!r} are not known "
        "without reading it (--documents)"
    )
    return named_lengths(DEFAULT)
