"""CAD for torchtitan's ``inner_attention`` modules."""

import types

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torchtitan.models.attention import VarlenMetadata

from torchtitan_cad.runtime.ops import core_attention


def use_engine(module: nn.Module, engine: str, engine_scale: float) -> None:
    """Make a module execute its attention through a core-attention engine.

    The module keeps its class and has no parameters; only its ``forward`` is replaced. It is called as torchtitan
    0.2.2 calls varlen attention (models/llama3/model/model.py): xq, xk, xv [B, H, S, D] and a ``VarlenMetadata``, here
    one whose ``cu_seq_q`` is the plan's key. Inputs may be plain tensors (llama3) or DTensors sharded over heads
    (qwen3 under TP); the output is of the same kind, [B, S, H, D].

    Args:
        engine: name of the registered ``CoreAttentionEngine`` of the CAD mesh.
        engine_scale: the engine's factor on the scores; a module that asks for another one is an error.
    """

    def forward(
        self: nn.Module,
        xq: Tensor,
        xk: Tensor,
        xv: Tensor,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
    ) -> Tensor:
        if scale is not None and abs(scale - engine_scale) > 1e-6 * engine_scale:
            raise ValueError(f"attention scale {scale} differs from the {engine_scale} that CAD was built for")
        q, k, v = _rows(xq), _rows(xk), _rows(xv)
        out = core_attention(q, k, v, attention_masks.cu_seq_q, engine)
        out = out.view(xq.shape[0], xq.shape[2], *out.shape[1:])
        if isinstance(xq, DTensor):
            out = DTensor.from_local(out, xq.device_mesh, [Shard(2)], run_check=False)
        return out

    module.forward = types.MethodType(forward, module)


def _rows(x: Tensor) -> Tensor:
    """[B, H, S, D], possibly a DTensor sharded over H, to this rank's [B * S, H_local, D]."""
    if isinstance(x, DTensor):
        x = x.to_local()
    return x.transpose(1, 2).flatten(0, 1)
