# SPDX-License-Identifier: BSD-3-Clause
"""Options of ``simulate``, and the inputs that they and a job make: the job's numbers, those of options, defaults."""

from __future__ import annotations

import dataclasses
import os
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import tyro

from torchtitan_cad.integration.report.steps_file import DOCUMENTS_NAME
from torchtitan_cad.planning.files import read_json
from torchtitan_cad.planning.keeping import Checkpointing
from torchtitan_cad.planning.model.layout import MAX_RANKS, MAX_TOKENS
from torchtitan_cad.planning.text import is_integer, printable
from torchtitan_cad.tools.recorded_documents import (
    RecordedDocuments,
    find_record,
    read_record,
)
from torchtitan_cad.tools.shared import check_job
from torchtitan_cad.tools.simulation.batches import (
    CORPORA,
    DEFAULT,
    named_lengths,
    read_corpus,
)
from torchtitan_cad.tools.simulation.inputs import (
    MANY_RANKS,
    MODELS,
    OPEN,
    SOURCES,
    Cluster,
    Configuration,
    Documents,
    Inputs,
    Model,
    Rates,
)

if TYPE_CHECKING:
    from torchtitan_cad.tools.simulated_job import SimulatedJob

Batch = list[list[int]]
"""Rows, of whose documents the lengths in tokens."""
BATCHES = 10
FEWEST_BATCHES = 2
"""steps that are simulated by default: of up to ``MANY_RANKS``, and of many more."""
TOKENS_PER_RANK = 32_768
"""tokens: one rank's in a microbatch where no job says so."""
LIMITS: dict[str, tuple[float, float]] = {
    "ranks": (1, MAX_RANKS),
    "batches": (1, 1000),
    "seed": (0, 2**62),
    "latency": (0, 1),
    "tolerance": (0, 1e30),
    "server_speed": (1e-3, 1e3),
}
"""Least and most of numbers; of other whole ones 1 and ``MAX_TOKENS``, of others ``RATES``."""
RATES = (1e5, 1e30)
"""Of rates and sizes: a value below lacks a power of ten."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Numbers that replace the job's, or stand for a job; those of None are left out."""

    model: str | None = None
    """llama-8b or llama-34b."""
    documents: str | None = None
    """JSON list of lengths in tokens (lengths.json, or as in a job histogram:lengths.json), a corpus: codealpaca, pypi,
    prolong-64k, prolong-512k; or a distribution: lognormal:median=4096,sigma=1.5,max=65536; uniform:min=128,max=65536;
    fixed:length=4096. Or batches to take as they are: a JSON list of rows, each a list of lengths, or a list of such
    lists; or the dump folder of a job with cad.shadow, for its last recorded steps."""
    row_tokens: int | None = None
    """Tokens of a row, which cuts longer documents."""
    tokens_per_rank: int | None = None
    """Tokens of a data- and context-parallel rank in a microbatch."""
    microbatches: int | None = None
    """Microbatches of a step, with --tokens-per-rank; systems may divide the same step otherwise."""
    batches: int | None = None
    """Steps to simulate; by default 10, of more than 256 GPUs (over TP) fewer, each of which has more documents."""
    seed: int = 0
    """Seed of the documents that are drawn."""
    layers: int | None = None
    """Layers."""
    hidden: int | None = None
    """Width of the hidden state."""
    heads: int | None = None
    """Query heads."""
    kv_heads: int | None = None
    """Key heads."""
    head_dim: int | None = None
    """Elements per head."""
    ffn: int | None = None
    """Width of the gated MLP, or of the experts that a token passes through."""
    vocabulary: int | None = None
    """Tokens of the vocabulary."""
    dtype_bytes: int | None = None
    """Bytes of an element, by default 2."""
    ranks: int | None = None
    """GPUs."""
    ranks_per_node: int | None = None
    """GPUs of a node, by default 8."""
    tp: int | None = None
    """Tensor-parallel ranks."""
    net: float | None = None
    """Bytes per second of a GPU between nodes, by default 40e9."""
    node: float | None = None
    """Bytes per second of a GPU inside a node, by default 350e9."""
    latency: float | None = None
    """Seconds of one exchange without bytes, by default 20e-6."""
    memory: float | None = None
    """Bytes of a GPU that a job can fill, by default 76.5e9."""
    servers: int | None = None
    """Attention servers that join the job (cad.servers), by default none; CAD is simulated with and without them."""
    server_speed: float | None = None
    """Speed of a server's attention, of a GPU's, by default 1."""
    server_net: float | None = None
    """Bytes per second of a server's link, by default 50e9."""
    fsdp: bool | None = None
    """Parameters are sharded as by FSDP2 (True), or the optimizer's state alone (False)."""
    linear_flops: float | None = None
    """Operations per second of matrix products, by default 640e12."""
    attention_flops: float | None = None
    """Operations per second of attention forward, by default 340e12."""
    backward_flops: float | None = None
    """Operations per second of attention backward, which has 2.5 times those of its forward, by default 340e12."""
    memory_bandwidth: float | None = None
    """Bytes per second of a GPU's memory, by default 2.7e12. Norms, rotary embedding, activation, loss wait for it."""
    peak_flops: float | None = None
    """Operations per second by which mfu is counted, by default 989e12."""
    pp: int | None = None
    """Pipeline ranks; without a job, every system takes its best."""
    cp: int | None = None
    """Ranks that share a row; without a job, as many as rows need."""
    checkpointing: Checkpointing | None = None
    """Activation checkpointing: of nothing, every second matrix product, all but core attention, or whole layers.
    Without a job, every system takes its best."""
    nano_batches: Literal[1, 2] | None = None
    """Halves of a microbatch that take turns; by default the better of 1 and 2."""
    tolerance: float | Literal["auto"] | None = None
    """Imbalance that plans may leave; auto: of every plan the one by which a layer takes the least time."""
    backward: Literal["auto", "resend", "keep"] | None = None
    """Queries, keys and values travel again for backward, or servers keep what they received; auto: where the memory
    has room for it."""
    placement: Literal["loader", "balanced"] | None = None
    """Ranks hold what their loaders gave them, or tokens are distributed anew."""


