# SPDX-License-Identifier: BSD-3-Clause
"""Flavors of deepseek_v3, llama4 and gpt_oss so small that starting the processes dominates a run."""

import functools

from torchtitan.models.deepseek_v3 import DeepSeekV3ModelArgs, deepseekv3_args
from torchtitan.models.gpt_oss import GptOssModelArgs, gptoss_configs
from torchtitan.models.llama4 import TransformerModelArgs, llama4_args
from torchtitan.models.llama4.model.args import RoPEScalingArgs
from torchtitan.models.moe import MoEArgs


def register_flavors() -> None:
    """Add them, with masks for documents that flex attention takes, and with plain causal sdpa where it is possible."""
    flex = {
        "vocab_size": 288,
        "dim": 64,
        "n_heads": 4,
        "attn_type": "flex",
        "attn_mask_type": "block_causal",
    }
    deepseek = functools.partial(
        DeepSeekV3ModelArgs,
        **flex,
        inter_dim=128,
        moe_inter_dim=32,
        n_layers=2,
        n_dense_layers=1,
        moe_args=MoEArgs(
            num_experts=4,
            num_shared_experts=1,
            top_k=2,
            score_func="sigmoid",
            route_norm=True,
        ),
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        original_seq_len=512,  # rows of tests are longer, so YaRN changes the scale of scores
        mscale=0.7,
    )
    deepseekv3_args["tiny"] = deepseek()
    deepseekv3_args["tiny_q_lora"] = deepseek(q_lora_rank=32)
    deepseekv3_args["tiny_sdpa"] = deepseek(attn_type="sdpa", attn_mask_type="causal")

    llama4 = functools.partial(
        TransformerModelArgs,
        **flex,
        n_layers=3,
        n_kv_heads=2,
        multiple_of=32,
        rope_scaling_args=RoPEScalingArgs(),
        moe_args=MoEArgs(num_experts=4),
        every_n_layers_nope=2,
        fixed_attn_block_size=256,
    )
    llama4_args["tiny"] = llama4()
    llama4_args["tiny_sdpa"] = llama4(
        every_n_layers_nope=None, attn_type="sdpa", attn_mask_type="causal"
    )

    gpt_oss = functools.partial(
        GptOssModelArgs,
        **flex,
        n_layers=2,
        n_kv_heads=2,
        head_dim=32,
        moe_inter_dim=32,
        moe_args=MoEArgs(
            num_experts=4,
            num_shared_experts=0,
            score_func="softmax",
            route_norm=True,
            gate_bias=True,
            score_before_experts=False,
            top_k=2,
        ),
    )
    gptoss_configs["tiny"] = gpt_oss(sliding_window_size=48)
    gptoss_configs["tiny_wide"] = gpt_oss(sliding_window_size=4096)
