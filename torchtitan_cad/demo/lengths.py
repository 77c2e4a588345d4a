# SPDX-License-Identifier: BSD-3-Clause
"""Distributions of documents' lengths, as `training.dataset_path` of the dataset `synthetic` names them. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan_cad.planning.files import read_json
from torchtitan_cad.planning.text import is_integer

EXAMPLES = {
    "lognormal": "lognormal:median=4096,sigma=1.5,max=262144,seed=1",
    "histogram": "histogram:lengths.json,seed=1,scale=4",
    "fixed": "fixed:300,200,5000",
}
MOST = 2**31 - 1
"""tokens of a document"""
BOUNDS = {"sigma": (0.0, 20.0), "scale": (1e-5, 1e5), "seed": (0, 2**53)}
"""Least and most of the options that are no tokens, of which there are 1 to ``MOST``."""


@dataclass(frozen=True)
class DocumentLengths:
    """A length distribution. Lengths are in tokens and include the EOS that ends the document."""

    kind: str
    options: Mapping[str, float]
    lengths: Sequence[int] = ()

    @property
    def seed(self) -> int:
        """Seed of the lengths, and of the tokens."""
        return int(self.options["seed"])

    def draw(self, document: int, rng: np.random.Generator) -> int:
        """Return the length of a document, by its number and a generator that belongs to it alone."""
        if self.kind == "fixed":
            return self.lengths[document % len(self.lengths)]
        if self.kind == "histogram":
            length = self.lengths[int(rng.integers(len(self.lengths)))]
            return max(1, round(length * self.options["scale"]))
        deviation = self.options["sigma"] * rng.standard_normal()
        most = self.options["max"]
        length = min(np.exp(np.log(self.options["median"]) + deviation), most)
        return int(np.clip(np.rint(length), 1, most))


def parse_lengths(spec: str | None) -> DocumentLengths:
    """Read a length distribution from `training.dataset_path`.

    The syntax is `kind:item,item,...`, an item being a value or `option=value`; `EXAMPLES` has one line for each kind:
    a lognormal distribution with a maximum, measured lengths that are drawn with replacement and multiplied by `scale`
    (the file is a JSON list), and lengths that come over and over.

    Raises:
        ValueError: naming the key, its value, what is wrong with it, and an example that works.
    """
    kind, _, text = (spec or "").partition(":")
    items = [item.strip() for item in text.split(",") if item.strip()]
    try:
        return _parse(kind, items)
    except ValueError as error:
        examples = [EXAMPLES[kind]] if kind in EXAMPLES else list(EXAMPLES.values())
        shown = "not set" if spec is None else f'= "{spec}"'
        raise ValueError(
            f'training.dataset_path {shown}, which is no length distribution for training.dataset = "synthetic": '
            f"{error}. Write for example "
            + " or ".join(f'"{example}"' for example in examples)
        ) from error


def _parse(kind: str, items: list[str]) -> DocumentLengths:
    if kind == "lognormal":
        defaults = {"median": 4096.0, "sigma": 1.5, "max": MOST, "seed": 0}
        return DocumentLengths(kind, read_options(items, defaults))
    if kind not in EXAMPLES:
        raise ValueError(f"the kind must be one of {', '.join(EXAMPLES)}")
    values = [item for item in items if "=" not in item]
    options = [item for item in items if "=" in item]
    if kind == "fixed":
        lengths = [int(value) for value in values]
        defaults = {"seed": 0}
    else:
        if len(values) != 1:
            raise ValueError("exactly one file must be named")
        lengths = read_json(values[0])
        defaults = {"scale": 1.0, "seed": 0}
    if not isinstance(lengths, list) or not lengths:
        raise ValueError("lengths must be a list of one or more")
    for length in lengths:
        if not is_integer(length, 1, MOST):
            raise ValueError(
                f"{str(length)[:40]} must be a whole number of tokens, 1 or more (EOS included)"
            )
    return DocumentLengths(kind, read_options(options, defaults), lengths)


def read_options(
    items: Sequence[str], defaults: Mapping[str, float]
) -> dict[str, float]:
    """Return the options, each ``name=value`` once, with defaults. Raises ValueError for items that are none."""
    options = dict[str, float]()
    for item in items:
        key, _, text = item.partition("=")
        if key not in defaults or key in options:
            known = ",".join(f"{name}=..." for name in defaults)
            raise ValueError(f"{item[:40]!r} must be one of {known}, each of them once")
        least, most = BOUNDS.get(key, (1, MOST))
        try:
            value = float(text)
        except ValueError:
            value = np.nan
        if not least <= value <= most:
            raise ValueError(
                f"{item[:40]!r} must be a number, {least:g} to {most:.10g}"
            )
        options[key] = value
    return {**defaults, **options}
