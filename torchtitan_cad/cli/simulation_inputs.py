"""Inputs of ``simulate`` and ``advise``: a job's numbers, those of the command line, and defaults."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from torchtitan_cad.cli.files import read_bytes
from torchtitan_cad.planning import Profile
from torchtitan_cad.planning.text import parse_json

if TYPE_CHECKING:
    from torchtitan_cad.integration.titan022.commands.simulated_job import SimulatedJob
    from torchtitan_cad.simulation import Cluster, Documents, Model, Rates, Settings

TOKENS_PER_RANK = 32_768
"""Of one microbatch, where no job says so."""

OF_TRAINING = ("dtype_bytes", "checkpointing")
"""Fields of a model that a job sets in other tables than that of the model; they stay the job's with --model."""

Inputs = tuple["Model", "Cluster", "Documents", "Settings", "Rates"]


@dataclasses.dataclass(frozen=True)
class Options:
    """Options that replace the job's numbers, or stand for a job."""

    model: str | None = None
    """llama-8b or llama-34b."""
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    """Width of the gated MLP."""
    vocabulary: int | None = None
    dtype_bytes: int | None = None
    checkpointing: Literal["none", "selective", "linear", "full"] | None = None
    """Activation checkpointing: of nothing, every second matrix product, all but core attention, or whole layers.
    Without a job, every system takes its best."""
    ranks: int | None = None
    """GPUs."""
    ranks_per_node: int | None = None
    tp: int | None = None
    pp: int | None = None
    """Pipeline ranks; without a job, every system takes its best."""
    cp: int | None = None
    """Ranks that share a row; without a job, as many as rows need."""
    fsdp: bool | None = None
    """Parameters are sharded as by FSDP2 (True), or the optimizer's state alone (False)."""
    net: float | None = None
    """Bytes per second of a GPU between nodes."""
    node: float | None = None
    """Bytes per second of a GPU inside a node."""
    latency: float | None = None
    """Seconds of one exchange without bytes."""
    memory: float | None = None
    """Bytes of a GPU."""
    linear_flops: float | None = None
    """Operations per second of matrix products."""
    linear_seconds: float | None = None
    """Measured seconds per token of one layer's products, forward, on one TP rank; instead of --linear-flops."""
    attention_flops: float | None = None
    """Operations per second of attention forward."""
    backward_flops: float | None = None
    """Operations per second of attention backward."""
    memory_bandwidth: float | None = None
    """Bytes per second of a GPU's memory, for norms, rotary embedding, activation and loss."""
    seconds_per_step: float | None = None
    """Seconds of a step that do not grow with its tokens, such as the optimizer's."""
    profile: Path | None = None
    """Times of attention measured by `torchtitan-cad profile`; instead of the two rates."""
    documents: str | None = None
    """JSON list of lengths in tokens (lengths.json, or as in a job histogram:lengths.json), or a distribution:
    lognormal:median=4096,sigma=1.5,max=65536; pretrain:scale=4,long=0.5,max=524288; uniform:min=128,max=65536;
    fixed:length=4096."""
    row_tokens: int | None = None
    """Tokens of a row, which cuts longer documents."""
    tokens_per_rank: int | None = None
    """Tokens of a data- and context-parallel rank in a microbatch."""
    microbatches: int | None = None
    """Of a step, with --tokens-per-rank; systems may divide the same step otherwise."""
    batches: int = 10
    """Steps to simulate."""
    seed: int = 0
    tolerance: float | Literal["auto"] | None = None
    """Imbalance that plans may leave; auto: of every plan the one by which a layer takes the least time."""
    backward: Literal["resend", "keep"] | None = None
    """Queries, keys and values travel again for backward, or servers keep what they received."""
    placement: Literal["loader", "balanced", "auto"] | None = None
    """Ranks hold what their loaders gave them, or tokens are dealt anew."""
    nano_batches: Literal[1, 2] | None = None
    """Halves of a microbatch that take turns; by default the better of 1 and 2."""
    tp_overlap: bool = False
    """Let ping-pong hide TP's collectives, too."""


