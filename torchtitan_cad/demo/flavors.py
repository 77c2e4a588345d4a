# SPDX-License-Identifier: BSD-3-Clause
"""A Llama small enough to train on rows of many thousand tokens without an accelerator."""

FLAVOR = "debugmodel_cpu"


def register_flavors() -> None:
    """Add ``debugmodel_cpu`` to torchtitan's flavors of llama3; calling it again changes nothing.

    On long rows nearly all of a small model's time is attention, which grows with width times layers, so both are kept
    small: torchtitan's own ``debugmodel_varlen_attn`` (width 256, 6 layers) does twelve times the attention work.
    """
    from torchtitan.models.llama3 import TransformerModelArgs, llama3_args

    llama3_args[FLAVOR] = TransformerModelArgs(
        dim=64,
        n_layers=2,
        n_heads=2,
        vocab_size=2048,
        rope_theta=500000,
        attn_type="varlen",
        attn_mask_type="block_causal",
    )
