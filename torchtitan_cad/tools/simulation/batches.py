# SPDX-License-Identifier: BSD-3-Clause
"""Batches of documents, and named distributions of their lengths, as samples to draw from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_cad.demo.lengths import MOST, read_options
from torchtitan_cad.planning.intervals import FloatArray, IntArray, causal_pairs
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.tools.simulation.inputs import Documents

SAMPLES = 20_000
_FILES = sorted(Path(__file__).with_name("lengths").glob("*.json"))
CORPORA = {path.stem: path for path in _FILES}
"""Named corpora: a file has the documents' ``lengths`` in tokens, to draw from, and says where they are from."""
DEFAULT = "lognormal:median=4096,sigma=1.5"

_OPTIONS = {
    "lognormal": {"median": 4096.0, "sigma": 1.5, "max": MOST},
    "uniform": {"min": 128.0, "max": 65536.0},
    "fixed": {"length": 4096.0},
}
"""Kinds with their options and what these are if left out."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Documents of one step: of every row, int64 tokens of its documents, which add up to ``row_tokens``."""

    rows: tuple[IntArray, ...]
    row_tokens: int

    @cached_property
    def lengths(self) -> IntArray:
        """int64 tokens of all documents."""
        return np.concatenate(self.rows)

    def pieces(self, kind: AttentionKind) -> IntArray:
        """Return int64 tokens of all documents, as a kind of attention cuts them in their rows."""
        if kind.block is None:
            return self.lengths
        return np.concatenate([kind.cut(row) for row in self.rows])

    def pairs(self, kind: AttentionKind) -> int:
        """Count the (query, key) pairs of a layer of this kind of attention."""
        return int(causal_pairs(self.pieces(kind), kind.shape.window).sum())

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return len(self.rows) * self.row_tokens


def draw_batches(documents: Documents) -> list[Batch]:
    """Return the batches that are given, or draw some by the seed; what a row's end cuts off begins the next row."""
    row = documents.row_tokens
    if documents.given_batches:
        return [Batch(rows, row) for rows in documents.given_batches]
    rng = np.random.default_rng(documents.seed)
    step_tokens = documents.step_tokens
    ends_of_rows = np.arange(row, step_tokens + 1, row)
    batches = []
    for _ in range(documents.batches):
        ends = []
        last = 0
        while last < step_tokens:
            drawn = rng.choice(documents.lengths, size=max(64, step_tokens // 4096))
            ends.append(last + np.cumsum(drawn))
            last = int(ends[-1][-1])
        cuts = np.union1d(np.concatenate(ends), ends_of_rows)
        cuts = cuts[cuts <= step_tokens]
        lengths = np.diff(cuts, prepend=0)
        of_row = (cuts - 1) // row
        first_of_rows = np.flatnonzero(np.diff(of_row)) + 1
        batches.append(Batch(tuple(np.split(lengths, first_of_rows)), row))
    return batches


def read_corpus(name: str) -> dict[str, Any]:
    """Return a corpus' ``lengths``, and the sentence ``source`` that says where they are from."""
    return json.loads(CORPORA[name].read_text())


def named_lengths(spec: str) -> IntArray:
    """Return the samples of a corpus such as "codealpaca", or of a distribution such as
    "lognormal:median=4096,sigma=1.5,max=262144".

    Returns:
        int64 lengths, the same in every call; of a distribution ``SAMPLES``.

    Raises:
        ValueError: the spec has a kind or an option that is not known, twice there, or out of its bounds.
    """
    if spec in CORPORA:
        return np.array(read_corpus(spec)["lengths"], dtype=np.int64)
    kind, _, items = spec.partition(":")
    try:
        if kind not in _OPTIONS:
            known = ", ".join((*_OPTIONS, *CORPORA))
            raise ValueError(f"set a JSON file of lengths, or one of {known}")
        options = read_options(items.split(",") if items else [], _OPTIONS[kind])
        lengths = _sample(kind, options)
    except ValueError as error:
        raise ValueError(f"documents = {spec[:80]!r}: {error}") from None
    return np.clip(np.rint(lengths), 1, MOST).astype(np.int64)


def _sample(kind: str, options: dict[str, float]) -> FloatArray:
    """Draw from a distribution. Raises ValueError for options that contradict each other."""
    if kind == "fixed":
        return np.full(SAMPLES, options["length"])
    most = options["max"]
    if kind == "lognormal":
        normal = np.random.default_rng(0).standard_normal(SAMPLES)
        lengths = options["median"] * np.exp(options["sigma"] * normal)
        return np.minimum(lengths, most)
    least = options["min"]
    if least > most:
        raise ValueError(f"min = {least:.10g} is above max; set max to it or more")
    share = (np.arange(SAMPLES) + 0.5) / SAMPLES
    return least + share * (most - least)
