# SPDX-License-Identifier: BSD-3-Clause
"""Goals on a GPU, and whether they are reached."""

from typing import Any, NamedTuple

from bench.gpu.parts import PARTS

Figures = dict[str, dict[str, Any]]
"""Figures of the parts that have any, by the part's name."""

MET = "met"
NOT_MET = "not met"
NOT_MEASURED = "not measured"

SHARDS = {128, 256, 512, 1024, 2048}
RANKS = {64}
KERNELS = {"gather", "merge", "sum", "delta", "surrogate", "pack on all SMs"}
"""Without the put as it is configured, which leaves most SMs to other work on purpose."""


class Verdict(NamedTuple):
    goal: str
    status: str
    figure: str


class _Result(NamedTuple):
    """Verdict of the figures; ``whole``: they are all that the goal asks for."""

    reached: bool
    whole: bool
    figure: str


def verdicts(
    figures: Figures, statuses: dict[str, str], stand_ins: bool = False
) -> list[Verdict]:
    """One for every goal, from what has been measured; ``statuses`` of all parts by name.

    What was measured in part can miss a goal, but not reach it; and stand-ins do neither.
    """
    goals: list[tuple[str, str, _Result | None]] = [
        (
            "two ranks on halves of the GPU: CAD at least 1.3 times as fast as stock",
            "sharing",
            _sharing("sharing", figures, statuses),
        ),
        (
            "the same with FSDP2 and torch.compile",
            "sharing-compiled",
            _sharing("sharing-compiled", figures, statuses),
        ),
        ("the tests of tests/gpu pass", "", _tests(figures, statuses)),
        (
            "shards of 128 to 2048 tokens: at least 95% of the undivided kernel",
            "attention",
            _shards(figures),
        ),
        (
            "memory-bound kernels: at least 75% of the bandwidth of a copy",
            "bandwidth",
            _bandwidth(figures),
        ),
        ("planned/mean at most 1.08 in replay", "replay", _replay(figures)),
        (
            "no synchronisation and no allocation in a layer, in the steady state",
            "layer",
            _steady(figures),
        ),
        (
            "a layer that moves rows: CAD's own kernels at most 6% of its attention",
            "layer",
            _own_kernels(figures),
        ),
        (
            "a layer with nothing to move: at most 2% slower than stock varlen attention",
            "plain",
            _plain(figures),
        ),
    ]
    return [
        Verdict(goal, *_judge(result, part, statuses, stand_ins))
        for goal, part, result in goals
    ]


def _judge(
    result: _Result | None, part: str, statuses: dict[str, str], stand_ins: bool
) -> tuple[str, str]:
    if result is None:
        return NOT_MEASURED, f"{part} {statuses[part]}" if part in statuses else "-"
    if stand_ins:
        return NOT_MEASURED, f"stand-ins: {result.figure}"
    if not result.reached:
        return NOT_MET, result.figure
    return (
        (MET, result.figure)
        if result.whole
        else (NOT_MEASURED, f"in part: {result.figure}")
    )


def _sharing(part: str, figures: Figures, statuses: dict[str, str]) -> _Result | None:
    """CAD must have trained as stock, over symmetric memory, and every rank must have had its share alone."""
    sharing = figures.get(part, {})
    rows = {row["mode"]: row for row in sharing.get("modes", [])}
    if "cad" not in rows:
        return None
    text = ", ".join(
        f"{mode} {row['speed_up']:.2f}" for mode, row in rows.items() if mode != "stock"
    )
    text += f"; {rows['cad']['ideal_speed_up']:.2f} if at no cost"
    whole_gpu = (
        figures.get("environment", {}).get("device", {}).get("multiprocessors", 0)
    )
    widest_share = max(
        (share for job in sharing.get("multiprocessors", []) for share in job),
        default=0,
    )
    reasons = []
    if statuses.get(part) != "done":
        reasons.append(f"the part {statuses.get(part)}")
    if not sharing.get("transports", {}).get("cad", "").startswith("symm_mem"):
        reasons.append("not over symmetric memory")
    if not 0 < 2 * widest_share <= whole_gpu:
        reasons.append(f"a share of {widest_share} of {whole_gpu} multiprocessors")
    is_fast = rows["cad"]["speed_up"] >= 1.3
    return _Result(is_fast and not reasons, True, "; ".join([text, *reasons]))


