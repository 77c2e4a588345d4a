# SPDX-License-Identifier: BSD-3-Clause
"""Inputs of ``simulate``: a job's numbers, those of the command line, and defaults."""

from __future__ import annotations

import dataclasses
import os
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import numpy as np
import tyro

from torchtitan_cad.integration.report.steps_file import DOCUMENTS_NAME
from torchtitan_cad.planning.files import read_json
from torchtitan_cad.planning.text import printable
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
    is_option,
)

if TYPE_CHECKING:
    from torchtitan_cad.tools.simulated_job import SimulatedJob

BATCHES = 10
FEWEST_BATCHES = 2
"""steps that are simulated by default: of up to ``MANY_RANKS``, and of many more."""
TOKENS_PER_RANK = 32_768
"""tokens: one rank's in a microbatch where no job says so."""


@dataclasses.dataclass(frozen=True)
class _Own:
    """Options that are no fields of the inputs."""

    model: str | None = None
    """llama-8b or llama-34b."""
    documents: str | None = None
    """JSON list of lengths in tokens (lengths.json, or as in a job histogram:lengths.json), a corpus: codealpaca, pypi,
    prolong-64k, prolong-512k; or a distribution: lognormal:median=4096,sigma=1.5,max=65536;
    pretrain:scale=4,long=0.5,max=524288; uniform:min=128,max=65536; fixed:length=4096. Or batches to take as they are:
    a JSON list of rows, each a list of lengths, or a list of such lists; or the dump folder of a job with cad.shadow,
    for its last recorded steps."""
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


def _options() -> type[_Own]:
    """Make the options that replace the job's numbers, or stand for a job: every described field, left out."""
    found: list[Any] = []
    for kind in (Model, Cluster, Rates, Configuration):
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if is_option(field):
                described = tyro.conf.arg(
                    help=field.metadata["help"], help_behavior_hint=""
                )
                option = Annotated[hints[field.name] | None, described]  # type: ignore[valid-type, name-defined]
                found.append((field.name, option, dataclasses.field(default=None)))
    return dataclasses.make_dataclass("Options", found, bases=(_Own,), frozen=True)


if TYPE_CHECKING:
    Options = _Own
else:
    Options = _options()
CommandOptions = Annotated[Options, tyro.conf.arg(name="")]
"""Options as a command's own, without a heading of theirs in its help."""


def read_inputs(
    job: Path | None, overrides: tuple[str, ...], options: Options
) -> tuple[Inputs, list[str], SimulatedJob | None]:
    """Return the inputs of the simulation, a line for every number that was assumed, and the job if there is one."""
    chosen = {key: value for key, value in vars(options).items() if value is not None}
    for option in ("row_tokens", "tokens_per_rank", "microbatches", "batches"):
        if chosen.get(option, 1) < 1:
            raise ValueError(
                f"{_flag(option)} {chosen[option]}: set a positive whole number"
            )
    record = _record(options)
    if record is not None:
        chosen.setdefault("ranks", record.ranks)
    if job is None and "ranks" not in chosen:
        raise ValueError("--ranks: set the number of GPUs, or name a job's TOML file")
    titan = None if job is None else _read_job(job, overrides, chosen.get("ranks"))
    notes = list(titan.notes) if titan else []
    if options.documents is not None:
        notes = [note for note in notes if not note.startswith("documents")]
    model = _model(options.model, chosen, titan)
    cluster = _made(Cluster, chosen, titan.cluster if titan else None)
    rates = _made(Rates, chosen)
    configuration, open_fields = _configuration(chosen, titan, record)
    documents = _documents(
        options, titan, record, cluster=cluster, pp=configuration.pp, notes=notes
    )
    notes += _assumed(chosen, model, cluster, rates=rates)
    inputs = Inputs(
        model=model,
        cluster=cluster,
        documents=documents,
        configuration=configuration,
        rates=rates,
        open=open_fields,
    )
    return inputs, notes, titan


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _configuration(
    chosen: dict[str, Any],
    titan: SimulatedJob | None,
    record: RecordedDocuments | None,
) -> tuple[Configuration, frozenset[str]]:
    """Return the configuration, and the fields of it that nobody has chosen."""
    base = titan.configuration if titan else Configuration()
    configuration = _made(Configuration, chosen, base)
    open_fields = OPEN - (chosen.keys() - {"microbatches"})
    if titan is not None:
        open_fields -= {"pp", "checkpointing"}
    if record is None:
        return configuration, open_fields
    configuration = dataclasses.replace(configuration, microbatches=record.microbatches)
    # of a job with its record everything is known
    return configuration, frozenset() if titan else open_fields - {"microbatches"}


def _made(kind: type, chosen: dict[str, Any], base: Any = None) -> Any:
    """Make one of the inputs, or change its ``base``, by the options that stand for its fields."""
    names = {field.name for field in dataclasses.fields(kind) if is_option(field)}
    own = {name: chosen[name] for name in names & chosen.keys()}
    return kind(**own) if base is None else dataclasses.replace(base, **own)


