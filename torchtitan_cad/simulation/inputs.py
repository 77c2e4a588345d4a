"""Inputs of a simulated step: model, cluster, rates, documents and settings.

Bytes are of one GPU's link in one direction, times are seconds, and defaults have their sources in ``SOURCES``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from torchtitan_cad.planning import AttentionShape, PlannerConfig, Profile
from torchtitan_cad.planning.model.layout import MAX_TOKENS
from torchtitan_cad.planning.text import brief, is_integer, is_number

Checkpointing = Literal["none", "selective", "linear", "full"]
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "linear", "full")
"""What backward computes again: nothing, every second matrix product, all but core attention, or whole layers."""

Schedule = Literal["1F1B", "CAD1F1B"]
SCHEDULES: tuple[Schedule, ...] = ("1F1B", "CAD1F1B")

Placement = Literal["loader", "balanced"]
PLACEMENTS: tuple[Placement, ...] = ("loader", "balanced")

MAX_STEP_TOKENS = 2**28
"""Tokens of one step, at most: more would be drawn and planned for minutes."""

SOURCES = {
    "linear_flops": "635, 759 and 630 TFLOP/s of the QKV, output and MLP products of a layer of hidden size 4096 on "
    "H100, bf16, 32,768 tokens (third-party; the sizes are inferred from the times)",
    "attention_flops": "337 to 341 TFLOP/s of FlashAttention-2 forward on H100, head dim 128, documents of 64K tokens "
    "(third-party)",
    "backward_flops": "the forward rate, at 2.5 times the operations: assumed",
    "memory_bandwidth": "eight tenths of an H100's 3.35 TB/s: assumed",
    "node": "277, 329 and 430 GB/s of all-reduces over 2, 4 and 8 GPUs (H100, NVLink 4; third-party, inferred)",
    "net": "what all-to-alls reach over 400 Gb/s InfiniBand: assumed",
    "latency": "of starting and waiting for one exchange: assumed",
    "memory": "nine tenths of an H100's 80 GB",
}
"""Sources of the defaults of ``Rates`` and ``Cluster``."""


UNITS = {
    "net": ("B/s", "e9", "40e9"),
    "node": ("B/s", "e9", "350e9"),
    "memory": ("B", "e9", "80e9"),
    "memory_bandwidth": ("B/s", "e12", "2.7e12"),
    "linear_flops": ("FLOP/s", "e12", "600e12"),
    "attention_flops": ("FLOP/s", "e12", "300e12"),
    "backward_flops": ("FLOP/s", "e12", "300e12"),
}
"""Key: its unit, the power of ten that people leave out, and an example."""
LEAST = 1e5
"""unit of the key: values below it lack the power of ten."""


def _positive(owner: str, key: str, value: object) -> None:
    unit, power, example = UNITS[key]
    if not is_number(value) or value <= 0:  # type: ignore[operator]
        raise ValueError(f"{owner} {key} = {brief(value)}: set a positive number of {unit}, such as {example}")
    if value < LEAST:  # type: ignore[operator]
        raise ValueError(f"{owner} {key} = {value:g} {unit}: did you mean {value:g}{power}?")


def _seconds(owner: str, key: str, value: object, most: float) -> None:
    if not is_number(value) or value < 0:  # type: ignore[operator]
        raise ValueError(f"{owner} {key} = {brief(value)}: set seconds, 0 or more")
    if value >= most:  # type: ignore[operator]
        raise ValueError(f"{owner} {key} = {value:g} s: did you mean {value:g}e-6?")


def _count(owner: str, key: str, value: object, most: int = MAX_TOKENS) -> None:
    if not is_integer(value, 1, most):
        raise ValueError(f"{owner} {key} = {brief(value)}: set a positive integer, at most {most}")


@dataclass(frozen=True)
class Model:
    """A decoder of equal layers with gated MLPs.

    Raises:
        ValueError: a number that is not positive, or heads that do not fit; names key, value and remedy.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    dtype_bytes: int = 2
    checkpointing: Checkpointing = "none"
    """One of ``CHECKPOINTING``."""

    def __post_init__(self) -> None:
        for key in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocabulary", "dtype_bytes"):
            _count("model", key, getattr(self, key))
        if self.checkpointing not in CHECKPOINTING:
            raise ValueError(f"model checkpointing = {self.checkpointing!r}: set one of {', '.join(CHECKPOINTING)}")
        self.shape(1)

    def shape(self, tp: int) -> AttentionShape:
        """Return the heads of one TP rank. Raises ValueError if they cannot be dealt out."""
        for key, heads in (("heads", self.heads), ("kv_heads", self.kv_heads)):
            if heads % tp:
                raise ValueError(f"tp = {tp} does not divide the model's {key} = {heads}: set a divisor of it")
        return AttentionShape(self.heads // tp, self.kv_heads // tp, self.head_dim, self.dtype_bytes)

    @property
    def pre_parameters(self) -> int:
        """Parameters of a layer's products before core attention: wq, wk, wv."""
        return self.hidden * self.head_dim * (self.heads + 2 * self.kv_heads)

    @property
    def post_parameters(self) -> int:
        """Parameters of a layer's products after core attention: wo and the gated MLP's three."""
        return self.hidden * (self.head_dim * self.heads + 3 * self.ffn)

    @property
    def parameters(self) -> int:
        """Parameters of all layers, the embedding and the output layer."""
        return self.layers * (self.pre_parameters + self.post_parameters) + 2 * self.hidden * self.vocabulary


MODELS = {
    "llama-8b": Model(32, 4096, 32, 8, 128, 14336, 128256),
    "llama-34b": Model(48, 8192, 64, 8, 128, 22016, 32000),
}
"""Llama 3 8B and Code Llama 34B."""


@dataclass(frozen=True)
class Cluster:
    """GPUs, how they are connected and how the job divides them. Ranks are ordered [pp, dp, cp, tp], tp fastest.

    Raises:
        ValueError: names key, value and remedy.
    """

    ranks: int
    ranks_per_node: int = 8
    tp: int = 1
    pp: int | None = None
    """Pipeline ranks; None: every system takes its best power of two up to 8."""
    cp: int | None = None
    """Ranks that share a row of documents; None: as many as rows need."""
    net: float = 40e9
    """Bytes per second between nodes."""
    node: float = 350e9
    """Bytes per second inside a node."""
    latency: float = 20e-6
    memory: float = 72e9
    """Bytes of one GPU that a job can fill."""
    fsdp: bool = True
    """Parameters are sharded (FSDP2); otherwise the optimizer's state alone (ZeRO-1)."""
    replicas: int = 1
    """Data-parallel ranks between which nothing is sharded (HSDP)."""

    def __post_init__(self) -> None:
        for key in ("ranks", "ranks_per_node", "tp", "replicas"):
            _count("cluster", key, getattr(self, key), 2**16)
        for key in ("pp", "cp"):
            if getattr(self, key) is not None:
                _count("cluster", key, getattr(self, key), 2**16)
        for key in ("net", "node", "memory"):
            _positive("cluster", key, getattr(self, key))
        _seconds("cluster", "latency", self.latency, 1.0)
        product = self.tp * (self.pp or 1) * (self.cp or 1)
        if self.ranks % product:
            raise ValueError(
                f"cluster ranks = {self.ranks}: not a multiple of tp x pp x cp = {product}; set a multiple of it"
            )

    @property
    def group_per_node(self) -> int:
        """Ranks of a CAD group, of one TP coordinate, that share a node."""
        return max(1, self.ranks_per_node // self.tp)


@dataclass(frozen=True)
class Rates:
    """Speed of one GPU. ``profile`` replaces both attention rates. Raises ValueError naming key, value and remedy."""

    linear_flops: float = 640e12
    attention_flops: float = 340e12
    backward_flops: float = 340e12
    """Operations per second of attention's backward, which has 2.5 times those of its forward."""
    memory_bandwidth: float = 2.7e12
    """Bytes per second of the GPU's memory, which norms, rotary embedding, activation and loss wait for."""
    linear_seconds: float | None = None
    """Measured forward seconds per token of one layer's matrix products on one TP rank, instead of ``linear_flops``."""
    seconds_per_step: float = 0.0
    """Seconds of a step, whatever its tokens: the optimizer and what else is known from a run."""
    profile: Profile | None = None

    def __post_init__(self) -> None:
        for key in ("linear_flops", "attention_flops", "backward_flops", "memory_bandwidth"):
            _positive("rates", key, getattr(self, key))
        if self.linear_seconds is not None:
            _seconds("rates", "linear_seconds", self.linear_seconds, 0.01)
        _seconds("rates", "seconds_per_step", self.seconds_per_step, float("inf"))


@dataclass(frozen=True)
class Documents:
    """Data to draw: rows of ``row_tokens``, each filled with documents end to end, the last one cut at the row's end.

    Attributes:
        lengths: int64 tokens of documents, drawn from with replacement.
        step_tokens: of one step over all ranks, a multiple of ``row_tokens``.
        given: batches of rows of lengths to take as they are, instead of drawing; see ``of_rows``.

    Raises:
        ValueError: names key, value and remedy.
    """

    lengths: np.ndarray = field(repr=False)
    row_tokens: int
    step_tokens: int
    batches: int = 10
    seed: int = 0
    given: tuple[tuple[np.ndarray, ...], ...] = field(default=(), repr=False)

    @classmethod
    def of_rows(cls, batches: Sequence[Sequence[Sequence[int]]]) -> Documents:
        """Take these batches: as many rows in each, of as many tokens. Raises ValueError for any that differ."""
        given = tuple(tuple(np.array(row, dtype=np.int64) for row in rows) for rows in batches)
        counts, tokens = {len(rows) for rows in given}, {int(row.sum()) for rows in given for row in rows}
        for what, found in (("rows in a batch", counts), ("tokens in a row", tokens)):
            if len(found) != 1:
                raise ValueError(
                    f"documents given have {min(found, default=0)} to {max(found, default=0)} {what}: "
                    "write as many in each"
                )
        lengths = np.concatenate([row for rows in given for row in rows])
        return cls(lengths, tokens.pop(), int(lengths.sum()) // len(given), len(given), given=given)

    def __post_init__(self) -> None:
        lengths = np.asarray(self.lengths)
        if lengths.ndim != 1 or not lengths.size or lengths.dtype.kind not in "iu" or lengths.min() < 1:
            raise ValueError(f"documents lengths = {brief(self.lengths)}: set positive integers, tokens of documents")
        _count("documents", "row_tokens", self.row_tokens)
        _count("documents", "step_tokens", self.step_tokens, MAX_STEP_TOKENS)
        _count("documents", "batches", self.batches, 1000)
        if not is_integer(self.seed, 0, 2**62):
            raise ValueError(f"documents seed = {brief(self.seed)}: set an integer, 0 or more")
        if self.step_tokens % self.row_tokens:
            raise ValueError(
                f"documents step_tokens = {self.step_tokens}: set a multiple of row_tokens = {self.row_tokens}"
            )


@dataclass(frozen=True)
class Settings:
    """Settings of CAD. Raises ValueError naming key, value and remedy."""

    planner: PlannerConfig = field(default_factory=PlannerConfig)
    nano_batches: int | None = None
    """1 or 2; None: the better one."""
    schedules: tuple[Schedule, ...] = SCHEDULES
    """Pipeline schedules that ``cad`` and ``greedy`` may take."""
    checkpointing: tuple[Checkpointing, ...] = ()
    """Kinds of activation checkpointing of which every system takes its best; none: the model's own."""
    tp_overlap: bool = False
    """Ping-pong hides TP's collectives too. Off: every system shows them, and the exchange hides behind them."""
    auto_tolerance: bool = False
    """Every plan's tolerance is the one by which a layer takes the least time (``cad.tolerance = "auto"``)."""
    node_aware: bool = True
    """Plans know which ranks share a node (``cad.ranks_per_node``)."""
    backward: Literal["resend", "keep"] = "resend"
    """Queries, keys and values travel again for backward, or servers keep what they received."""
    placement: Placement = "loader"
    """Ranks hold what their loaders gave them, or tokens are dealt anew (``cad.placement``)."""
    packing_cp: int | None = None
    """Ranks over which ``packing_cp`` divides documents; None: the best number."""
    receive_buffer_gb: float | None = None
    """GB of all nano-batches' receive buffers on a GPU (``cad.receive_buffer_gb``); None: 1 a nano-batch."""

    def __post_init__(self) -> None:
        if self.nano_batches not in (None, 1, 2):
            raise ValueError(f"nano_batches = {brief(self.nano_batches)}: set 1 or 2, or leave it out for the better")
        if self.packing_cp is not None:
            _count("settings", "packing_cp", self.packing_cp, 2**16)
        for key, known in (("backward", ("resend", "keep")), ("placement", PLACEMENTS)):
            if getattr(self, key) not in known:
                raise ValueError(f"{key} = {brief(getattr(self, key))}: set one of {', '.join(known)}")
        if set(self.checkpointing) - set(CHECKPOINTING):
            raise ValueError(f"checkpointing = {brief(self.checkpointing)}: set some of {', '.join(CHECKPOINTING)}")
        if not self.schedules or set(self.schedules) - set(SCHEDULES):
            raise ValueError(f"schedules = {brief(self.schedules)}: set one or both of {', '.join(SCHEDULES)}")


def with_tolerance(settings: Settings, tolerance: float | Literal["auto"]) -> Settings:
    """Return settings with another tolerance. Raises ValueError as ``PlannerConfig``."""
    fixed = PlannerConfig.tolerance if tolerance == "auto" else tolerance
    return replace(settings, planner=replace(settings.planner, tolerance=fixed), auto_tolerance=tolerance == "auto")
