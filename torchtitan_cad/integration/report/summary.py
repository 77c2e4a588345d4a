"""Keeps what a run has gained so far: cad_steps.jsonl, cad_summary.json, imbalance.png and a few lines of text.

The files are written as the run goes and whole at any moment, so that they are there however it ends. What is held in
memory does not grow with the number of steps.
"""

import contextlib
import itertools
import json
import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

STEPS_NAME = "cad_steps.jsonl"
JSON_NAME = "cad_summary.json"
PICTURE_NAME = "imbalance.png"

MOST_SPANS = 512
"""Spans of consecutive steps that are kept apart; the number of steps in each grows with the run."""


@dataclass(frozen=True)
class Spread:
    """Number, sum and extremes of some numbers, or of arrays of the same shape element by element."""

    count: int
    total: Any
    low: Any
    high: Any

    @classmethod
    def of(cls, value: Any) -> "Spread":
        """Return the spread of one number or array."""
        return cls(1, value, value, value)

    @property
    def mean(self) -> Any:
        """Mean, of each element where they are arrays."""
        return self.total / self.count

    def __add__(self, other: "Spread") -> "Spread":
        low, high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        return Spread(self.count + other.count, self.total + other.total, low, high)


@dataclass(frozen=True)
class Span:
    """Consecutive logged steps: the last one's number, and the spread of every figure that has a value in any."""

    last_step: int
    figures: dict[str, Spread]

    def __add__(self, later: "Span") -> "Span":
        return Span(later.last_step, _merged(self.figures, later.figures))


def _merged(spreads: dict[str, Spread], later: dict[str, Spread]) -> dict[str, Spread]:
    return spreads | {name: spreads[name] + spread if name in spreads else spread for name, spread in later.items()}


