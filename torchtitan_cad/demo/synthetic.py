"""Synthetic documents with an exact length distribution, for benchmarks and tests.

Tokens carry no meaning; the lengths are the point: what attention costs depends on nothing else.
`datasets.py` connects it to torchtitan.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import IterableDataset, get_worker_info

EXAMPLES = {
    "lognormal": "lognormal:median=4096,sigma=1.5,max=262144,seed=1",
    "histogram": "histogram:lengths.json,seed=1,scale=4",
    "fixed": "fixed:300,200,5000",
}


class DocumentLengths(Protocol):
    """A length distribution. Lengths are in tokens and include the EOS that ends the document."""

    @property
    def seed(self) -> int: ...

    def draw(self, document: int, rng: np.random.Generator) -> int:
        """Return the length of document number `document`, >= 1; `rng` belongs to that document alone."""


@dataclass(frozen=True)
class Lognormal:
    """exp(Normal(log(median), sigma)), rounded; what is longer than `max` is cut to `max`."""

    median: float
    sigma: float
    max: int
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self.median >= 1, "median must be at least 1 token")
        _check(0 <= self.sigma < float("inf"), "sigma must be a number, 0 or more")
        _check(self.max >= 1, "max must be at least 1 token")

    def draw(self, document: int, rng: np.random.Generator) -> int:
        length = np.exp(np.log(self.median) + self.sigma * rng.standard_normal())
        return int(np.clip(np.rint(min(length, self.max)), 1, self.max))


@dataclass(frozen=True)
class Histogram:
    """Draws with replacement from measured lengths, each multiplied by `scale`."""

    lengths: tuple[int, ...]
    seed: int = 0
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_lengths(self.lengths)
        _check(0 < self.scale < float("inf"), "scale must be a number greater than 0")

    def draw(self, document: int, rng: np.random.Generator) -> int:
        length = self.lengths[int(rng.integers(len(self.lengths)))]
        return max(1, round(length * self.scale))


@dataclass(frozen=True)
class Fixed:
    """The given lengths over and over: document i has length lengths[i % len(lengths)]."""

    lengths: tuple[int, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        _check_lengths(self.lengths)

    def draw(self, document: int, rng: np.random.Generator) -> int:
        return self.lengths[document % len(self.lengths)]


def parse_lengths(spec: str | None) -> DocumentLengths:
    """Read a length distribution from `training.dataset_path`.

    The syntax is `kind:item,item,...`, an item being a value or `option=value`; `EXAMPLES` has one line for each kind.
    A histogram file is a JSON list of lengths in tokens.

    Raises:
        ValueError: naming the key, its value, what is wrong with it, and an example that works.
    """
    kind, _, rest = (spec or "").partition(":")
    items = [item.strip() for item in rest.split(",") if item.strip()]
    options = dict(item.split("=", 1) for item in items if "=" in item)
    values = [item for item in items if "=" not in item]
    try:
        match kind:
            case "lognormal":
                _check(not values, f"{values} is not of the form option=value")
                _check_options(options, required=("median", "sigma", "max"), optional=("seed",))
                return Lognormal(
                    median=float(options["median"]),
                    sigma=float(options["sigma"]),
                    max=int(options["max"]),
                    seed=_seed(options),
                )
            case "histogram":
                _check(len(values) == 1, "exactly one file must be named")
                _check_options(options, optional=("seed", "scale"))
                return Histogram(
                    lengths=_read_histogram(Path(values[0])),
                    seed=_seed(options),
                    scale=float(options.get("scale", 1)),
                )
            case "fixed":
                _check_options(options, optional=("seed",))
                return Fixed(lengths=tuple(int(value) for value in values), seed=_seed(options))
            case _:
                raise ValueError(f"the kind must be one of {', '.join(EXAMPLES)}")
    except ValueError as error:
        examples = [EXAMPLES[kind]] if kind in EXAMPLES else list(EXAMPLES.values())
        shown = "not set" if spec is None else f'= "{spec}"'
        raise ValueError(
            f'training.dataset_path {shown}, which is no length distribution for training.dataset = "synthetic": '
            f"{error}. Write for example " + " or ".join(f'"{example}"' for example in examples)
        ) from error


class SyntheticDataset(IterableDataset, Stateful):
    """An endless stream of synthetic documents, packed into samples of `seq_len` tokens.

    Document i depends on the spec's seed and on i alone. Documents are dealt in turn, number i to dp rank
    i % dp_world_size (data-loader workers likewise), so that ranks never share one and a stream does not depend on what
    other ranks do. Inside a document no token equals `eos_id`; its last token is `eos_id`.

    Yields ({"input": int64 [seq_len]}, labels int64 [seq_len]) as torchtitan's text dataset does. That one drops the
    token between two samples; here samples follow each other without a gap, so that document lengths are exact: the
    last label of a sample is the first input of the next.

    Args:
        spec: a length distribution, see `parse_lengths`.
        eos_id: the token that ends a document.
        vocab_size: tokens are drawn from [0, vocab_size).
        seq_len: tokens in a sample.

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
        workers, worker_id = (worker.num_workers, worker.id) if worker is not None else (1, 0)
        streams = self.dp_world_size * workers
        return self.tokens(self._document * streams + self.dp_rank * workers + worker_id)

    def _take(self, count: int) -> Iterator[np.ndarray]:
        while count:
            piece = self._current()[self._offset : self._offset + count]
            yield piece
            count -= len(piece)
            self._offset += len(piece)
            if self._offset == len(self._current()):
                self._document, self._offset = self._document + 1, 0

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
        self._document, self._offset = state_dict["document"], state_dict["offset"]


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_lengths(lengths: tuple[int, ...]) -> None:
    _check(bool(lengths), "at least one length must be given")
    _check(min(lengths) >= 1, f"length {min(lengths)} is not a positive number of tokens (EOS included)")


def _check_options(options: dict[str, str], required: tuple[str, ...] = (), optional: tuple[str, ...] = ()) -> None:
    missing = [name for name in required if name not in options]
    _check(not missing, f"{', '.join(missing)} missing")
    unknown = [name for name in options if name not in required + optional]
    _check(not unknown, f"unknown {', '.join(unknown)}; the options are {', '.join(required + optional)}")


def _seed(options: dict[str, str]) -> int:
    seed = int(options.get("seed", 0))
    _check(seed >= 0, f"seed {seed} is negative")
    return seed


def _read_histogram(path: Path) -> tuple[int, ...]:
    try:
        lengths = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
    _check(
        isinstance(lengths, list) and all(type(length) is int for length in lengths),
        f"{path} is not a JSON list of whole numbers",
    )
    return tuple(lengths)
