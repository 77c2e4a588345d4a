# SPDX-License-Identifier: BSD-3-Clause
"""Inputs of a simulated step: the job's ``[cad]`` table with the division of its step, and what describes the job.

Every number is described once: its meaning, which is its help on the command line, its unit, and its default's source.
Bytes are of one GPU's link in one direction, times are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import numpy as np

from torchtitan_cad.integration.config import Cad
from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.planning.keeping import Checkpointing
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.planning.model.layout import MAX_TOKENS
from torchtitan_cad.planning.model.work import STEP_OVER_FORWARD, attention_flops
from torchtitan_cad.planning.text import brief, is_integer, is_number

Schedule = Literal["1F1B", "CAD1F1B"]
SCHEDULES: tuple[Schedule, ...] = ("1F1B", "CAD1F1B")

Placement = Literal["loader", "balanced"]
PLACEMENTS: tuple[Placement, ...] = ("loader", "balanced")

MAX_STEP_TOKENS = 2**28
"""tokens: most of one step; more would be drawn and planned for minutes."""
MAX_RANKS = 2**16
MANY_RANKS = 256
"""GPUs of one TP coordinate: of more, fewer steps are simulated and less is tried, as a step takes long."""
LEAST = 1e5
"""unit of a rate or a size: values below it lack a power of ten."""
COUNT = "whole number"


def about(
    help: str,
    unit: str = "",
    default: Any = MISSING,
    *,
    least: float = 1,
    most: float = MAX_TOKENS,
    source: str = "",
) -> Any:
    """Describe a field.

    Args:
        help: on the command line; none: this is no option.
        unit: ``COUNT``, or that of a number, which is from ``least`` to ``most``; none: not checked.
        source: of the default.
    """
    return field(
        default=default,
        metadata={
            "help": help,
            "unit": unit,
            "least": least,
            "most": most,
            "source": source,
        },
    )


def rate(help: str, unit: str, default: float, source: str = "") -> Any:
    """Describe a rate or a size."""
    return about(help, unit, default, least=LEAST, most=math.inf, source=source)


def is_option(attribute: Field[Any]) -> bool:
    """Tell whether a field is an option of the command line."""
    return bool(attribute.metadata.get("help"))


class Checked:
    """A dataclass whose described fields are checked. Raises ValueError naming key, value and remedy."""

    def __post_init__(self) -> None:
        for attribute in fields(self):  # type: ignore[arg-type]
            unit = attribute.metadata.get("unit")
            value = getattr(self, attribute.name)
            is_left_out = value is None and attribute.default is None
            if unit and not is_left_out:
                key = f"{type(self).__name__.lower()} {attribute.name}"
                _check(key, value, attribute)


def _check(key: str, value: Any, attribute: Field[Any]) -> None:
    """Raise ValueError for a value that a described field cannot have."""
    described = attribute.metadata
    least = described["least"]
    most = described["most"]
    is_right = is_integer if described["unit"] == COUNT else is_within
    if not is_right(value, least, most):
        default = attribute.default
        example = "" if default in (None, MISSING, 0) else f", such as {default:g}"
        at_most = "" if most == math.inf else f", at most {most:g}"
        raise ValueError(
            f"{key} = {brief(value)}: set a {described['unit']}, at least {least:g}{at_most}{example}"
        )


def is_within(value: object, least: float, most: float) -> bool:
    """Tell whether the value is a finite number in [least, most]."""
    return is_number(value) and least <= value <= most  # type: ignore[operator]


@dataclass(frozen=True)
class Model(Checked):
    """A decoder with gated MLPs, or equally busy experts. Raises ValueError also for heads that do not fit."""

    layers: int = about("Layers.", COUNT)
    hidden: int = about("Width of the hidden state.", COUNT)
    heads: int = about("Query heads.", COUNT)
    kv_heads: int = about("Key heads.", COUNT)
    head_dim: int = about("Elements per head.", COUNT)
    ffn: int = about(
        "Width of the gated MLP, or of the experts that a token passes through.",
        COUNT,
    )
    vocabulary: int = about("Tokens of the vocabulary.", COUNT)
    dtype_bytes: int = about("Bytes of an element.", COUNT, 2)
    shared_ffn: int = 0
    """The part of ``ffn`` that every token passes through, beside routed experts."""
    idle_ffn: int = 0
    """Width of a layer's routed experts that a token does not pass through."""
    expert_ranks: float = 1
    """Ranks that a layer's routed experts are divided among, over those of TP."""
    query_rank: int = 0
    """Width of the latent from which queries are made; 0: they are made from the hidden state."""
    key_rank: int = 0
    """The same for keys and values."""
    attention: tuple[AttentionKind, ...] = ()
    """Kinds of attention, in which alone layers differ, with the heads above; none: all layers attend in full."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kinds(1)

    def kinds(self, tp: int) -> tuple[AttentionKind, ...]:
        """Return the kinds of attention with the heads of a TP rank. Raises ValueError if they cannot be divided."""
        for key, heads in (("heads", self.heads), ("kv_heads", self.kv_heads)):
            if heads % tp:
                raise ValueError(
                    f"tp = {tp} does not divide the model's {key} = {heads}: set a divisor of it"
                )
        own = AttentionShape(
            self.heads // tp, self.kv_heads // tp, self.head_dim, self.dtype_bytes
        )
        of_kinds = ("value_dim", "shared_dim", "window")
        return tuple(
            replace(
                kind,
                shape=replace(
                    own, **{name: getattr(kind.shape, name) for name in of_kinds}
                ),
            )
            for kind in self.attention or [AttentionKind("full", self.layers, own)]
        )

    def shape(self, tp: int) -> AttentionShape:
        """Return the shape of the first kind of attention in a TP rank. Raises ValueError as ``kinds``."""
        return self.kinds(tp)[0].shape

    def flops(self, tokens: int, pairs: Sequence[float]) -> float:
        """Return the model FLOPs of a step of ``tokens``, given the pairs of a layer of each kind of attention."""
        of_token = self.layers * self.layer_parameters + self.hidden * self.vocabulary
        linear = STEP_OVER_FORWARD * 2 * of_token * tokens
        return linear + attention_flops(self.kinds(1), pairs)

    def pre_parameters(self, tp: int = 1) -> int:
        """Count the parameters of a layer's products before core attention: wq, wk, wv, or those to and from latents.

        All of ``tp`` ranks multiply by what makes latents and the shared part of keys, which counts for each.
        """
        shape = self.shape(1)
        queries = self.heads * shape.head_dim
        keys = self.kv_heads * (shape.key_dim + shape.out_dim)
        undivided = (
            tp * self.hidden * (self.query_rank + self.key_rank + shape.shared_dim)
        )
        return (
            undivided
            + (self.query_rank or self.hidden) * queries
            + (self.key_rank or self.hidden) * keys
        )

    @property
    def post_parameters(self) -> int:
        """Parameters of a layer's products after core attention: wo and the gated MLP's three."""
        return self.hidden * (self.shape(1).out_dim * self.heads + 3 * self.ffn)

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of a layer by which a token is multiplied."""
        return self.pre_parameters() + self.post_parameters

    @property
    def gathered_parameters(self) -> float:
        """Parameters of a layer that a rank gathers."""
        routed = self.ffn - self.shared_ffn
        more = (routed + self.idle_ffn) / self.expert_ranks - routed
        return self.layer_parameters + 3 * self.hidden * more

    @property
    def parameters(self) -> int:
        """Parameters of all layers, the embedding and the output layer."""
        layer = self.layer_parameters + 3 * self.hidden * self.idle_ffn
        return self.layers * layer + 2 * self.hidden * self.vocabulary

    @property
    def held_parameters(self) -> float:
        """The same, of layers that a rank has gathered."""
        return (
            self.layers * self.gathered_parameters + 2 * self.hidden * self.vocabulary
        )


