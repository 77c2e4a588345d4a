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
        """Return the ``document_starts`` of a batch's inputs; ValueError for boundaries that it lacks."""
        tokens = inputs["input"]
        document_ids = inputs.get(DOCUMENT_IDS)
        if document_ids is not None or not self.by_positions:
            return document_starts(tokens, self.eos_id, document_ids)
        if (
            positions := inputs.get(OWN_POSITIONS)
        ) is None or positions.shape != tokens.shape:
            found = (
                "none"
                if positions is None
                else f"one of shape {tuple(positions.shape)}"
            )
            raise ValueError(
                f"cad.documents = 'positions' needs a batch key {OWN_POSITIONS!r} of shape {tuple(tokens.shape)}, and "
                f"the data loader gives {found}; let it give one, or set cad.documents to 'eos' or 'row'"
            )
        return document_starts(tokens, None, (positions == 0).cumsum(1))

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


def document_starts(
    tokens: Tensor, eos_id: int | None, document_ids: Tensor | None = None
) -> np.ndarray:
    """Find the flat positions (row * S + column) at which documents begin; every row begins one.

    Args:
        tokens: [B, S] input ids.
        eos_id: a document ends after every token with this id; None makes every row one document.
        document_ids: [B, S] explicit boundaries, used instead of EOS tokens. ValueError for another shape.

    Returns:
        int64, ascending, all multiples of S below B * S included.
    """
    batch, seq_len = tokens.shape
    starts = torch.zeros(batch, seq_len, dtype=torch.bool)
    starts[:, 0] = True
    if document_ids is not None:
        if document_ids.shape != tokens.shape:
            raise ValueError(
                f"batch key '{DOCUMENT_IDS}' has shape {tuple(document_ids.shape)}, the tokens {tuple(tokens.shape)}; "
                "give one id per token"
            )
        starts[:, 1:] |= (document_ids[:, 1:] != document_ids[:, :-1]).cpu()
    elif eos_id is not None:
        starts[:, 1:] |= (tokens[:, :-1] == eos_id).cpu()
    return np.flatnonzero(starts.numpy())


def cut_for_nano_batches(rows: Tensor, cp: int) -> Tensor:
    """Reorder rows [B, S] so that contiguous slices over ``cp`` ranks have equal parts of both halves of the sequence.

    Of 2 cp chunks, rank r gets chunks r and cp + r, one after the other.
    """
    return rows.unflatten(1, (2, cp, -1)).transpose(1, 2).flatten(1)
