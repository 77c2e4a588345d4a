# SPDX-License-Identifier: BSD-3-Clause
"""Lengths of named corpora, each a file of lengths/ that says where they are from.

A file has ``lengths`` in tokens, or ``shares`` of the tokens in documents of one length and the lognormal distribution
of all others, ``short``.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray

_FILES = Path(__file__).with_name("lengths")
_NAMES = [path.stem for path in _FILES.glob("*.json")]
CORPORA = tuple(sorted(_NAMES))
"""Names of the corpora."""


def corpus_source(name: str) -> str:
    """Return a sentence that says where the lengths are from."""
    return _read(name)["source"]


def corpus_lengths(name: str, samples: int) -> FloatArray:
    """Return lengths to draw from: all that are known, or ``samples`` of a mixture."""
    corpus = _read(name)
    if "lengths" in corpus:
        return np.array(corpus["lengths"], dtype=np.float64)
    random = np.random.default_rng(0)
    normal = random.standard_normal(samples)
    of_short = corpus["short"]
    sigma = of_short["sigma"]
    median = of_short["median"]
    short = median * np.exp(sigma * normal)
    shares = np.array(corpus["shares"])
    length = shares[:, 0]
    share = shares[:, 1]
    # documents of a token of the corpus
    long_ones = share / length
    short_ones = (1 - share.sum()) / short.mean()
    every = long_ones.sum() + short_ones
    counts = np.rint(samples * long_ones / every)
    long = np.repeat(length, counts.astype(int))
    rest = short[len(long) :]
    return np.concatenate([long, rest])


def _read(name: str) -> dict[str, Any]:
    path = _FILES / f"{name}.json"
    return json.loads(path.read_text())
