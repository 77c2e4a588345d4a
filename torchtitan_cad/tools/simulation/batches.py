# SPDX-License-Identifier: BSD-3-Clause
"""Batches of documents, and named distributions of their lengths, as samples to draw from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.planning.model.work import causal_pairs
from torchtitan_cad.tools.simulation.inputs import Documents

SAMPLES = 20_000
_FILES = sorted(Path(__file__).with_name("lengths").glob("*.json"))
CORPORA = {path.stem: path for path in _FILES}
"""Named corpora: a file has the documents' ``lengths`` in tokens, to draw from, and says where they are from."""
MOST = 2.0**31 - 1
"""tokens of a document"""

DEFAULT = "lognormal:median=4096,sigma=1.5"

_PRETRAIN = {
    0: 1, 1: 63, 5: 324, 10: 646, 25: 1606, 50: 3227, 75: 4832, 90: 5784, 95: 6110, 97.5: 7482, 99: 26058,
    99.5: 69098, 99.8: 99303, 99.9: 119794, 100: 124913,
}  # fmt: skip
"""Percentiles of the "Pretrain" lengths of arXiv 2510.18121, before long documents are drawn more often."""

_OPTIONS = {
    "lognormal": {"median": 4096.0, "sigma": 1.5, "max": MOST},
    "pretrain": {"scale": 1.0, "long": 0.0, "from": 65536.0, "max": MOST},
    "uniform": {"min": 128.0, "max": 65536.0},
    "fixed": {"length": 4096.0},
}
"""Kinds with their options and what these are if left out."""

_BOUNDS = {"sigma": (0.0, 20.0), "long": (0.0, 0.99), "scale": (1e-5, 1e5)}
"""Least and most of the options that are no tokens, of which there are 1 to ``MOST``."""


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
    batches = []
    for _ in range(documents.batches):
        ends = []
        last = 0
        while last < documents.step_tokens:
            drawn = rng.choice(
                documents.lengths, size=max(64, documents.step_tokens // 4096)
            )
            ends.append(last + np.cumsum(drawn))
            last = int(ends[-1][-1])
        cuts = np.union1d(
            np.concatenate(ends), np.arange(row, documents.step_tokens + 1, row)
        )
        cuts = cuts[cuts <= documents.step_tokens]
        lengths = np.diff(cuts, prepend=0)
        of_row = (cuts - 1) // row
        batches.append(
            Batch(tuple(np.split(lengths, np.flatnonzero(np.diff(of_row)) + 1)), row)
        )
    return batches


def read_corpus(name: str) -> dict[str, Any]:
    """Return a corpus' ``lengths``, and the sentence ``source`` that says where they are from."""
    return json.loads(CORPORA[name].read_text())


def named_lengths(spec: str) -> IntArray:
    """Return the samples of a corpus such as "codealpaca", or of a distribution such as
    "lognormal:median=4096,sigma=1.5,max=262144".

    ``pretrain``: the lengths of arXiv 2510.18121, ``scale`` times as long; ``long`` is the share of tokens in
    documents of ``from`` tokens and more, which are drawn more often to reach it (0: as often as they come).

    Returns:
        int64 lengths, the same in every call; of a distribution ``SAMPLES``.

    Raises:
        ValueError: the spec has a kind or an option that is not known, twice there, or out of its bounds.
    """
    if spec in CORPORA:
        return np.array(read_corpus(spec)["lengths"], dtype=np.int64)
    kind, _, rest = spec.partition(":")
    if kind not in _OPTIONS:
        raise ValueError(
            f"documents = {spec[:80]!r}: set a JSON file of lengths, or one of {', '.join((*_OPTIONS, *CORPORA))}"
        )
    options = {**_OPTIONS[kind], **_given_options(kind, spec, rest)}
    low = {"uniform": "min", "pretrain": "from"}.get(kind, "")
    if options.get(low, 0) > options.get("max", MOST) and options.get("long", 1) > 0:
        raise ValueError(
            f"documents = {spec[:80]!r}: {low} = {options[low]:.10g} is above max = {options['max']:.10g}; set max to "
            f"{low} or more"
        )
    try:
        drawn = _sample(kind, options)
    except ValueError as error:
        raise ValueError(f"documents = {spec[:80]!r}: {error}") from None
    return np.clip(np.rint(drawn), 1, MOST).astype(np.int64)


def _given_options(kind: str, spec: str, items: str) -> dict[str, float]:
    """Return the options that the spec sets. Raises ValueError for others than those of the kind, naming the spec."""
    options = dict[str, float]()
    for item in filter(None, items.split(",")):
        key, _, text = item.partition("=")
        if key not in _OPTIONS[kind] or key in options:
            known = ",".join(f"{name}=..." for name in _OPTIONS[kind])
            raise ValueError(
                f"documents = {spec[:80]!r}: {item[:40]!r} is none of {kind}:{known}, each of them once"
            )
        least, most = _BOUNDS.get(key, (1.0, MOST))
        try:
            options[key] = float(text)
        except ValueError:
            options[key] = float("nan")
        if not least <= options[key] <= most:
            raise ValueError(
                f"documents = {spec[:80]!r}: {item[:40]!r} must be a number, {least:g} to {most:.10g}"
            )
    return options


def _sample(kind: str, options: dict[str, float]) -> np.ndarray:
    share = (np.arange(SAMPLES) + 0.5) / SAMPLES
    match kind:
        case "lognormal":
            normal = np.random.default_rng(0).standard_normal(SAMPLES)
            drawn = options["median"] * np.exp(options["sigma"] * normal)
        case "pretrain":
            drawn = np.exp(
                np.interp(
                    100 * share, list(_PRETRAIN), np.log(list(_PRETRAIN.values()))
                )
            )
            drawn = _more_long(
                drawn * options["scale"], options["long"], options["from"]
            )
        case "uniform":
            drawn = options["min"] + share * (options["max"] - options["min"])
        case _:
            return np.full(SAMPLES, options["length"])
    return np.minimum(drawn, options["max"])


def _more_long(lengths: np.ndarray, share: float, least: float) -> np.ndarray:
    """As many samples, of which those from ``least`` tokens on hold ``share`` of the tokens if they held less.

    Raises:
        ValueError: a share is wanted of documents of which there are none.
    """
    long = lengths >= least
    tokens = lengths[long].sum()
    if share and not tokens:
        raise ValueError(
            f"from = {least:.10g} is above all lengths; set from to {lengths.max():.0f} or less"
        )
    if tokens >= share * lengths.sum():
        return lengths
    weight = np.where(long, share * lengths[~long].sum() / ((1 - share) * tokens), 1.0)
    ends = np.cumsum(weight) / weight.sum()
    return lengths[
        np.searchsorted(ends, (np.arange(len(lengths)) + 0.5) / len(lengths))
    ]