CommandOptions = Annotated[Options, tyro.conf.arg(name="")]
"""Options as a command's own, without a heading of theirs in its help."""


def read_inputs(
    job: Path | None, overrides: tuple[str, ...], options: Options
) -> tuple[Inputs, list[str], SimulatedJob | None]:
    """Return the inputs of the simulation, a line for every number that was assumed, and the job if there is one."""
    chosen = {key: value for key, value in vars(options).items() if value is not None}
    for key, value in chosen.items():
        _check(key, value)
    record = _record(options)
    if record is not None:
        chosen.setdefault("ranks", record.ranks)
    if job is None and "ranks" not in chosen:
        raise ValueError("--ranks: set the number of GPUs, or name a job's TOML file")
    titan = None if job is None else _read_job(job, overrides, chosen.get("ranks"))
    base = titan.inputs if titan else None
    notes = list(titan.notes) if titan else []
    if options.documents is not None:
        notes = [note for note in notes if not note.startswith("documents")]
    # the microbatches of tokens, which systems divide into others
    fields = {key: value for key, value in chosen.items() if key != "microbatches"}
    model = _model(fields, base.model if base else None)
    cluster = _made(Cluster, fields, base.cluster if base else None)
    rates = _made(Rates, fields)
    configuration, open_fields = _configuration(fields, base, record)
    given_batches = record.batches if record else []
    documents = _documents(
        options, given_batches, base, cluster=cluster, pp=configuration.pp, notes=notes
    )
    notes += _assumed(chosen, model, cluster, rates=rates)
    inputs = Inputs(model, cluster, documents, configuration, rates, open=open_fields)
    return inputs, notes, titan


