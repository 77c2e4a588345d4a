# SPDX-License-Identifier: BSD-3-Clause
"""Synthetic documents with an exact length distribution, for benchmarks and tests.

Tokens carry no meaning; the lengths are the point: what attention costs depends on nothing else.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import IterableDataset, get_worker_info

from torchtitan_cad.planning.files import read_json

EXAMPLES = {
    "lognormal": "lognormal:median=4096,sigma=1.5,max=262144,seed=1",
    "histogram": "histogram:lengths.json,seed=1,scale=4",
    "fixed": "fixed:300,200,5000",
}


@dataclass(frozen=True)
class DocumentLengths:
    """A length distribution. Lengths are in tokens and include the EOS that ends the document."""

    seed: int
    draw: Callable[[int, np.random.Generator], int]
    """Length of a document, by its number and a generator that belongs to it alone."""


def _lognormal(
    document: int, rng: np.random.Generator, median: float, sigma: float, most: int
) -> int:
    """Draw exp(Normal(log(median), sigma)), rounded; what is longer than ``most`` is cut to that."""
    length = np.exp(np.log(median) + sigma * rng.standard_normal())
    return int(np.clip(np.rint(min(length, most)), 1, most))


def _histogram(
    document: int, rng: np.random.Generator, lengths: tuple[int, ...], scale: float
) -> int:
    return max(1, round(lengths[int(rng.integers(len(lengths)))] * scale))


def _fixed(document: int, rng: np.random.Generator, lengths: tuple[int, ...]) -> int:
    return lengths[document % len(lengths)]


def parse_lengths(spec: str | None) -> DocumentLengths:
    """Read a length distribution from `training.dataset_path`.

    The syntax is `kind:item,item,...`, an item being a value or `option=value`; `EXAMPLES` has one line for each kind:
    a lognormal distribution with a maximum, measured lengths that are drawn with replacement and multiplied by `scale`
    (the file is a JSON list), and lengths that come over and over.

    Raises:
        ValueError: naming the key, its value, what is wrong with it, and an example that works.
    """
    kind, _, rest = (spec or "").partition(":")
    items = [item.strip() for item in rest.split(",") if item.strip()]
    options = dict(item.split("=", 1) for item in items if "=" in item)
    values = [item for item in items if "=" not in item]
    try:
        _check(kind in EXAMPLES, f"the kind must be one of {', '.join(EXAMPLES)}")
        seed = int(options.pop("seed", 0))
        _check(seed >= 0, f"seed {seed} is negative")
        return DocumentLengths(seed, _parse_kind(kind, values, options))
    except ValueError as error:
        examples = [EXAMPLES[kind]] if kind in EXAMPLES else list(EXAMPLES.values())
        shown = "not set" if spec is None else f'= "{spec}"'
        raise ValueError(
            f'training.dataset_path {shown}, which is no length distribution for training.dataset = "synthetic": '
            f"{error}. Write for example "
            + " or ".join(f'"{example}"' for example in examples)
        ) from error


def _parse_kind(
    kind: str, values: list[str], options: dict[str, str]
) -> Callable[..., int]:
    needed = ["median", "sigma", "max"] if kind == "lognormal" else []
    known = {"lognormal": needed, "histogram": ["scale"], "fixed": []}[kind]
    _check(not set(needed) - options.keys(), f"{', '.join(needed)} must be given")
    _check(
        options.keys() <= set(known), f"the options are {', '.join([*known, 'seed'])}"
    )
    if kind == "lognormal":
        median = float(options["median"])
        sigma = float(options["sigma"])
        most = int(options["max"])
        _check(not values, f"{values} is not of the form option=value")
        _check(
            1 <= median < float("inf") and most >= 1,
            "median and max must be tokens, 1 or more",
        )
        _check(0 <= sigma < float("inf"), "sigma must be a number, 0 or more")
        return partial(_lognormal, median=median, sigma=sigma, most=most)
    if kind == "histogram":
        _check(len(values) == 1, "exactly one file must be named")
        scale = float(options.get("scale", 1))
        lengths = read_json(values[0])
        _check(0 < scale < float("inf"), "scale must be a number greater than 0")
        return partial(_histogram, lengths=_checked(lengths), scale=scale)
    return partial(_fixed, lengths=_checked([int(value) for value in values]))


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _checked(lengths: Any) -> tuple[int, ...]:
    numbers = (
        isinstance(lengths, list)
        and lengths
        and all(type(length) is int and length > 0 for length in lengths)
    )
    _check(
        bool(numbers),
        "lengths must be a list of whole numbers of tokens, 1 or more each (EOS included)",
    )
    return tuple(lengths)


class SyntheticDataset(IterableDataset, Stateful):
    """An endless stream of synthetic documents, packed into samples of `seq_len` tokens.

    Document i depends on the spec's seed and on i alone, and goes to dp rank i % dp_world_size (data-loader workers
    likewise). Its tokens are drawn from [0, vocab_size) except `eos_id`, which is the last one.

    Yields ({"input": int64 [seq_len]}, labels int64 [seq_len]) as torchtitan's text dataset does. Samples follow each
    other without a gap, so that document lengths are exact: the last label of one is the first input of the next.

    Raises:
        ValueError: for a bad spec, or a tokenizer without an EOS or with nothing but one.
    """

    def __init__(
        self,
        spec: str | None,
        *,
        eos_id: int | None,
        vocab_size: int,
        seq_len: int,
        dp_rank: int = 0,
        dp_world_size: int = 1,
    ) -> None:
        self._lengths = parse_lengths(spec)
        if eos_id is None or not 0 <= eos_id < vocab_size or vocab_size < 2:
            raise ValueError(
                'training.dataset = "synthetic" needs a tokenizer with an EOS token and at least one other token, but '
                f"the one at model.hf_assets_path has eos_id = {eos_id} and vocab_size = {vocab_size}. "
                "`torchtitan-cad prepare` writes one that fits"
            )
        self.spec = spec
        self.eos_id = eos_id
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.dp_rank = dp_rank
        self.dp_world_size = dp_world_size
        # Where the next sample starts: a document's place in this stream, and a token inside it.
        self._document = 0
        self._offset = 0
        self._cached: tuple[int, np.ndarray] | None = None

    def tokens(self, document: int) -> np.ndarray:
        """Return document number `document` of all, int64 [length], EOS included."""
        if self._cached is None or self._cached[0] != document:
            rng = np.random.default_rng((self._lengths.seed, document))
            tokens = np.empty(self._lengths.draw(document, rng), dtype=np.int64)
            tokens[:-1] = rng.integers(self.vocab_size - 1, size=len(tokens) - 1)
            tokens[:-1] += tokens[:-1] >= self.eos_id
            tokens[-1] = self.eos_id
            self._cached = (document, tokens)
        return self._cached[1]

    def _current(self) -> np.ndarray:
        worker = get_worker_info()
        workers, worker_id = (
            (worker.num_workers, worker.id) if worker is not None else (1, 0)
        )
        streams = self.dp_world_size * workers
        return self.tokens(
            self._document * streams + self.dp_rank * workers + worker_id
        )

    def _take(self, count: int) -> Iterator[np.ndarray]:
        while count:
            piece = self._current()[self._offset : self._offset + count]
            yield piece
            count -= len(piece)
            self._offset += len(piece)
            if self._offset == len(self._current()):
                self._document += 1
                self._offset = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            pieces = list(self._take(self.seq_len))
            after = self._current()[self._offset : self._offset + 1]
            sample = torch.from_numpy(np.concatenate([*pieces, after]))
            yield {"input": sample[:-1]}, sample[1:]

    def state_dict(self) -> dict[str, Any]:
        return {"spec": self.spec, "document": self._document, "offset": self._offset}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["spec"] != self.spec:
            raise ValueError(
                f'training.dataset_path = "{self.spec}", but the checkpoint was written with "{state_dict["spec"]}". '
                'Set that again, or add "dataloader" to checkpoint.exclude_from_loading to start a new stream'
            )
        self._document = state_dict["document"]
        self._offset = state_dict["offset"]