class RunSummary:
    """Takes the figures of every logged step and keeps the files up to date.

    Args:
        folder: the run's own, made if missing. If an earlier run has left its figures there, they are written to
            ``folder-2`` (or -3, ...) instead; ``self.folder`` says where.

    Raises:
        OSError: the folder cannot be written to.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder, self._steps_file = _claim(Path(folder))
        self.spans: list[Span] = []
        self._in_last_span, self._span_steps = 0, 1
        self.totals: dict[str, Spread] = {}
        """Of every figure that is a number, over the whole run."""
        self.ranked: dict[str, Spread] = {}
        """Under "before" and "after", [ranks] of a step's ``ranked_before`` and ``ranked_after``."""
        self._losses: list[float] = []

    def add(self, figures: Mapping[str, Any]) -> None:
        """Take one step's figures; writes a line of cad_steps.jsonl, and cad_summary.json.

        Args:
            figures: needed are `step`; `imbalance_before`, `imbalance_after`; `ranked_before` and `ranked_after`, the
                times of the ranks over the mean, the longest first, averaged over the step's plans. Used if there and
                not None: `bytes_per_rank_mean`, `bytes_per_rank_max` (bytes sent for one layer's forward),
                `tasks_moved`, `plan_seconds`, `exchange_seconds`, `exposed_percent`, `loss`. Others go to
                cad_steps.jsonl as they are. Arrays and scalars of numpy and torch are fine.

        Raises:
            OSError: a file cannot be written. The step counts nevertheless, and what was written before stays whole.
        """
        plain = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in figures.items()}
        ranked = {w: Spread.of(np.array(plain[f"ranked_{w}"], dtype=np.float64)) for w in ("before", "after")}
        self.ranked = _merged(self.ranked, ranked)
        if plain.get("loss") is not None:
            self._losses[1:] = [plain["loss"]]
        numbers = {name: value for name, value in plain.items() if isinstance(value, int | float)}
        finite = {name: Spread.of(value) for name, value in numbers.items() if math.isfinite(value)}
        self.totals = _merged(self.totals, finite)
        self._append_span(Span(plain["step"], finite))
        self._append_line(plain)
        replace_file(self.folder / JSON_NAME, f"{to_json(self.means(), indent=2)}\n".encode())

    def _append_span(self, span: Span) -> None:
        if self.spans and self._in_last_span < self._span_steps:
            self.spans[-1] += span
            self._in_last_span += 1
            return
        if len(self.spans) == MOST_SPANS:
            self.spans = [a + b for a, b in zip(self.spans[::2], self.spans[1::2], strict=True)]
            self._span_steps *= 2
        self.spans.append(span)
        self._in_last_span = 1

    def _append_line(self, figures: Mapping[str, Any]) -> None:
        line = f"{to_json(figures)}\n".encode()
        with open(self._steps_file, "ab", buffering=0) as file:
            begin = file.tell()
            try:
                if file.write(line) < len(line):
                    raise OSError(f"{self._steps_file}: no room for the figures of step {figures['step']}")
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(begin)
                raise

    def means(self) -> dict[str, float | int | None]:
        """Return means over the logged steps, medians of times; None for what no step reports.

        A mean would spread over all steps what the first one waits for; a median is that of ``spans``' means.
        """
        return {
            "steps": self.ranked["before"].count,
            "last_step": self.spans[-1].last_step,
            "ranks": len(self.ranked["before"].total),
            **{name: self._mean(name) for name in ("imbalance_before", "imbalance_after")},
            **{f"imbalance_{when}_worst": float(self.totals[f"imbalance_{when}"].high) for when in ("before", "after")},
            **{name: self._mean(name) for name in ("bytes_per_rank_mean", "bytes_per_rank_max", "tasks_moved")},
            **{name: self._mean(name) for name in ("placed_total", "placed_worst") if name in self.totals},
            **{name: self._median(name) for name in ("plan_seconds", "exchange_seconds")},
            "exposed_percent": self._mean("exposed_percent"),
            "loss_first": self._losses[0] if self._losses else None,
            "loss_last": self._losses[-1] if self._losses else None,
        }

    def _mean(self, name: str) -> float | None:
        return float(self.totals[name].mean) if name in self.totals else None

    def _median(self, name: str) -> float | None:
        means = [span.figures[name].mean for span in self.spans if name in span.figures]
        return float(statistics.median(means)) if means else None

    def text(self) -> str:
        """Return the summary in a few lines; what was not measured is left out."""
        means: dict[str, Any] = self.means()
        lines = [
            f"Core attention disaggregation: {means['steps']} logged steps on {means['ranks']} ranks",
            f"  attention imbalance (max/mean)  {means['imbalance_before']:.2f} -> {means['imbalance_after']:.2f}"
            f"  (worst step {means['imbalance_before_worst']:.2f} -> {means['imbalance_after_worst']:.2f})",
        ]
        if means["bytes_per_rank_mean"] is not None:
            worst = means["bytes_per_rank_max"]
            worst_text = "" if worst is None else f", busiest rank {_bytes(worst)}"
            lines.append(f"  sent per rank and layer forward {_bytes(means['bytes_per_rank_mean'])}{worst_text}")
        if means["tasks_moved"] is not None:
            lines.append(f"  tasks moved per step            {means['tasks_moved']:.1f}")
        if means["plan_seconds"] is not None:
            lines.append(f"  planning, median step           {1000 * means['plan_seconds']:.1f} ms")
        if means["exchange_seconds"] is not None:
            lines.append(f"  exchange, median step           {1000 * means['exchange_seconds']:.1f} ms")
        if means["exposed_percent"] is not None:
            lines.append(f"  exposed wait                    {means['exposed_percent']:.1f}% of the time")
        if means["loss_first"] is not None:
            lines.append(f"  loss                            {means['loss_first']:.3f} -> {means['loss_last']:.3f}")
        return "\n".join(lines)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that is either the old or the new one for whoever reads it, or for whoever is left after a kill."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _claim(folder: Path) -> tuple[Path, Path]:
    """Return the first of folder, folder-2, ... without figures of another run, and the file for the steps,
    made there.
    """
    for number in itertools.count(1):
        mine = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        mine.mkdir(parents=True, exist_ok=True)
        try:
            (mine / STEPS_NAME).touch(exist_ok=False)
        except FileExistsError:
            continue
        return mine, mine / STEPS_NAME
    raise AssertionError("counting does not end")


def to_json(value: Any, indent: int | None = None) -> str:
    """Write JSON, in which null stands for nan and infinity (a loss, say, of a run that diverged)."""
    return json.dumps(_without_nan(value), indent=indent, allow_nan=False)


def _without_nan(value: Any) -> Any:
    match value:
        case dict():
            return {key: _without_nan(item) for key, item in value.items()}
        case list() | tuple():
            return [_without_nan(item) for item in value]
        case float() if not math.isfinite(value):
            return None
        case _:
            return value


def _bytes(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