def _model(
    name: str | None, chosen: dict[str, Any], titan: SimulatedJob | None
) -> Model:
    base = titan.model if titan else None
    if name is not None:
        if name not in MODELS:
            raise ValueError(
                f"--model {name}: choose one of {', '.join(MODELS)}, or give its numbers"
            )
        base = dataclasses.replace(
            MODELS[name], dtype_bytes=base.dtype_bytes if base else Model.dtype_bytes
        )
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
    count = max(
        FEWEST_BATCHES, min(BATCHES, BATCHES * MANY_RANKS * cluster.tp // cluster.ranks)
    )
    if count < BATCHES:
        notes.append(
            f"batches: {count} (default), as {cluster.ranks} GPUs take longer; the last line has the error"
        )
    return count


def _documents(
    options: Options,
    titan: SimulatedJob | None,
    record: RecordedDocuments | None,
    *,
    cluster: Cluster,
    pp: int,
    notes: list[str],
) -> Documents:
    """Return the documents of the option, of the job, or the default."""
    spec = options.documents
    lengths = titan.lengths if titan else named_lengths(DEFAULT)
    batches: list[list[list[int]]] = []
    if record is not None:
        batches = record.batches[-_count(options, cluster, notes) :]
    elif spec is not None:
        lengths, batches = _read_documents(spec)
    if batches:
        notes.append(
            f"documents: {printable(str(spec))}, {len(batches)} batches of rows, as they are"
        )
        try:
            return Documents.of_rows(batches)
        except ValueError as error:
            raise ValueError(f"--documents {spec}: {error}") from None
    if spec is not None:
        notes.append(
            f"documents: {printable(spec)}, {len(lengths):,} lengths of {lengths.mean():,.0f} tokens on average, "
            f"{lengths.max():,} at most; what is over a row begins the next"
        )
    elif titan is None:
        notes.append(f"documents: {DEFAULT} (default)")
    if spec in CORPORA:
        notes.append(f"documents: {read_corpus(spec)['source']}")
    ranks, rest = divmod(cluster.ranks, cluster.tp * pp)
    if rest:
        raise ValueError(
            f"--ranks {cluster.ranks}: not a multiple of tp x pp = {cluster.tp * pp}; set a multiple of it"
        )
    row, step = _tokens(options, titan, ranks)
    count = _count(options, cluster, notes)
    return Documents(lengths, row, step, count, options.seed)


def _tokens(
    options: Options, titan: SimulatedJob | None, ranks: int
) -> tuple[int, int]:
    """Return the tokens of a row, and of a step over this many data- and context-parallel ranks."""
    if titan is None:
        row = options.tokens_per_rank or TOKENS_PER_RANK
        step = row * (options.microbatches or 1) * ranks
    else:
        row = titan.row_tokens
        step = titan.step_tokens
        if options.tokens_per_rank or options.microbatches:
            microbatches = titan.configuration.microbatches
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
    if (
        options.documents is None
        or (path := find_record(Path(options.documents))) is None
    ):
        return None
    try:
        return read_record(path, options.batches or BATCHES)
    except ValueError as error:
        raise ValueError(f"--documents {error}") from None


def _assumed(
    chosen: dict[str, Any], model: Model, cluster: Cluster, rates: Rates
) -> list[str]:
    """Write a line for every number that nobody gave, with its source."""
    notes = list[str]()
    for key, source in SOURCES.items():
        if key not in chosen:
            value = getattr(rates if hasattr(rates, key) else cluster, key)
            notes.append(f"{key}: {value:g} (default): {source}")
    if model.dtype_bytes != 2:
        notes.append(
            f"rates: those of bf16, although the model computes in elements of {model.dtype_bytes} bytes"
        )
    return notes


def _read_job(job: Path, overrides: tuple[str, ...], ranks: int | None) -> SimulatedJob:
    check_job(job)
    from torchtitan_cad.tools.simulated_job import read_simulated_job

    return read_simulated_job([f"--job.config_file={job}", *overrides], ranks)


def _documents_file(spec: str) -> Path | None:
    """Return the file that the option --documents names; None if it names a distribution."""
    path = Path(spec.removeprefix("histogram:"))
    is_file = os.path.exists(path) and not os.path.isdir(path)
    return path if is_file or path.suffix == ".json" else None


def _read_documents(spec: str) -> tuple[np.ndarray, list[list[list[int]]]]:
    """Return int64 lengths in tokens, from a file or of a distribution, and the batches of rows that a file has."""
    path = _documents_file(spec)
    if path is None:
        _check_folder(spec)
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
        if type(value) is not int or not 0 < value < 2**31:
            raise ValueError(
                f"--documents {path}: {str(value)[:40]!r} is no length; write positive whole numbers of tokens"
            )
    batches = [[], [values], values][depth]
    return np.array(lengths, dtype=np.int64), batches


def _are_lists(values: Any) -> bool:
    if not isinstance(values, list) or not values:
        return False
    return all(isinstance(value, list) for value in values)


def _check_folder(spec: str) -> None:
    """Raise ValueError for a folder that holds no record."""
    if os.path.isdir(spec):
        records = sorted(Path(spec).glob(f"*/{DOCUMENTS_NAME}"))
        any_dump = "the dump folder of a job with cad.shadow = true"
        folder = printable(records[-1].parents[1]) if records else any_dump
        raise ValueError(
            f"--documents {printable(spec)}: this folder has no {DOCUMENTS_NAME}; name {folder}"
        )
