# SPDX-License-Identifier: BSD-3-Clause
"""Where documents begin in a batch."""

import numpy as np
import torch
from torch import Tensor

DOCUMENT_IDS = "document_ids"
"""Optional key of a batch: integers [B, S]; a document begins wherever the value changes along a row."""


def document_starts(tokens: Tensor, eos_id: int | None, document_ids: Tensor | None = None) -> np.ndarray:
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


def cut_for_halves(rows: Tensor, cp: int) -> Tensor:
    """Reorder rows [B, S] so that contiguous slices over ``cp`` ranks have equal parts of both halves of the sequence.

    Of 2 cp chunks, rank r gets chunks r and cp + r, one after the other.
    """
    return rows.unflatten(1, (2, cp, -1)).transpose(1, 2).flatten(1)