def _check(option: str, value: Any) -> None:
    """Raise ValueError for a number that an option cannot have."""
    if isinstance(value, str | bool):
        return
    is_whole = isinstance(value, int)
    usual = (1, MAX_TOKENS) if is_whole else RATES
    least, most = LIMITS.get(option, usual)
    if not least <= value <= most:
        kind = "whole number" if is_whole else "number"
        raise ValueError(
            f"{_flag(option)} {value}: set a {kind}, at least {least:g}, at most {most:.10g}"
        )


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _configuration(
    chosen: dict[str, Any], base: Inputs | None, record: RecordedDocuments | None
) -> tuple[Configuration, frozenset[str]]:
    """Return the configuration, and the fields of it that nobody has chosen."""
    asked = base.configuration if base else Configuration()
    configuration = _made(Configuration, chosen, asked)
    open_fields = (base.open if base else OPEN) - chosen.keys()
    if record is None:
        return configuration, open_fields
    microbatches = record.microbatches
    configuration = dataclasses.replace(configuration, microbatches=microbatches)
    # of a job with its record everything is known
    return configuration, frozenset() if base else open_fields - {"microbatches"}


def _made(kind: type, chosen: dict[str, Any], base: Any = None) -> Any:
    """Make one of the inputs, or change its ``base``, by the options that stand for its fields."""
    names = {field.name for field in dataclasses.fields(kind)}
    own = {name: chosen[name] for name in names & chosen.keys()}
    return kind(**own) if base is None else dataclasses.replace(base, **own)


def _model(chosen: dict[str, Any], base: Model | None) -> Model:
    name = chosen.get("model")
    if name is not None:
        if name not in MODELS:
            raise ValueError(
                f"--model {name}: choose one of {', '.join(MODELS)}, or give its numbers"
            )
        dtype_bytes = base.dtype_bytes if base else Model.dtype_bytes
        base = dataclasses.replace(MODELS[name], dtype_bytes=dtype_bytes)
    for field in dataclasses.fields(Model) if base is None else ():
        if field.default is dataclasses.MISSING and field.name not in chosen:
            raise ValueError(
                f"{_flag(field.name)}: set it, or --model, or name a job's TOML file"
            )
    return _made(Model, chosen, base)


def _count(options: Options, cluster: Cluster, notes: list[str]) -> int:
    """Return how many steps are simulated."""
    if options.batches is not None:
        return options.batches
    of_many = BATCHES * MANY_RANKS * cluster.tp // cluster.ranks
    count = max(FEWEST_BATCHES, min(BATCHES, of_many))
    if count < BATCHES:
        notes.append(
            f"batches: {count} (default), as {cluster.ranks} GPUs take longer; the last line has the error"
        )
    return count


def _documents(
    options: Options,
    given_batches: list[Batch],
    base: Inputs | None,
    *,
    cluster: Cluster,
    pp: int,
    notes: list[str],
) -> Documents:
    """Return the documents that are given, of the option, of the job, or the default."""
    spec = options.documents
    lengths = base.documents.lengths if base else named_lengths(DEFAULT)
    if given_batches:
        given_batches = given_batches[-_count(options, cluster, notes) :]
    elif spec is not None:
        lengths, given_batches = _read_documents(spec)
    if given_batches:
        notes.append(
            f"documents: {printable(str(spec))}, {len(given_batches)} batches of rows, as they are"
        )
        try:
            return Documents.of_rows(given_batches)
        except ValueError as error:
            raise ValueError(f"--documents {spec}: {error}") from None
    if spec is not None:
        notes.append(
            f"documents: {printable(spec)}, {len(lengths):,} lengths of {lengths.mean():,.0f} tokens on average, "
            f"{lengths.max():,} at most; what is over a row begins the next"
        )
    elif base is None:
        notes.append(f"documents: {DEFAULT} (default)")
    if spec in CORPORA:
        notes.append(f"documents: {read_corpus(spec)['source']}")
    ranks, rest = divmod(cluster.ranks, cluster.tp * pp)
    if rest:
        raise ValueError(
            f"--ranks {cluster.ranks}: not a multiple of tp x pp = {cluster.tp * pp}; set a multiple of it"
        )
    row, step = _tokens(options, base, ranks)
    count = _count(options, cluster, notes)
    return Documents(lengths, row, step, count, options.seed)