MODELS = {
    "llama-8b": Model(32, 4096, 32, 8, 128, 14336, 128256),
    "llama-34b": Model(48, 8192, 64, 8, 128, 22016, 32000),
}
"""Llama 3 8B and Code Llama 34B."""


@dataclass(frozen=True)
class Cluster(Checked):
    """GPUs and how they are connected. Ranks are ordered [pp, dp, cp, tp], tp fastest."""

    ranks: int = about("GPUs.", COUNT, most=MAX_RANKS)
    ranks_per_node: int = about("GPUs of a node.", COUNT, 8, most=MAX_RANKS)
    tp: int = about("Tensor-parallel ranks.", COUNT, 1, most=MAX_RANKS)
    net: float = rate(
        "Bytes per second of a GPU between nodes.",
        "number of B/s",
        40e9,
        source="all-to-alls over 400 Gb/s InfiniBand: assumed",
    )
    node: float = rate(
        "Bytes per second of a GPU inside a node.",
        "number of B/s",
        350e9,
        source="all-reduces of H100s: third-party, inferred",
    )
    latency: float = about(
        "Seconds of one exchange without bytes.",
        "number of seconds",
        20e-6,
        least=0,
        most=1,
        source="starting and waiting: assumed",
    )
    memory: float = rate(
        "Bytes of a GPU that a job can fill.",
        "number of bytes",
        76.5e9,
        source="nine tenths of the 85e9 bytes that an H100 of 80 GB has, as cad.backward takes them",
    )
    fsdp: bool = about(
        "Parameters are sharded as by FSDP2 (True), or the optimizer's state alone (False).",
        default=True,
    )
    servers: int | None = about(
        "Attention servers that join the job (cad.servers).",
        COUNT,
        None,
        most=MAX_RANKS,
    )
    server_speed: float = about(
        "Speed of a server's attention, of a GPU's.", "number", 1.0, least=1e-3
    )
    server_net: float = rate(
        "Bytes per second of a server's link, of both directions together.",
        "number of B/s",
        50e9,
    )
    replicas: int = about("", COUNT, 1, most=MAX_RANKS)
    """Data-parallel ranks between which nothing is sharded (HSDP)."""

    @property
    def is_large(self) -> bool:
        """Tell whether it has more than ``MANY_RANKS`` of one TP coordinate."""
        return self.ranks // self.tp > MANY_RANKS

    @property
    def group_per_node(self) -> int:
        """Ranks of a CAD group, of one TP coordinate, that share a node."""
        return max(1, self.ranks_per_node // self.tp)


@dataclass(frozen=True)
class Rates(Checked):
    """Speed of one GPU."""

    linear_flops: float = rate(
        "Operations per second of matrix products.",
        "number of FLOP/s",
        640e12,
        source="H100, bf16: third-party",
    )
    attention_flops: float = rate(
        "Operations per second of attention forward.",
        "number of FLOP/s",
        340e12,
        source="FlashAttention-2 on H100, head dim 128, 64K tokens: third-party",
    )
    backward_flops: float = rate(
        "Operations per second of attention backward, which has 2.5 times those of its forward.",
        "number of FLOP/s",
        340e12,
        source="the forward rate: assumed",
    )
    memory_bandwidth: float = rate(
        "Bytes per second of a GPU's memory, which norms, rotary embedding, activation and loss wait for.",
        "number of B/s",
        2.7e12,
        source="eight tenths of an H100's 3.35 TB/s: assumed",
    )
    peak_flops: float = rate(
        "Operations per second by which mfu is counted.",
        "number of FLOP/s",
        989e12,
        source="H100, bf16: NVIDIA's data sheet",
    )


SOURCES = {
    attribute.name: attribute.metadata["source"]
    for attribute in (*fields(Rates), *fields(Cluster))
    if attribute.metadata.get("source")
}
"""Sources of the defaults of ``Rates`` and ``Cluster``."""


@dataclass(frozen=True)
class Documents(Checked):
    """Data to draw: rows of ``row_tokens``, each filled with documents end to end, the last one cut at the row's end.

    Attributes:
        lengths: int64 tokens of documents, drawn from with replacement.
        step_tokens: of one step over all ranks, a multiple of ``row_tokens``.
        given_batches: rows of lengths to take as they are, instead of drawing; see ``of_rows``.
    """

    lengths: np.ndarray = field(repr=False)
    row_tokens: int = about("", COUNT)
    step_tokens: int = about("", COUNT, most=MAX_STEP_TOKENS)
    batches: int = about("", COUNT, 10, most=1000)
    seed: int = about("", COUNT, 0, least=0, most=2**62)
    given_batches: tuple[tuple[np.ndarray, ...], ...] = field(default=(), repr=False)

    @classmethod
    def of_rows(cls, batches: Sequence[Sequence[Sequence[int]]]) -> Documents:
        """Take these batches: as many rows in each, of as many tokens. Raises ValueError for any that differ."""
        arrays = tuple(
            tuple(np.array(row, dtype=np.int64) for row in rows) for rows in batches
        )
        all_rows = list(chain.from_iterable(arrays))
        counts = {len(rows) for rows in arrays}
        tokens = {int(row.sum()) for row in all_rows}
        for what, found in (("rows in a batch", counts), ("tokens in a row", tokens)):
            if len(found) != 1:
                raise ValueError(
                    f"documents given have {min(found, default=0)} to {max(found, default=0)} {what}: "
                    "write equally many in each"
                )
        lengths = np.concatenate(all_rows)
        return cls(
            lengths,
            tokens.pop(),
            int(lengths.sum()) // len(arrays),
            len(arrays),
            given_batches=arrays,
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_tokens % self.row_tokens:
            raise ValueError(
                f"documents step_tokens = {self.step_tokens}: set a multiple of row_tokens = {self.row_tokens}"
            )


@dataclass(unsafe_hash=True)
class Configuration(Checked, Cad):
    """The ``[cad]`` table of a job, and how its step is divided; the step's tokens stay as they are.

    Fields of the table that are options of the command line are described anew. A configuration is not changed once it
    is made.
    """

    pp: int = about(
        "Pipeline ranks; without a job, every system takes its best.",
        COUNT,
        1,
        most=MAX_RANKS,
    )
    cp: int = about(
        "Ranks that share a row; without a job, as many as rows need.",
        COUNT,
        1,
        most=MAX_RANKS,
    )
    microbatches: int = about("", COUNT, 1)
    checkpointing: Checkpointing = about(  # noqa: RUF009
        "Activation checkpointing: of nothing, every second matrix product, all but core attention, or whole layers. "
        "Without a job, every system takes its best.",
        default="none",
    )
    nano_batches: Literal[1, 2] = about(
        "Halves of a microbatch that take turns; by default the better of 1 and 2.",
        default=Cad.nano_batches,
    )
    schedule: Schedule = "1F1B"
    tolerance: float | Literal["auto"] = about(
        "Imbalance that plans may leave; auto: of every plan the one by which a layer takes the least time.",
        default=Cad.tolerance,
    )
    backward: Literal["auto", "resend", "keep"] = about(
        "Queries, keys and values travel again for backward, or servers keep what they received; auto: where the "
        "memory has room for it.",
        default=Cad.backward,
    )
    placement: Placement = about(  # noqa: RUF009
        "Ranks hold what their loaders gave them, or tokens are distributed anew.",
        default="balanced",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.planner_config()

    def without_cad(self) -> Configuration:
        """Return what torchtitan alone can do: its checkpointing of whole layers repeats attention."""
        if self.checkpointing != "linear":
            return self
        return replace(self, checkpointing="full")

    def changes(self, other: Configuration) -> dict[str, Any]:
        """Return the fields that differ from the other's, with the values here."""
        return {
            key: value
            for key, value in vars(self).items()
            if value != getattr(other, key)
        }


DIVISION = ("pp", "cp", "microbatches", "checkpointing")
OPEN = frozenset({*DIVISION, "nano_batches", "schedule", "placement"})
"""Fields of a configuration of which every system may take its best; ``DIVISION`` also those without CAD."""


@dataclass(frozen=True)
class Inputs:
    """All that a simulation is told; of the fields of the configuration in ``open`` every system takes its best."""

    model: Model
    cluster: Cluster
    documents: Documents
    configuration: Configuration
    rates: Rates = field(default=Rates())
    open: frozenset[str] = OPEN

    def described(self) -> dict[str, Any]:
        """Turn the inputs into values that JSON can hold."""
        documents = self.documents
        lengths = documents.lengths
        return {
            "model": asdict(self.model),
            "cluster": asdict(self.cluster),
            "documents": {
                "row_tokens": documents.row_tokens,
                "step_tokens": documents.step_tokens,
                "batches": documents.batches,
                "seed": documents.seed,
                "median": float(np.median(lengths)),
                "mean": float(lengths.mean()),
                "longest": int(lengths.max()),
            },
            "configuration": vars(self.configuration),
            "open": sorted(self.open),
            "rates": vars(self.rates),
        }
