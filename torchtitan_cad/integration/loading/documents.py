# SPDX-License-Identifier: BSD-3-Clause
"""Where documents begin in a batch."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

DOCUMENT_IDS = "document_ids"
"""Optional key of a batch: integers [B, S]; a document begins wherever the value changes along a row."""


OWN_POSITIONS = "positions"
"""Optional key of a batch: integers [B, S], every token's position for RoPE, as torchtitan's models call it."""


@dataclass(frozen=True)
class DocumentRule:
    """How the documents of a batch are told apart, unless it has ``document_ids``.

    Attributes:
        eos_id: a document ends after every token with this id; None: no token ends one.
        by_positions: a document begins wherever the batch's ``positions`` are 0.
    """

    eos_id: int | None = None
    by_positions: bool = False

    def starts(self, inputs: Mapping[str, Tensor]) -> np.ndarray:
        """Find the flat positions (row * S + column) at which documents begin; every row begins one.

        Args:
            inputs: ids [B, S] by the key "input", and maybe boundaries of the batch's own.

        Returns:
            int64, ascending, all multiples of S below B * S included.

        Raises ValueError for boundaries that the batch lacks, or that have another shape.
        """
        tokens = inputs["input"]
        begins = torch.zeros_like(tokens, dtype=torch.bool)
        begins[:, 0] = True
        if DOCUMENT_IDS in inputs:
            ids = _of_tokens(inputs, DOCUMENT_IDS)
            begins[:, 1:] |= ids[:, 1:] != ids[:, :-1]
        elif self.by_positions:
            begins |= _of_tokens(inputs, OWN_POSITIONS) == 0
        elif self.eos_id is not None:
            begins[:, 1:] |= tokens[:, :-1] == self.eos_id
        return np.flatnonzero(begins.cpu().numpy())

    def lengths(self, inputs: Mapping[str, Tensor]) -> list[list[int]]:
        """Return the tokens of the documents of every row of a batch, in order."""
        starts = self.starts(inputs)
        rows, row_tokens = inputs["input"].shape
        lengths = np.diff(starts, append=rows * row_tokens)
        first_of_rows = np.searchsorted(starts, row_tokens * np.arange(1, rows))
        return [row.tolist() for row in np.split(lengths, first_of_rows)]

    @property
    def described(self) -> str:
        """The rule in a clause."""
        if self.by_positions:
            return "a document begins where positions are 0"
        return (
            "every row is one document"
            if self.eos_id is None
            else f"a document ends after EOS = {self.eos_id}"
        )


def _of_tokens(inputs: Mapping[str, Tensor], key: str) -> Tensor:
    """Return a batch's integers [B, S] of a key."""
    shape = inputs["input"].shape
    values = inputs.get(key)
    if values is None or values.shape != shape:
        found = "none" if values is None else f"one of shape {tuple(values.shape)}"
        raise ValueError(
            f"documents are told apart by the batch key {key!r} of shape {tuple(shape)}, and the data loader gives "
            f"{found}; let it give one, or leave it out and set cad.documents to 'eos' or 'row'"
        )
    return values


def cut_for_nano_batches(rows: Tensor, cp: int) -> Tensor:
    """Reorder rows [B, S] so that contiguous slices over ``cp`` ranks have equal parts of both halves of the sequence.

    Of 2 cp chunks, rank r gets chunks r and cp + r, one after the other.
    """
    return rows.unflatten(1, (2, cp, -1)).transpose(1, 2).flatten(1)