def _tokens(options: Options, base: Inputs | None, ranks: int) -> tuple[int, int]:
    """Return the tokens of a row, and of a step over this many data- and context-parallel ranks."""
    if base is None:
        row = options.tokens_per_rank or TOKENS_PER_RANK
        step = row * (options.microbatches or 1) * ranks
    else:
        row = base.documents.row_tokens
        step = base.documents.step_tokens
        if options.tokens_per_rank or options.microbatches:
            microbatches = base.configuration.microbatches
            of_rank = options.tokens_per_rank or step // (microbatches * ranks)
            step = of_rank * (options.microbatches or microbatches) * ranks
    row = options.row_tokens or row
    if step % row:
        raise ValueError(
            f"--row-tokens {row}: set a divisor of the {step} tokens of a step, or other --tokens-per-rank"
        )
    return row, step


def _record(options: Options) -> RecordedDocuments | None:
    """Return the recorded steps that --documents names, as many as may be simulated; None if it names others."""
    if options.documents is None:
        return None
    path = find_record(Path(options.documents))
    if path is None:
        return None
    try:
        return read_record(path, options.batches or BATCHES)
    except ValueError as error:
        raise ValueError(f"--documents {error}") from None


def _assumed(
    chosen: dict[str, Any], model: Model, cluster: Cluster, rates: Rates
) -> list[str]:
    """Write a line for every number that nobody gave, with its source."""
    numbers = vars(rates) | vars(cluster)
    notes = [
        f"{key}: {numbers[key]:g} (default): {source}"
        for key, source in SOURCES.items()
        if key not in chosen
    ]
    if model.dtype_bytes != 2:
        notes.append(
            f"rates: those of bf16, although the model computes in elements of {model.dtype_bytes} bytes"
        )
    return notes


def _read_job(job: Path, overrides: tuple[str, ...], ranks: int | None) -> SimulatedJob:
    check_job(job)
    from torchtitan_cad.tools.simulated_job import read_simulated_job

    return read_simulated_job([f"--job.config_file={job}", *overrides], ranks)


def _read_documents(spec: str) -> tuple[np.ndarray, list[Batch]]:
    """Return int64 lengths in tokens, from a file or of a distribution, and the batches of rows that a file has."""
    path = Path(spec.removeprefix("histogram:"))
    if os.path.isdir(spec):
        raise ValueError(
            f"--documents {printable(spec)}: this folder has no {DOCUMENTS_NAME}; name the dump folder of a job with "
            "cad.shadow = true"
        )
    if path.suffix != ".json" and not os.path.exists(path):
        return named_lengths(spec), []
    try:
        values = read_json(path)
    except ValueError as error:
        raise ValueError(f"--documents {error}") from None
    lengths = values
    depth = 0
    while _are_lists(lengths):
        lengths = list(chain.from_iterable(lengths))
        depth += 1
    if not isinstance(lengths, list) or not lengths or depth > 2:
        raise ValueError(
            f"--documents {path}: write a JSON list of lengths in tokens, one or more"
        )
    for value in lengths:
        if not is_integer(value, 1, MAX_TOKENS):
            raise ValueError(
                f"--documents {path}: {str(value)[:40]!r} is no length; write positive whole numbers of tokens"
            )
    batches = [[], [values], values][depth]
    return np.array(lengths, dtype=np.int64), batches


def _are_lists(values: Any) -> bool:
    if not isinstance(values, list) or not values:
        return False
    return all(isinstance(value, list) for value in values)
