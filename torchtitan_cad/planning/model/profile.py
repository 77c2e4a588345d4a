# SPDX-License-Identifier: BSD-3-Clause
"""A measured profile of an attention kernel, its JSON form, and the cost models made from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from torchtitan_cad.planning.files import read_text
from torchtitan_cad.planning.model.cost import ProfileCost
from torchtitan_cad.planning.model.layout import MAX_TOKENS
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.text import (
    brief,
    is_integer,
    is_number,
    parse_json,
    printable,
)

FORMAT = 1
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
REMEDY = "measure again with `torchtitan-cad profile`"

NOISY_SPREAD = 0.25
"""interquartile range of the repeats / median: a cell above it is noisy."""

SLOWER = 1.25
"""time of a cell / time of a cell with as many or more queries and keys: a cell above it is noisy, too."""

MAX_REPEATS = 1000
MAX_MS = 1e6
"""milliseconds: longest time of a task, a quarter of an hour."""

Direction = Literal["forward", "backward"]
Passes = Direction | Literal["both"]
Grid = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Profile:
    """Times of unmasked tasks of every query and key length of a grid, on a device kept busy by many of them at once.

    Raises:
        ValueError: a value is not a possible measurement, or allows no cost model; names key and value.
    """

    device: str
    """Name of the device, such as "NVIDIA H100 80GB HBM3"."""
    torch: str
    kernel: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    """One of ``DTYPE_BYTES``."""
    tile: int
    """Tokens: the rows of a kernel's tile, in which costs are counted."""
    q_lengths: tuple[int, ...]
    """Queries of a task, ascending."""
    kv_lengths: tuple[int, ...]
    """Keys of a task, ascending multiples of ``tile``, the first of them ``tile``."""
    forward_ms: Grid
    """[q_lengths][kv_lengths] milliseconds per task."""
    backward_ms: Grid
    repeats: int
    """Measurements per task: each time is their median."""
    date: str
    """ISO 8601."""
    forward_spread: Grid | None = None
    """[q_lengths][kv_lengths] interquartile range of the repeats over their median; None in files of old versions."""
    backward_spread: Grid | None = None
    value_dim: int | None = None
    """As in ``AttentionShape``."""

    def __post_init__(self) -> None:
        for key in ("device", "torch", "kernel", "date"):
            _check(
                isinstance(getattr(self, key), str), key, getattr(self, key), "a string"
            )
        for key, most in (("tile", MAX_TOKENS), ("repeats", MAX_REPEATS)):
            value = getattr(self, key)
            _check(
                is_integer(value, 1, most),
                key,
                value,
                f"a positive integer, at most {most}",
            )
        known = isinstance(self.dtype, str) and self.dtype in DTYPE_BYTES
        _check(known, "attention.dtype", self.dtype, f"one of {', '.join(DTYPE_BYTES)}")
        self.shape()  # raises
        for key in ("q_lengths", "kv_lengths"):
            lengths = getattr(self, key)
            valid = len(lengths) > 0 and all(
                is_integer(length, 1, MAX_TOKENS) for length in lengths
            )
            valid = valid and all(a < b for a, b in pairwise(lengths))
            wanted = f"positive integers in ascending order, at most {MAX_TOKENS}"
            _check(valid, f"grid.{key}", list(lengths), wanted)
        on_tiles = self.kv_lengths[0] == self.tile and all(
            length % self.tile == 0 for length in self.kv_lengths
        )
        wanted = f"multiples of the tile, {self.tile}, beginning with it"
        _check(on_tiles, "grid.kv_lengths", list(self.kv_lengths), wanted)
        for key in ("forward_ms", "backward_ms"):
            self._check_grid(
                key,
                lambda time: 0 < time <= MAX_MS,
                f"positive milliseconds, at most {MAX_MS:.0f}",
            )
        for key in _SPREAD_KEYS:
            if getattr(self, key) is not None:
                self._check_grid(
                    key, lambda spread: spread >= 0, "a number that is not negative"
                )

    def shape(self) -> AttentionShape:
        """Return the shape of the attention that was measured."""
        dtype_bytes = DTYPE_BYTES[self.dtype]
        return AttentionShape(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            dtype_bytes,
            self.value_dim,
        )

    def noisy_cells(self) -> list[tuple[int, int]]:
        """Return (query length, key length) of the cells whose times, forward or backward, are not reliable.

        Their repeats spread too far (``NOISY_SPREAD``), or they take longer than a larger task (``SLOWER``).
        """
        noisy = np.zeros((len(self.q_lengths), len(self.kv_lengths)), dtype=bool)
        for times, spread in (
            (self.forward_ms, self.forward_spread),
            (self.backward_ms, self.backward_spread),
        ):
            # the least time of any task of no fewer queries and keys
            at_least = np.array(times)[::-1, ::-1]
            at_least = np.minimum.accumulate(
                np.minimum.accumulate(at_least, axis=0), axis=1
            )[::-1, ::-1]
            noisy |= np.array(times) > SLOWER * at_least
            if spread is not None:
                noisy |= np.array(spread) > NOISY_SPREAD
        return [
            (self.q_lengths[row], self.kv_lengths[column])
            for row, column in np.argwhere(noisy).tolist()
        ]

    def cost_model(self, direction: Passes, shape: AttentionShape) -> ProfileCost:
        """Return a cost model in picoseconds for the heads of ``shape``.

        The cost of a row of tiles is its time at the query length with the highest throughput. Tasks shorter than a
        tile cost a full row.

        Raises:
            ValueError: the profile is for another kind of attention. Only the number of heads may differ, at the same
                number of query heads per key head: kernels treat heads as a batch, so on a saturated device time is
                proportional to it. Time is not proportional to head dim, element size or heads per key head.
        """
        self._check_shape(shape)
        times = self._times(direction)
        per_query = [
            min(
                Fraction(ms) / length
                for ms, length in zip(column, self.q_lengths, strict=True)
            )
            for column in zip(*times, strict=True)
        ]
        # to seconds a row of tiles
        scale = Fraction(self.tile * shape.num_heads, self.num_heads * 1000)
        key_tiles = [length // self.tile for length in self.kv_lengths]
        return ProfileCost.from_times(
            self.tile, key_tiles, [time * scale for time in per_query]
        )

    def _times(self, direction: Passes) -> list[list[float]]:
        """Return milliseconds [q_lengths][kv_lengths], summed for both passes."""
        if direction == "both":
            pairs = zip(self.forward_ms, self.backward_ms, strict=True)
            return [[a + b for a, b in zip(*rows, strict=True)] for rows in pairs]
        return [
            list(row)
            for row in (self.forward_ms if direction == "forward" else self.backward_ms)
        ]

    def throughput(self, direction: Direction) -> npt.NDArray[np.float64]:
        """Return [q_lengths, kv_lengths] floating point operations a second.

        A head takes 2 (d + e) for every query and key forward and 6 d + 4 e backward, of d elements of keys and e of
        values.
        """
        keys = self.head_dim
        values = self.shape().out_dim
        per_pair = {"forward": 2 * (keys + values), "backward": 6 * keys + 4 * values}[
            direction
        ] * self.num_heads
        times = np.array(
            self.forward_ms if direction == "forward" else self.backward_ms
        )
        return per_pair * np.outer(self.q_lengths, self.kv_lengths) / (times * 1e-3)

    def fingerprint(self) -> str:
        """Return the 64-bit hash (16 hex digits) of the content, whatever the file's formatting."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=8).hexdigest()

    def to_json(self) -> str:
        """Return the JSON form, with format, device, torch, kernel, attention, tile, grid, repeats and date."""
        attention = {key: getattr(self, key) for key in _ATTENTION_KEYS}
        attention |= {} if self.value_dim is None else {"value_dim": self.value_dim}
        grid = {key: getattr(self, key) for key in _GRID_KEYS}
        grid |= {
            key: spread
            for key in _SPREAD_KEYS
            if (spread := getattr(self, key)) is not None
        }
        head = {key: getattr(self, key) for key in ("device", "torch", "kernel")}
        tail = {
            "tile": self.tile,
            "grid": grid,
            "repeats": self.repeats,
            "date": self.date,
        }
        return json.dumps({"format": FORMAT, **head, "attention": attention, **tail})

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read the result of :meth:`to_json`. Raises ValueError naming the key and its value."""
        try:
            data: Any = parse_json(text)
        except ValueError as error:
            raise ValueError(f"not JSON: {error}; {REMEDY}") from None
        _check(isinstance(data, dict), "profile", data, "an object")
        _check(data.get("format") == FORMAT, "format", data.get("format"), str(FORMAT))
        top = _table(
            data,
            "",
            (
                "format",
                "device",
                "torch",
                "kernel",
                "attention",
                "tile",
                "grid",
                "repeats",
                "date",
            ),
        )
        attention = _table(
            top.pop("attention"), "attention", _ATTENTION_KEYS, ("value_dim",)
        )
        grid = {
            key: _tuples(value)
            for key, value in _table(
                top.pop("grid"), "grid", _GRID_KEYS, _SPREAD_KEYS
            ).items()
        }
        for key, value in grid.items():
            _check(isinstance(value, tuple), f"grid.{key}", value, "a list")
        del top["format"]
        return cls(**top, **attention, **grid)

    @classmethod
    def read(cls, path: str | Path) -> Profile:
        """Read a profile. Raises ValueError naming file, key and value, also if the file cannot be read."""
        text = read_text(path)
        try:
            return cls.from_json(text)
        except ValueError as error:
            raise ValueError(f"profile {printable(path)}: {error}") from None

    def _check_grid(
        self, key: str, valid: Callable[[float], bool], wanted: str
    ) -> None:
        rows = getattr(self, key)
        name = f"grid.{key}"
        queries = len(self.q_lengths)
        keys = len(self.kv_lengths)
        _check(
            len(rows) == queries,
            name,
            f"{len(rows)} rows",
            f"one row for each of the {queries} q_lengths",
        )
        for index, row in enumerate(rows):
            whole = isinstance(row, tuple) and len(row) == keys
            _check(
                whole,
                f"{name}[{index}]",
                row,
                f"a list with one time for each of the {keys} kv_lengths",
            )
            for value in row:
                _check(
                    is_number(value) and valid(value), f"{name}[{index}]", value, wanted
                )

    def _check_shape(self, shape: AttentionShape) -> None:
        dtype_bytes = DTYPE_BYTES[self.dtype]
        for name, measured, wanted in (
            ("head_dim", self.head_dim, shape.head_dim),
            ("value_dim", self.shape().out_dim, shape.out_dim),
            (
                f"elements of {dtype_bytes} bytes ({self.dtype})",
                dtype_bytes,
                shape.dtype_bytes,
            ),
            (
                "query heads per key head",
                self.num_heads // self.num_kv_heads,
                shape.num_heads // shape.num_kv_heads,
            ),
        ):
            if measured != wanted:
                raise ValueError(
                    f"the profile was measured for {name} = {measured}, not {wanted}; {REMEDY} for those"
                )


_ATTENTION_KEYS = ("num_heads", "num_kv_heads", "head_dim", "dtype")
_GRID_KEYS = ("q_lengths", "kv_lengths", "forward_ms", "backward_ms")
_SPREAD_KEYS = ("forward_spread", "backward_spread")


def _check(valid: bool, key: str, value: Any, wanted: str) -> None:
    if not valid:
        raise ValueError(f"{key} = {brief(value)}: must be {wanted}; {REMEDY}")


def _table(
    value: Any, name: str, keys: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, Any]:
    """``value`` if it is an object with exactly these keys, and any of the optional ones."""
    prefix = f"{name}." if name else ""
    _check(isinstance(value, dict), name, value, "an object")
    for key in keys:
        if key not in value:
            raise ValueError(f"missing key {prefix}{key}; {REMEDY}")
    unknown = sorted(set(value) - {*keys, *optional})
    if unknown:
        raise ValueError(f"unknown key {prefix}{unknown[0][:80]}; {REMEDY}")
    return dict(value)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
