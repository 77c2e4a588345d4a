# SPDX-License-Identifier: BSD-3-Clause
"""Pipelines give each microbatch the document boundaries of others: how a schedule splits them, without attention."""

import sys
from typing import Any

import torch
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torchtitan.models import attention

EOS, MICROBATCHES = 0, 2
TOKENS = torch.tensor([[1, EOS, 2, 3, EOS, 4, 5, 6], [1, 2, 3, 4, 5, EOS, 6, 7]])
HEADS = torch.zeros(len(TOKENS), 1, TOKENS.shape[1], 16)


def boundaries(heads: torch.Tensor, masks: attention.VarlenMetadata) -> torch.Tensor:
    """Return the cu_seqlens that the wrapper hands to the kernel, without those of empty documents."""
    seen: list[torch.Tensor] = []

    def kernel(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seq_q: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> None:
        seen.append(cu_seq_q)

    attention.VarlenAttentionWrapper._compiled_varlen_attn = kernel
    attention.VarlenAttentionWrapper()(heads, heads, heads, masks)
    return seen[0].unique_consecutive()


masks = attention.create_varlen_metadata_for_document(TOKENS, EOS)
args, kwargs = split_args_kwargs_into_chunks(
    (HEADS,), {"attention_masks": masks}, MICROBATCHES
)
for i, rows in enumerate(TOKENS.chunk(MICROBATCHES)):
    expected = boundaries(
        args[i][0], attention.create_varlen_metadata_for_document(rows, EOS)
    ).tolist()
    actual = boundaries(args[i][0], kwargs[i]["attention_masks"]).tolist()
    if actual != expected:
        sys.exit(
            f"the kernel gets document boundaries {actual} for microbatch {i}, whose tokens have {expected}"
        )
