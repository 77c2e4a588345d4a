# SPDX-License-Identifier: BSD-3-Clause
"""Core attention as torchtitan's models see it: an inner attention that a config selects."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
from torch import Tensor
from torchtitan.protocols.module import Module

from torchtitan_cad.runtime.ops import core_attention


class CadAttention(Module):
    """Attends through a core-attention engine, in place of torchtitan's ``VarlenAttention``.

    It does not derive from that class: torchtitan refuses context parallelism with it, and would make masks for it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        engine: str
        """Name of the registered ``CoreAttentionEngine`` of this kind of attention."""

        scale: float
        """Factor on the scores with which the engine was built."""

        shared: int = 0
        """Last elements of keys that all heads have in common, which then travel once per token."""

        def build(self, **options: Any) -> Any:
            """Build the module. Under context parallelism keys and values stay where they are."""
            config: Any = self
            sharding = config.sharding_config
            if sharding is not None:
                shards = sharding.in_src_shardings
                gradients = dataclasses.replace(
                    sharding.local_map, in_grad_placements=(*shards.values(),)
                )
                sharding = dataclasses.replace(
                    sharding, in_dst_shardings=shards, local_map=gradients
                )
            return Module.Config.build(
                dataclasses.replace(config, sharding_config=sharding), **options
            )

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.engine = config.engine
        self.scale = config.scale
        self.shared = config.shared

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Tensor,
        scale: float | None = None,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **_: Any,
    ) -> Tensor:
        """Attend: q [B, L, Nq, H], k [B, L, Nkv, H] and v [B, L, Nkv, Hv] give [B, L, Nq, Hv].

        ``attention_masks`` is the plan's key. ``out_transform`` gets the output and its log-sum-exp [B, L, Nq].
        """
        own = q_BLNH.shape[-1] ** -0.5 if scale is None else scale
        if abs(own - self.scale) > 1e-6 * self.scale:
            raise ValueError(
                f"attention scale {own} differs from {self.scale}, with which CAD was built"
            )
        batch = q_BLNH.shape[:2]
        with spmd.no_typecheck():
            q, k, v = (
                x.to(v_BLNH.dtype).flatten(0, 1) for x in (q_BLNH, k_BLNH, v_BLNH)
            )
            shared = None
            if self.shared:
                # Of head 0: the gradients of the other heads' copies, which are zero, are added to this one's.
                shared = k[:, :1, -self.shared :]
                k = k[..., : -self.shared]
            out, lse = core_attention(
                q, k, v, plan_key=attention_masks, engine=self.engine, shared=shared
            )
        out = out.unflatten(0, batch)
        if out_transform is None:
            return out
        return out_transform(out, lse.unflatten(0, batch))
