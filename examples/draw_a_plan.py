# SPDX-License-Identifier: BSD-3-Clause
# %% [markdown]
# # Who computes what
# Cells for an editor that runs `# %%`, or as a script: python examples/draw_a_plan.py [picture.png]
# Needs matplotlib (`pip install torchtitan_cad[plots]`), and no torch.

# %%
import sys
from pathlib import Path

from torchtitan_cad.planning import (
    AttentionShape,
    PlannerConfig,
    TokenLayout,
    make_plan,
    validate_plan,
)
from torchtitan_cad.tools.plan.plot import draw_plan

# %% Four ranks of 16,384 tokens: one document lies on the first three, short ones on the last.
long = [[(0, rank * 16384, 16384)] for rank in range(3)]
short = [(1 + number, 0, 2048) for number in range(8)]
layout = TokenLayout.from_segments([*long, short])
shape = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, dtype_bytes=2)

# %% Every rank makes the same plan; `validate_plan` proves that each (query, key) pair is computed exactly once.
plan = make_plan(layout, shape, PlannerConfig(tolerance=0.02))
validate_plan(plan)
print(
    f"busiest rank over mean: {plan.stats.max_over_mean_before:.2f} before, {plan.stats.max_over_mean:.2f} after"
)

# %% The pale parts of the triangles stay at home; numbered rectangles go to the rank of that number.
picture = Path(sys.argv[1] if len(sys.argv) > 1 else "plan.png")
draw_plan(plan, picture)
print(f"wrote {picture}")