def read_inputs(
    job: Path | None, overrides: tuple[str, ...], options: Options
) -> tuple[Inputs, list[str], SimulatedJob | None]:
    """Return the inputs of the simulation, a line for every number that was assumed, and the job if there is one."""
    from torchtitan_cad.simulation import MODELS, SOURCES, Cluster, Documents, Model, Rates, Settings, named_lengths
    from torchtitan_cad.simulation.inputs import CHECKPOINTING, with_tolerance
    from torchtitan_cad.simulation.lengths import DEFAULT

    given = {key: value for key, value in dataclasses.asdict(options).items() if value is not None}
    model_keys = [field.name for field in dataclasses.fields(Model) if field.name in given]
    settings, profile = Settings(), options.profile
    notes: list[str] = []
    titan: SimulatedJob | None = None
    if options.model is not None and options.model not in MODELS:
        raise ValueError(f"--model {options.model}: choose one of {', '.join(MODELS)}, or give its numbers")
    if job is not None:
        titan = _read_job(job, overrides, options.ranks)
        base = {field.name: getattr(titan.model, field.name) for field in dataclasses.fields(Model)}
        cluster_base: dict[str, Any] = {
            key: getattr(titan, key) for key in ("ranks", "tp", "pp", "cp", "fsdp", "replicas")
        }
        if titan.ranks_per_node is not None:
            cluster_base["ranks_per_node"] = titan.ranks_per_node
        settings, profile = titan.settings, options.profile or (Path(titan.profile) if titan.profile else None)
        notes += titan.notes if options.documents is None else [n for n in titan.notes if not n.startswith("documents")]
        row, step, lengths = titan.row_tokens, titan.step_tokens, titan.lengths
    else:
        if options.ranks is None:
            raise ValueError("--ranks: set the number of GPUs, or name a job's TOML file")
        base = {}
        cluster_base, row, step, lengths = {"ranks": options.ranks}, None, None, None
    if options.model is not None:
        base = dataclasses.asdict(MODELS[options.model]) | {key: base[key] for key in OF_TRAINING if key in base}
    missing = [f.name for f in dataclasses.fields(Model) if f.default is dataclasses.MISSING and f.name not in base]
    missing = [name for name in missing if name not in given]
    if missing:
        raise ValueError(f"--{missing[0].replace('_', '-')}: set it, or --model, or name a job's TOML file")
    model = Model(**{**base, **{key: given[key] for key in model_keys}})
    for field in dataclasses.fields(Cluster):
        if field.name in given:
            cluster_base[field.name] = given[field.name]
    cluster = Cluster(**cluster_base)
    rate_keys = [field.name for field in dataclasses.fields(Rates) if field.name in given and field.name != "profile"]
    rates = Rates(profile=Profile.read(profile) if profile else None, **{key: given[key] for key in rate_keys})
    if options.tolerance is not None:
        settings = with_tolerance(settings, options.tolerance)
    if options.placement is not None:
        settings = dataclasses.replace(settings, placement="loader" if options.placement == "loader" else "balanced")
    settings = dataclasses.replace(
        settings,
        nano_batches=options.nano_batches,
        checkpointing=CHECKPOINTING if job is None and options.checkpointing is None else (),
        tp_overlap=options.tp_overlap,
        backward=options.backward or settings.backward,
    )
    if options.tokens_per_rank is not None or options.microbatches is not None or step is None:
        tokens = options.tokens_per_rank or TOKENS_PER_RANK
        step = tokens * (options.microbatches or 1) * (cluster.ranks // (cluster.tp * (cluster.pp or 1)))
        row = row if row is not None else tokens
    if options.documents is not None:
        lengths = _lengths(options.documents)
        notes.append(
            f"documents: {options.documents}, {len(lengths):,} lengths of {lengths.mean():,.0f} tokens on average, "
            f"{lengths.max():,} at most; what is over a row begins the next"
        )
    elif lengths is None:
        lengths = named_lengths(DEFAULT)
        notes.append(f"documents: {DEFAULT} (default)")
    documents = Documents(lengths, options.row_tokens or row or TOKENS_PER_RANK, step, options.batches, options.seed)
    unset = [key for key in SOURCES if hasattr(rates, key) and key not in given]
    if rates.linear_seconds is not None:
        unset = [key for key in unset if key != "linear_flops"]
    if rates.profile is not None:
        unset = [key for key in unset if key not in ("attention_flops", "backward_flops")]
        notes.append(f"attention: measured on {rates.profile.device} with kernel {rates.profile.kernel}")
    for key in (*unset, *(key for key in ("net", "node", "latency", "memory") if key not in given)):
        value = getattr(rates if hasattr(rates, key) else cluster, key)
        notes.append(f"{key}: {value:g} (default): {SOURCES[key]}")
    if model.dtype_bytes != 2:
        notes.append(f"rates: those of bf16, although the model computes in elements of {model.dtype_bytes} bytes")
    return (model, cluster, documents, settings, rates), notes, titan


def described(inputs: Inputs) -> dict[str, Any]:
    """Turn the inputs into values that JSON can hold."""
    model, cluster, documents, settings, rates = inputs
    lengths = documents.lengths
    drawn = {key: getattr(documents, key) for key in ("row_tokens", "step_tokens", "batches", "seed")}
    named = {"median": float(np.median(lengths)), "mean": float(lengths.mean()), "longest": int(lengths.max())}
    numbers = {key: value for key, value in dataclasses.asdict(rates).items() if key != "profile"}
    return {
        "model": dataclasses.asdict(model),
        "cluster": dataclasses.asdict(cluster),
        "documents": {**drawn, "lengths": named},
        "settings": dataclasses.asdict(settings),
        "rates": {**numbers, "profile": rates.profile.fingerprint() if rates.profile else None},
    }


def _read_job(job: Path, overrides: tuple[str, ...], ranks: int | None) -> SimulatedJob:
    if not job.is_file():
        raise ValueError(f"{job}: there is no such file")
    from torchtitan_cad.integration.titan022.cpu import enable_cpu

    enable_cpu()
    # torchtitan must not be imported before enable_cpu().
    from torchtitan_cad.integration.titan022.commands.simulated_job import read_simulated_job

    return read_simulated_job([f"--job.config_file={job}", *overrides], ranks)


def _lengths(spec: str) -> np.ndarray:
    from torchtitan_cad.simulation import named_lengths

    path = Path(spec.removeprefix("histogram:"))
    if path.suffix != ".json" and not path.is_file():
        return named_lengths(spec)
    if not path.is_file():
        raise ValueError(f"--documents {path}: there is no such file")
    try:
        values = parse_json(read_bytes(path).decode())
    except ValueError as error:
        raise ValueError(f"--documents {path} is not JSON: {error}") from error
    if not isinstance(values, list) or not values:
        raise ValueError(f"--documents {path}: write a JSON list of lengths in tokens, one or more")
    wrong = [value for value in values if type(value) is not int or not 0 < value < 2**31]
    if wrong:
        raise ValueError(
            f"--documents {path}: {str(wrong[0])[:40]!r} is no length; write positive whole numbers of tokens"
        )
    return np.array(values, dtype=np.int64)
