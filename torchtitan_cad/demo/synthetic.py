# SPDX-License-Identifier: BSD-3-Clause
"""Synthetic documents with an exact length distribution, for benchmarks and tests.

Tokens carry no meaning; the lengths are the point: what attention costs depends on nothing else.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import IterableDataset, get_worker_info

from torchtitan_cad.demo.lengths import parse_lengths


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
