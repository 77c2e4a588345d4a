# SPDX-License-Identifier: BSD-3-Clause
"""Varlen attention refuses fewer key/value heads than query heads, with torch 2.13: shapes only, no device."""

import sys

import torch
from torch.nn.attention.varlen import varlen_attn
from torchtitan.models.attention import (
    VarlenAttentionWrapper,
    create_varlen_metadata_for_document,
)

QUERY_HEADS, KEY_HEADS, TOKENS, HEAD_DIM = 8, 2, 128, 64

VarlenAttentionWrapper._compiled_varlen_attn = (
    varlen_attn  # its checks are the same uncompiled
)
masks = create_varlen_metadata_for_document(
    torch.ones(1, TOKENS, dtype=torch.int64), eos_id=0
)
boundaries = masks.cu_seq_q.to("meta")
masks = masks._replace(cu_seq_q=boundaries, cu_seq_k=boundaries)
q, k = (
    torch.empty(1, n, TOKENS, HEAD_DIM, dtype=torch.bfloat16, device="meta")
    for n in (QUERY_HEADS, KEY_HEADS)
)
try:
    out = VarlenAttentionWrapper()(q, k, k, masks)
except ValueError as error:
    sys.exit(f"ValueError: {error}")
assert out.shape == (TOKENS, QUERY_HEADS, HEAD_DIM)
