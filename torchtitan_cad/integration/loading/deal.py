"""Dealing a batch's tokens to the homes that ``place`` has found for them (``cad.placement``).

All ranks of a CAD group know the homes that the loader gave and those that the tokens get, so only ids and labels
travel: who sends what to whom, and every token's position for RoPE, follow from the layouts.

Ranks of one data-parallel coordinate load the same rows, which torchtitan cuts among context-parallel ranks afterwards.
Tokens are therefore dealt between data-parallel ranks, whole rows each, among ranks that agree in all other
coordinates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchtitan_cad.planning import TokenLayout

POSITIONS = "cad_positions"
"""Key of a dealt batch: int32 [B, S], every token's column in the row that it was loaded in, which RoPE goes by."""


@dataclass(frozen=True, eq=False)
class Deal:
    """Tokens that one data-parallel rank sends and receives. A flat position is row * S + column in a batch of B rows.

    Tokens travel in the order of (peer, layout, document, position).

    Attributes (all int64):
        sent: [B * S] flat positions of the tokens that were loaded, in the order in which they are sent.
        send_counts: [dp] how many go to each data-parallel rank.
        received: [B * S] flat positions of what comes, in the order in which it comes.
        receive_counts: [dp] how many come from each.
        source: [B * S] flat positions of what comes, in the batch of the rank that loaded it.
    """

    sent: Tensor
    send_counts: list[int]
    received: Tensor
    receive_counts: list[int]
    source: Tensor

    def scatter(self, came: Tensor) -> Tensor:
        """Reorder ``came`` [B * S, ...] from the order of arrival to that of the batch."""
        dealt = torch.empty_like(came)
        dealt[self.received] = came
        return dealt

    def positions(self, seq_len: int) -> Tensor:
        """Give the batch's positions [B, S]; see ``POSITIONS``."""
        return self.scatter((self.source % seq_len).to(torch.int32)).view(-1, seq_len)


def make_deal(
    given: Sequence[TokenLayout], homes: Sequence[TokenLayout], slots: Sequence[np.ndarray], dp_rank: int
) -> Deal:
    """Return the part of data-parallel rank ``dp_rank`` in dealing a batch.

    Args:
        given, homes: layouts of the batch's parts, old and new: the same documents, as many tokens on every rank.
        slots: of every part, [slices, tokens] flat positions of a rank's tokens in layout order; rank r of the layouts
            is slice r % slices of data-parallel rank r // slices.
    """
    ways: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    offset = 0
    for old, new, slot in zip(given, homes, slots, strict=True):
        for mine, other, way in ((old, new, ways[0]), (new, old, ways[1])):
            ranks = range(dp_rank * len(slot), (dp_rank + 1) * len(slot))
            token = np.concatenate([mine.rank_positions(rank) for rank in ranks])
            run = np.searchsorted(other.run_start, token, side="right") - 1
            peer, cut = np.divmod(other.run_rank[run], len(slot))
            there = slot[cut, other.run_row[run] + token - other.run_start[run]]
            way.append(np.stack([peer, offset + token, slot.ravel(), there]))
        offset += old.num_tokens
    (out, _, out_counts), (into, source, into_counts) = (
        _in_order(np.concatenate(way, axis=1), given[0].num_ranks // len(slots[0])) for way in ways
    )
    return Deal(out, out_counts, into, into_counts, source)


def _in_order(tokens: np.ndarray, num_peers: int) -> tuple[Tensor, Tensor, list[int]]:
    """From columns (peer, number, flat position here and there), give the last two by peer and number, and counts."""
    order = np.lexsort((tokens[1], tokens[0]))
    here, there = (torch.from_numpy(tokens[row][order]) for row in (2, 3))
    return here, there, np.bincount(tokens[0], minlength=num_peers).tolist()


def check_dealable(inputs: Mapping[str, Tensor], labels: Tensor) -> None:
    """Raise ValueError unless a batch is ids [B, S] and labels [B, S], and nothing else."""
    remedy = "; give integers [B, S] for tokens and labels alone, or set cad.placement to 'loader'"
    if others := sorted(inputs.keys() - {"input"}):
        raise ValueError(f"cad.placement cannot deal batch key {others[0]!r} with the tokens{remedy}")
    tokens = inputs["input"]
    if labels.shape != tokens.shape or tokens.is_floating_point() or labels.is_floating_point():
        raise ValueError(
            f"cad.placement cannot deal labels {labels.dtype} {tuple(labels.shape)} with tokens "
            f"{tokens.dtype} {tuple(tokens.shape)}{remedy}"
        )
