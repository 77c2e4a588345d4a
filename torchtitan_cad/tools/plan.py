# SPDX-License-Identifier: BSD-3-Clause
"""``torchtitan-cad plan``: plan one layout file."""

from pathlib import Path
from typing import Annotated

import tyro

from torchtitan_cad.planning import (
    Plan,
    PlannerConfig,
    make_plan,
    place_and_plan,
)
from torchtitan_cad.planning.serialize import read_layout
from torchtitan_cad.planning.text import printable
from torchtitan_cad.tools.shared import (
    byte_unit,
    check_output,
    load_planner,
    say_written,
)

DEFAULTS = PlannerConfig()


def run(
    layout: Annotated[Path, tyro.conf.Positional],
    output: Path | None = None,
    *,
    config: PlannerConfig = DEFAULTS,
    place: bool = False,
) -> None:
    """Plan core attention for a layout and print what the plan achieves.

    Args:
        layout: JSON file {"attention": {num_heads, num_kv_heads, head_dim, dtype_bytes}, "ranks": [[{doc, start,
            length}, ...], ...]}, one list of segments per rank.
        output: Write the plan to this JSON file: {"tasks": [...], "stats": {...}, ...}.
        place: Deal the tokens to ranks anew first, as many to each, so that the busiest moves fewer bytes.
    """
    check_output("--output", output)
    tokens, shape = read_layout(layout)
    try:
        load_planner()
        given_plan = make_plan(tokens, shape, config)
        plan = place_and_plan(tokens, shape, config) if place else given_plan
    except ValueError as error:
        raise ValueError(f"{printable(layout)}: {error}") from error
    if output is not None:
        output.write_text(plan.to_json() + "\n")
        say_written(output)
    rows = _figures(plan, given_plan if place else None)
    width = max(map(len, rows))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in rows.items()))


def _figures(plan: Plan, given_plan: Plan | None) -> dict[str, str]:
    """Return the statistics by name; with those of ``given_plan``, for the homes before ``place``, if any."""
    layout = plan.layout
    stats = plan.stats
    rows = {
        "ranks, documents, tokens": f"{layout.num_ranks}, {len(layout.docs)}, {layout.num_tokens}",
        "load max/mean before": f"{stats.max_over_mean_before:.4f}",
        "load max/mean": f"{stats.max_over_mean:.4f}",
        "load max/mean guaranteed": f"{stats.guaranteed_over_mean:.4f}",
        "tasks (moved)": f"{stats.num_tasks} ({stats.tasks_moved})",
        "query rows moved": f"{stats.query_rows_moved}",
        "key rows moved": f"{stats.kv_rows_moved}",
    }
    if given_plan is not None:
        rows["total bytes with the given homes"] = _bytes(given_plan.stats.total_bytes)
        rows["worst rank bytes with them"] = _bytes(given_plan.stats.max_rank_bytes)
    rows |= {
        "total bytes": _bytes(stats.total_bytes),
        "lower bound on total bytes": _bytes(stats.lower_bound_bytes),
        "worst rank bytes": _bytes(stats.max_rank_bytes),
        "mean rank bytes": _bytes(stats.mean_rank_bytes),
    }
    if plan.config.ranks_per_node is not None:
        rows["bytes between nodes"] = _bytes(stats.inter_node_bytes)
        rows["worst rank bytes between nodes"] = _bytes(stats.max_rank_inter_node_bytes)
    return {
        **rows,
        "planning time": f"{stats.plan_seconds * 1e3:.2f} ms",
        "fingerprint": plan.fingerprint(),
    }


def _bytes(count: float) -> str:
    scale, unit = byte_unit(count)
    return f"{count / scale:.{4 if scale > 1 else 0}f} {unit}"
