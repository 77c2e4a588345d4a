# SPDX-License-Identifier: BSD-3-Clause
"""Plan a batch of two ranks, without torch: python examples/plan_a_batch.py."""

from torchtitan_cad.planning import (
    AttentionShape,
    PlannerConfig,
    TokenLayout,
    make_plan,
)

# Each rank holds 32,768 tokens: rank 0 one long document, rank 1 two shorter ones. (document, start, length)
layout = TokenLayout.from_segments([[(0, 0, 32768)], [(1, 0, 4096), (2, 0, 28672)]])
shape = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, dtype_bytes=2)
plan = make_plan(layout, shape, PlannerConfig(tolerance=0.02))
for doc, q_start, q_end, kv_start, kv_end, server in plan.tasks:
    print(
        f"document {doc}: queries {q_start} to {q_end}, keys {kv_start} to {kv_end}, on rank {server}"
    )
print(
    f"busiest rank over mean: {plan.stats.max_over_mean_before:.2f} before, {plan.stats.max_over_mean:.2f} after"
)
print(f"bytes moved for one layer's forward: {plan.stats.total_bytes:,}")