def _tests(figures: Figures, statuses: dict[str, str]) -> _Result | None:
    names = [part.name for part in PARTS if part.name.startswith("test-")]
    counts = [figures.get(name, {}).get("tests", {}) for name in names]
    passed, failed, skipped = (
        sum(c.get(key, 0) for c in counts) for key in ("passed", "failed", "skipped")
    )
    cut = [name for name in names if statuses.get(name) in ("failed", "timed out")]
    left = [name for name in names if statuses.get(name, "skipped") == "skipped"]
    if not passed and not cut:
        return None
    text = f"{passed} passed, {failed} failed, {skipped} skipped"
    text += f"; failed or timed out: {', '.join(cut)}" if cut else ""
    return _Result(
        not cut,
        not left and not skipped,
        text + (f"; not run: {', '.join(left)}" if left else ""),
    )


def _shards(figures: Figures) -> _Result | None:
    rows = figures.get("attention", {}).get("shards", [])
    shares = [
        (row[f"{name}_share"], row["shard"], name)
        for row in rows
        for name in ("forward", "backward")
    ]
    if not shares:
        return None
    share, shard, name = min(shares)
    whole = {row["shard"] for row in rows} >= SHARDS
    return _Result(share >= 0.95, whole, f"lowest {share:.3f} ({name}, {shard} tokens)")


def _bandwidth(figures: Figures) -> _Result | None:
    shares = {
        row["name"]: row["share"]
        for row in figures.get("bandwidth", {}).get("kernels", [])
    }
    judged = {name: share for name, share in shares.items() if name in KERNELS}
    if not judged:
        return None
    lowest = min(judged.values())
    text = ", ".join(f"{name} {share:.3f}" for name, share in judged.items())
    return _Result(
        lowest >= 0.75, set(judged) == KERNELS, f"lowest {lowest:.3f}: {text}"
    )


def _replay(figures: Figures) -> _Result | None:
    rows = figures.get("replay", {}).get("plans", [])
    if not rows:
        return None
    highest = max(row["planned_over_mean"] for row in rows)
    cells = ", ".join(
        f"{row['ranks']} ranks {row['pass']} {row['planned_over_mean']:.3f}"
        for row in rows
    )
    return _Result(
        highest <= 1.08,
        {row["ranks"] for row in rows} >= RANKS,
        f"highest {highest:.3f}: {cells}",
    )


def _steady(figures: Figures) -> _Result | None:
    layer = figures.get("layer", {})
    counts = layer.get("counts")
    warned = layer.get("warnings")
    asked = layer.get("device_allocations")
    if counts is None:
        return None
    text = f"{counts['launches']:g} launches, {counts['synchronisations']:g} synchronisations and "
    text += f"{counts['allocations']:g} allocations in a trace, per layer and rank"
    text += "" if counts["on_device"] else ", which saw nothing on the device"
    if warned is not None:
        text += f"; {len(warned)} warnings of torch; the allocator asked the device {asked} times"
    reached = not (
        counts["synchronisations"] or counts["allocations"] or warned or asked
    )
    return _Result(
        reached,
        bool(counts["on_device"]) and warned is not None and asked is not None,
        text,
    )


def _own_kernels(figures: Figures) -> _Result | None:
    layer = figures.get("layer", {})
    if layer.get("own_over_attention") is None:
        return None
    share = layer["own_over_attention"]
    own = layer["own_microseconds"]
    return _Result(share <= 0.06, True, f"{share:.3f} ({own:.0f} us a layer and rank)")


def _plain(figures: Figures) -> _Result | None:
    plain = figures.get("plain", {})
    if "over_stock" not in plain:
        return None
    times = plain["milliseconds"]
    text = f"{plain['over_stock']:.3f} times ({times['ours']:.3f} ms, stock {times['stock']:.3f} ms)"
    return _Result(plain["over_stock"] <= 1.02, True, text)
