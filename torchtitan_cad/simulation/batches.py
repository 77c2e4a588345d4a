# SPDX-License-Identifier: BSD-3-Clause
"""Batches of documents, and named distributions of their lengths, as samples to draw from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.text import is_number
from torchtitan_cad.simulation.inputs import Documents

SAMPLES = 20_000

DEFAULT = "lognormal:median=4096,sigma=1.5"

_PRETRAIN = {
    0: 1, 1: 63, 5: 324, 10: 646, 25: 1606, 50: 3227, 75: 4832, 90: 5784, 95: 6110, 97.5: 7482, 99: 26058,
    99.5: 69098, 99.8: 99303, 99.9: 119794, 100: 124913,
}  # fmt: skip
"""Percentiles of the "Pretrain" lengths of arXiv 2510.18121, before long documents are drawn more often."""

_OPTIONS = {
    "lognormal": {"median": 4096.0, "sigma": 1.5, "max": 2.0**31},
    "pretrain": {"scale": 1.0, "long": 0.0, "from": 65536.0, "max": 2.0**31},
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

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return len(self.rows) * self.row_tokens


def draw_batches(documents: Documents) -> list[Batch]:
    """Return the batches that are given, or draw some by the seed; what a row's end cuts off begins the next row."""
    row = documents.row_tokens
    if documents.given:
        return [Batch(rows, row) for rows in documents.given]
    rng = np.random.default_rng(documents.seed)
    batches = []
    for _ in range(documents.batches):
        ends, last = [], 0
        while last < documents.step_tokens:
            drawn = rng.choice(documents.lengths, size=max(64, documents.step_tokens // 4096))
            ends.append(last + np.cumsum(drawn))
            last = int(ends[-1][-1])
        cuts = np.union1d(np.concatenate(ends), np.arange(row, documents.step_tokens + 1, row))
        cuts = cuts[cuts <= documents.step_tokens]
        lengths, of_row = np.diff(cuts, prepend=0), (cuts - 1) // row
        batches.append(Batch(tuple(np.split(lengths, np.flatnonzero(np.diff(of_row)) + 1)), row))
    return batches


def named_lengths(spec: str) -> IntArray:
    """Return the samples of a distribution such as "lognormal:median=4096,sigma=1.5,max=262144".

    ``pretrain``: the lengths of arXiv 2510.18121, ``scale`` times as long; ``long`` is the share of tokens in
    documents of ``from`` tokens and more, which are drawn more often to reach it (0: as often as they come).

    Returns:
        int64 ``SAMPLES`` lengths, the same in every call.

    Raises:
        ValueError: the spec has a kind or an option that is not known.
    """
    kind, _, rest = spec.partition(":")
    if kind not in _OPTIONS:
        raise ValueError(f"documents = {spec[:80]!r}: set a JSON file of lengths, or one of {', '.join(_OPTIONS)}")
    options = dict(_OPTIONS[kind])
    for item in filter(None, rest.split(",")):
        key, _, text = item.partition("=")
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if key not in options or not is_number(value) or value < 0 or (value == 0 and key not in ("sigma", "long")):
            known = ",".join(f"{name}=..." for name in options)
            raise ValueError(
                f"documents = {spec[:80]!r}: {item[:40]!r} is none of {kind}:{known}; write positive numbers"
            )
        options[key] = value
    return np.clip(np.rint(_sample(kind, options)), 1, 2**31 - 1).astype(np.int64)


def _sample(kind: str, options: dict[str, float]) -> np.ndarray:
    share = (np.arange(SAMPLES) + 0.5) / SAMPLES
    match kind:
        case "lognormal":
            normal = np.random.default_rng(0).standard_normal(SAMPLES)
            drawn = options["median"] * np.exp(options["sigma"] * normal)
        case "pretrain":
            drawn = np.exp(np.interp(100 * share, list(_PRETRAIN), np.log(list(_PRETRAIN.values()))))
            drawn = _more_long(drawn * options["scale"], options["long"], options["from"])
        case "uniform":
            drawn = options["min"] + share * max(0.0, options["max"] - options["min"])
        case _:
            return np.full(SAMPLES, options["length"])
    return np.minimum(drawn, options["max"])


def _more_long(lengths: np.ndarray, share: float, least: float) -> np.ndarray:
    """As many samples, of which those from ``least`` tokens on hold ``share`` of the tokens if they held less."""
    long = lengths >= least
    tokens = lengths[long].sum()
    if not 0 < tokens < share * lengths.sum() or share >= 1:
        return lengths
    weight = np.where(long, share * lengths[~long].sum() / ((1 - share) * tokens), 1.0)
    ends = np.cumsum(weight) / weight.sum()
    return lengths[np.searchsorted(ends, (np.arange(len(lengths)) + 0.5) / len(lengths))]
