# SPDX-License-Identifier: BSD-3-Clause
"""Inputs of a simulated step: the job's ``[cad]`` table with the division of its step, and what describes the job.

Bytes are of one GPU's link in one direction, times are seconds. The options of the command line, tools/options.py, are
fields of these records, and say what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import numpy as np

from torchtitan_cad.integration.config import Cad
from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.planning.keeping import Checkpointing
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.planning.model.work import STEP_OVER_FORWARD, attention_flops

Schedule = Literal["1F1B", "CAD1F1B"]
SCHEDULES: tuple[Schedule, ...] = ("1F1B", "CAD1F1B")

PLACEMENTS = ("loader", "balanced")

MAX_STEP_TOKENS = 2**28
"""tokens: most of one step; more would be drawn and planned for minutes."""
MANY_RANKS = 256
"""GPUs of one TP coordinate: of more, fewer steps are simulated and less is tried, as a step takes long."""


@dataclass(frozen=True)
class Model:
    """A decoder with gated MLPs, or equally busy experts."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    dtype_bytes: int = 2
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

    def kinds(self, tp: int) -> tuple[AttentionKind, ...]:
        """Return the kinds of attention with the heads of a TP rank. Raises ValueError if they cannot be divided."""
        for key, heads in (("heads", self.heads), ("kv_heads", self.kv_heads)):
            if heads % tp:
                raise ValueError(
                    f"tp = {tp} does not divide the model's {key} = {heads}: set a divisor of it"
                )
        shape = AttentionShape(
            self.heads // tp, self.kv_heads // tp, self.head_dim, self.dtype_bytes
        )
        if not self.attention:
            return (AttentionKind("full", self.layers, shape),)
        heads_of_rank = {
            "num_heads": shape.num_heads,
            "num_kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "dtype_bytes": shape.dtype_bytes,
        }
        return tuple(
            replace(kind, shape=replace(kind.shape, **heads_of_rank))
            for kind in self.attention
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
class Cluster:
    """GPUs and how they are connected. Ranks are ordered [pp, dp, cp, tp], tp fastest."""

    ranks: int
    ranks_per_node: int = 8
    tp: int = 1
    net: float = 40e9
    node: float = 350e9
    latency: float = 20e-6
    memory: float = 76.5e9
    fsdp: bool = True
    replicas: int = 1
    """Data-parallel ranks between which nothing is sharded (HSDP)."""
    servers: int = 0
    """Attention servers that have joined the job (cad.servers)."""
    server_speed: float = 1.0
    server_net: float = 50e9

    @property
    def is_large(self) -> bool:
        """Tell whether it has more than ``MANY_RANKS`` of one TP coordinate."""
        return self.ranks // self.tp > MANY_RANKS

    @property
    def group_per_node(self) -> int:
        """Ranks of a CAD group, of one TP coordinate, that share a node."""
        return max(1, self.ranks_per_node // self.tp)


@dataclass(frozen=True)
class Rates:
    """Speed of one GPU."""

    linear_flops: float = 640e12
    attention_flops: float = 340e12
    backward_flops: float = 340e12
    memory_bandwidth: float = 2.7e12
    peak_flops: float = 989e12


SOURCES = {
    "linear_flops": "H100, bf16: third-party",
    "attention_flops": "FlashAttention-2 on H100, head dim 128, 64K tokens: third-party",
    "backward_flops": "the forward rate: assumed",
    "memory_bandwidth": "eight tenths of an H100's 3.35 TB/s: assumed",
    "peak_flops": "H100, bf16: NVIDIA's data sheet",
    "net": "all-to-alls over 400 Gb/s InfiniBand: assumed",
    "node": "all-reduces of H100s: third-party, inferred",
    "latency": "starting and waiting: assumed",
    "memory": "nine tenths of the 85e9 bytes that an H100 of 80 GB has, as cad.backward takes them",
}
"""Sources of the defaults of ``Rates`` and ``Cluster``."""


@dataclass(frozen=True)
class Documents:
    """Data to draw: rows of ``row_tokens``, each filled with documents end to end, the last one cut at the row's end.

    Attributes:
        lengths: int64 tokens of documents, drawn from with replacement.
        step_tokens: of one step over all ranks, a multiple of ``row_tokens``.
        given_batches: rows of lengths to take as they are, instead of drawing; see ``of_rows``.

    Raises ValueError for more tokens than can be simulated.
    """

    lengths: np.ndarray = field(repr=False)
    row_tokens: int
    step_tokens: int
    batches: int = 10
    seed: int = 0
    given_batches: tuple[tuple[np.ndarray, ...], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.step_tokens > MAX_STEP_TOKENS:
            raise ValueError(
                f"a step of {self.step_tokens} tokens is too large to simulate: set --tokens-per-rank, --microbatches "
                f"or --ranks such that it has at most {MAX_STEP_TOKENS}"
            )

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


@dataclass(unsafe_hash=True)
class Configuration(Cad):
    """The ``[cad]`` table of a job, and how its step is divided; the step's tokens stay as they are.

    A configuration is not changed once it is made.
    """

    pp: int = 1
    cp: int = 1
    microbatches: int = 1
    checkpointing: Checkpointing = "none"
    schedule: Schedule = "1F1B"
    placement: str = "balanced"

    def __post_init__(self) -> None:
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
        """Turn the inputs into values that JSON can hold, documents without their lengths."""
        described = asdict(self)
        documents = described["documents"]
        del documents["lengths"], documents["given_batches"]
        return described | {"open": sorted(self.open)}
