# SPDX-License-Identifier: BSD-3-Clause
"""Stock torchtitan 0.2.2's flex attention on CPU: its masks as dense booleans, its attention as a dense softmax.

FlexAttention has no backward on CPU. Masks stay those of the models' own ``get_attention_masks``, but for two places
where torchtitan 0.2.2 does not do what it means to: llama4 hands all of its masks to flex attention instead of the
layer's, and gpt_oss's mask for documents lets queries see later keys.
"""

import functools

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks
from torchtitan.models.attention import (
    FlexAttentionWrapper,
    get_causal_mask_mod,
    get_document_mask_mod,
)
from torchtitan.models.deepseek_v3.model import model as deepseek_v3
from torchtitan.models.gpt_oss.model import model as gpt_oss
from torchtitan.models.llama4.model import model as llama4


def install() -> None:
    """Make flex attention of this process dense. A process with CAD does not use it."""
    for module in (deepseek_v3, gpt_oss, llama4):
        module.create_attention_mask = dense_mask
        module.BlockMask = Tensor
    # what it stands for, to CAD, which refuses to replace a user's
    dense_attention.__module__ = FlexAttentionWrapper.__module__
    FlexAttentionWrapper.forward = dense_attention
    gpt_oss.get_document_mask_mod = causal_document_mask
    # keeps the precision of the job instead of bfloat16
    gpt_oss.TransformerBlock.to = lambda self, dtype: self
    init = llama4.Attention.__init__

    @functools.wraps(init)
    def init_and_tell(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.inner_attention.mask = "rope" if self.use_rope else "nope"

    llama4.Attention.__init__ = init_and_tell


def dense_mask(mask_mod, rows, heads, queries, keys):
    """The mask [B, 1, Q, K], True where a query sees a key; arguments as of torchtitan's ``create_attention_mask``."""
    row = torch.arange(rows)
    query = torch.arange(queries)
    key = torch.arange(keys)
    zero = torch.zeros((), dtype=torch.int64)
    mask = mask_mod(row[:, None, None, None], zero, query[:, None], key)
    return mask.expand(rows, 1, queries, keys)


def causal_document_mask(batch, eos_id):
    return and_masks(get_causal_mask_mod(), get_document_mask_mod(batch, eos_id))


def dense_attention(self, q, k, v, *, block_mask, scale=None, return_lse=False, **_):
    """Attention of q [B, H, S, D], k and v, and its log-sum-exp [B, H, S] if asked for."""
    if isinstance(block_mask, dict):
        block_mask = block_mask[self.mask]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) * (scale or q.shape[-1] ** -0.5)
    scores = scores.masked_fill(~block_mask, -torch.inf)
    lse = scores.logsumexp(dim=-1)
    out = (scores - lse.unsqueeze(-1)).exp() @ v
    return (out, lse) if return_lse else out
