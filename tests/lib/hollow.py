# SPDX-License-Identifier: BSD-3-Clause
"""A rank's engine as on CUDA on CPU tensors: Triton compiles launches, and these and FlashAttention's do nothing.

Only in processes of their own, see mock_driver.py.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.lib.rows import CPU, empty_rows
from torchtitan_cad.runtime import triton
from torchtitan_cad.runtime.call import Saved
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.kernels import varlen
from torchtitan_cad.runtime.transport.symmetric import SymmetricTransport


def hollow_engine(
    num_ranks, rank=0, *, buffer_bytes=2**24, kept_bytes: float = 0.0
) -> CoreAttentionEngine:
    triton.runs_on = lambda device: True
    from tests.lib.mock_driver import launches
    from torchtitan_cad.runtime.transport.cuda_memory import DeviceMemory

    def forward_op(q, *_, **__):
        launches["flash_attention"] += 1
        return torch.empty_like(q), torch.empty(q.shape[1::-1])

    def backward_op(dout, *qkv, **_):
        launches["flash_attention"] += 1
        q, k, v, _, _, cu_q, *_ = qkv
        heads, dim = q.shape[1:]
        # dQ and row sums in fp32; dK and dV of every query head, if they share keys
        of_queries = torch.empty(len(q) + 128 * len(cu_q[1:]), heads, dim + 1)
        of_keys = k.new_empty(len(k), heads * (heads > k.shape[1]), 2 * dim)
        gradients = tuple(map(torch.empty_like, (q, k, v)))
        del of_queries, of_keys
        return gradients

    varlen._forward_op = forward_op
    varlen._backward_op = backward_op
    varlen._takes = lambda op, argument: False

    def allocate(num_bytes):
        memory = torch.empty(num_bytes + 512, dtype=torch.uint8)
        begin = -memory.data_ptr() % 512
        own = memory[begin : begin + num_bytes]
        return DeviceMemory(own, [own.data_ptr()] * num_ranks, None)

    transport = SymmetricTransport(
        range(num_ranks), rank, allocate, lambda: 600.0, buffer_bytes
    )
    return CoreAttentionEngine(
        varlen.VarlenKernel(),
        transport,
        rank=rank,
        device=CPU,
        scale=0.1,
        kept_bytes=kept_bytes,
    )


def passes_of_a_layer(
    engine, plan, key=0
) -> tuple[Callable[[], Sequence[Tensor]], Callable[[Sequence[Tensor]], object]]:
    """Forward, which returns results, and backward, which takes them."""
    engine.add_plan(key, plan)
    tokens = int(plan.layout.tokens_per_rank[engine.rank])
    q, k, v, dout, shared = empty_rows(tokens, plan.shape)

    def run_backward(results):
        saved = Saved(q, k, v, *results, shared=shared)
        return engine.begin_backward(dout, saved, key).run()

    return lambda: engine.begin_forward(q, k, v, key, shared).run(), run_backward
