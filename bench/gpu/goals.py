"""What is to be reached on a GPU, and whether it has been. Imports the standard library."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Figures = dict[str, dict[str, Any]]
"""Figures of the parts that have any, by the part's name."""

MET, NOT_MET, NOT_MEASURED = "met", "not met", "not measured"


@dataclass(frozen=True)
class Verdict:
    goal: str
    status: str
    figure: str


def verdicts(figures: Figures, statuses: dict[str, str]) -> list[Verdict]:
    """One for every goal, from what has been measured; ``statuses`` of all parts by name."""
    goals: list[tuple[str, str, tuple[bool, str] | None]] = [
        ("the tests of tests/gpu pass", "", _tests(figures, statuses)),
        ("shards of 128 to 2048 tokens: at least 95% of the undivided kernel", "attention", _shards(figures)),
        ("memory-bound kernels: at least 80% of the bandwidth of a copy", "bandwidth", _bandwidth(figures)),
        ("planned/mean at most 1.05 in replay", "replay", _replay(figures)),
        ("no synchronisation and no allocation in a layer, in the steady state", "layer", _steady(figures)),
        ("a layer with nothing to move: at most 2% slower than stock varlen attention", "plain", _plain(figures)),
    ]
    found = []
    for goal, part, result in goals:
        if result is None:
            found.append(Verdict(goal, NOT_MEASURED, f"{part} {statuses[part]}" if part in statuses else "-"))
        else:
            found.append(Verdict(goal, MET if result[0] else NOT_MET, result[1]))
    return found


def _tests(figures: Figures, statuses: dict[str, str]) -> tuple[bool, str] | None:
    names = [name for name in statuses if name.startswith("test-")]
    counts = [figures.get(name, {}).get("tests", {}) for name in names]
    passed, failed, skipped = (sum(c.get(key, 0) for c in counts) for key in ("passed", "failed", "skipped"))
    cut = [name for name in names if statuses[name] in ("failed", "timed out")]
    if not passed and not cut:
        return None
    text = f"{passed} passed, {failed} failed, {skipped} skipped"
    left = [name for name in names if statuses[name] == "skipped"]
    text += f"; not whole: {', '.join(cut)}" if cut else ""
    return not cut, text + (f"; not run: {', '.join(left)}" if left else "")


def _shards(figures: Figures) -> tuple[bool, str] | None:
    rows = figures.get("attention", {}).get("shards", [])
    shares = [(row[f"{name}_share"], row["shard"], name) for row in rows for name in ("forward", "backward")]
    if not shares:
        return None
    share, shard, name = min(shares)
    missing = "" if len(rows) >= 5 or _is_toy(figures) else f"; only {len(rows)} lengths measured"
    return share >= 0.95, f"lowest {share:.3f} ({name}, {shard} tokens){missing}"


def _bandwidth(figures: Figures) -> tuple[bool, str] | None:
    """Without the copy itself and the put as it is configured, which leaves most SMs to other work on purpose."""
    rows = [row for row in figures.get("bandwidth", {}).get("kernels", []) if row["name"] not in ("copy", "pack")]
    if not rows:
        return None
    least = min(rows, key=lambda row: row["share"])
    return least["share"] >= 0.8, _listed("lowest", least["share"], rows, "share")


def _replay(figures: Figures) -> tuple[bool, str] | None:
    rows = figures.get("replay", {}).get("plans", [])
    if not rows:
        return None
    worst = max(rows, key=lambda row: row["planned_over_mean"])
    cells = ", ".join(f"{row['ranks']} ranks {row['pass']} {row['planned_over_mean']:.3f}" for row in rows)
    return worst["planned_over_mean"] <= 1.05, f"highest {worst['planned_over_mean']:.3f}: {cells}"


def _steady(figures: Figures) -> tuple[bool, str] | None:
    layer = figures.get("layer", {})
    counts, warned, asked = layer.get("counts"), layer.get("warnings"), layer.get("device_allocations")
    if counts is None:
        return None
    text = f"{counts['launches']:g} launches, {counts['synchronisations']:g} synchronisations and "
    text += f"{counts['allocations']:g} allocations in a trace, per layer and rank"
    if warned is None or asked is None:  # a CPU has neither
        return counts["synchronisations"] + counts["allocations"] == 0, text
    text += f"; {len(warned)} warnings of torch; the allocator asked the device {asked} times"
    if not counts["on_device"]:
        text += "; the profiler saw nothing on the device"
    return not (counts["synchronisations"] or counts["allocations"] or warned or asked), text


def _plain(figures: Figures) -> tuple[bool, str] | None:
    plain = figures.get("plain", {})
    if "over_stock" not in plain:
        return None
    times = plain["milliseconds"]
    text = f"{plain['over_stock']:.3f} times ({times['ours']:.3f} ms, stock {times['stock']:.3f} ms)"
    return plain["over_stock"] <= 1.02, text


def _listed(word: str, value: float, rows: Sequence[dict[str, Any]], key: str) -> str:
    return f"{word} {value:.3f}: " + ", ".join(f"{row['name']} {row[key]:.3f}" for row in rows)


def _is_toy(figures: Figures) -> bool:
    return "device" not in figures.get("environment", {})
