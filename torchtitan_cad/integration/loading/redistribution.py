# SPDX-License-Identifier: BSD-3-Clause
"""Redistributing the tokens of an optimizer step to the homes that ``plan_step`` has found for them
(``cad.placement``).

All ranks of a CAD group know the homes that the loader gave and those that the tokens get, from which follows who sends
what to whom: ids, labels and every token's position for RoPE.

Ranks of one data-parallel coordinate load the same rows, which torchtitan cuts among context-parallel ranks afterwards.
Tokens are therefore redistributed between data-parallel ranks, whole rows each, among ranks that agree in all other
coordinates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchtitan_cad.integration.loading.documents import OWN_POSITIONS
from torchtitan_cad.planning import TokenLayout
from torchtitan_cad.planning.intervals import concat_ranges

Batch = tuple[dict[str, Tensor], Tensor]
"""Inputs by name, and labels."""

POSITIONS = "cad_positions"
"""Key of a redistributed batch: int32 [B, S], which RoPE goes by: every token's own position, where the batch had some,
or else its column in the row that it was loaded in."""


@dataclass(frozen=True, eq=False)
class Redistribution:
    """Tokens that one data-parallel rank sends and receives. A flat position is row * S + column in B rows of a step.

    Tokens travel in the order of (peer, document, position).

    Attributes (all int64):
        sent: [B * S] flat positions of the tokens that were loaded, in the order in which they are sent.
        send_counts: [dp] how many go to each data-parallel rank.
        received: [B * S] flat positions of what comes, in the order in which it comes.
        receive_counts: [dp] how many come from each.
    """

    sent: Tensor
    send_counts: list[int]
    received: Tensor
    receive_counts: list[int]


def make_redistribution(
    loaded: Sequence[TokenLayout],
    homes: Sequence[TokenLayout],
    slots: Sequence[np.ndarray],
    dp_rank: int,
) -> Redistribution:
    """Return the part of data-parallel rank ``dp_rank`` in redistributing a step.

    Args:
        loaded, homes: layouts of the step's parts, old and new: between them the same documents, whose ids are those
            of the step, and in each part as many tokens on every rank.
        slots: of every part, [slices, tokens] flat positions of a rank's tokens in layout order; rank r of the layouts
            is slice r % slices of data-parallel rank r // slices.
    """
    num_ranks = loaded[0].num_ranks
    slot = np.stack(slots)
    slices = slot.shape[1]
    old = _joined(loaded)
    new = _joined(homes)
    ways = []
    for layout, other in ((old, new), (new, old)):
        own = layout.seg_rank % num_ranks // slices == dp_rank
        token = concat_ranges(
            layout.global_position(layout.seg_doc[own], layout.seg_start[own]),
            layout.seg_length[own],
        )
        run = np.searchsorted(other.run_start, token, side="right") - 1
        peer = other.run_rank[run] % num_ranks // slices
        order = np.lexsort((token, peer))
        counts = np.bincount(peer, minlength=num_ranks // slices).tolist()
        ways.append((torch.from_numpy(slot.ravel()[order]), counts))
    (sent, send_counts), (received, receive_counts) = ways
    return Redistribution(sent, send_counts, received, receive_counts=receive_counts)


def _joined(parts: Sequence[TokenLayout]) -> TokenLayout:
    """Join parts into one layout over parts x ranks, which may have more tokens than others."""
    num_ranks = parts[0].num_ranks
    ranks = np.concatenate(
        [part.seg_rank + number * num_ranks for number, part in enumerate(parts)]
    )
    doc, start, length = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("seg_doc", "seg_start", "seg_length")
    )
    return TokenLayout(
        len(parts) * num_ranks,
        ranks,
        doc,
        seg_start=start,
        seg_length=length,
        seg_attends=np.ones(len(ranks), dtype=bool),
    )


def columns_of(inputs: Mapping[str, Tensor], labels: Tensor) -> list[Tensor]:
    """Return what travels of a batch: ids, labels and positions, all [B, S]; by default these are columns."""
    tokens = inputs["input"]
    positions = inputs.get(OWN_POSITIONS)
    if positions is None:
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        positions = columns.expand_as(tokens)
    return [tokens, labels, positions]


def check_redistributable(inputs: Mapping[str, Tensor], labels: Tensor) -> None:
    """Raise ValueError unless a batch is ids, labels and maybe positions, all integers [B, S], and nothing else."""
    remedy = "; give integers [B, S] for tokens, labels and positions alone, or set cad.placement to 'loader'"
    unknown = sorted(inputs.keys() - {"input", OWN_POSITIONS})
    if unknown:
        raise ValueError(
            f"cad.placement cannot redistribute batch key {unknown[0]!r} with the tokens{remedy}"
        )
    columns = columns_of(inputs, labels)
    shape = columns[0].shape
    for name, column in zip(("tokens", "labels", OWN_POSITIONS), columns, strict=True):
        if column.shape != shape or column.is_floating_point():
            raise ValueError(
                f"cad.placement cannot redistribute {name} {column.dtype} {tuple(column.shape)} with tokens of shape "
                f"{tuple(shape)}{remedy}"
            )
