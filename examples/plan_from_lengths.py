# SPDX-License-Identifier: BSD-3-Clause
"""What CAD would make of documents of these lengths, without torch: python examples/plan_from_lengths.py 65536 9000 ...

The documents are packed end to end into the ranks' tokens, as a loader packs them into rows.
"""

import sys

from torchtitan_cad.planning import (
    AttentionShape,
    PlannerConfig,
    TokenLayout,
    make_plan,
    place_and_plan,
)

RANKS, TOKENS = 8, 32_768
lengths = [int(text) for text in sys.argv[1:]] or [
    131_072,
    40_000,
    20_000,
    30_000,
    9_000,
    4_000,
    2_000,
    26_108,
]

# (document, start, length) per rank
ranks: list[list[tuple[int, int, int]]] = [[] for _ in range(RANKS)]
position = 0
for document, length in enumerate(lengths):
    start = 0
    while start < length and position < RANKS * TOKENS:
        rank, room = position // TOKENS, TOKENS - position % TOKENS
        piece = min(room, length - start)
        ranks[rank].append((document, start, piece))
        start, position = start + piece, position + piece

layout = TokenLayout.from_segments(ranks)
shape = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, dtype_bytes=2)
config = PlannerConfig(tolerance=0.02)
plans = {
    "homes of the loader": make_plan(layout, shape, config),
    "homes chosen anew": place_and_plan(layout, shape, config),
}
for homes, plan in plans.items():
    stats = plan.stats
    print(
        f"{homes}: busiest rank over mean {stats.max_over_mean_before:.2f} -> {stats.max_over_mean:.2f}, "
        f"{stats.total_bytes / 1e9:.2f} GB a layer's forward, worst rank {stats.max_rank_bytes / 1e9:.2f} GB"
    )
