# SPDX-License-Identifier: BSD-3-Clause
"""The report in Markdown, and what the terminal shows of it."""

from typing import Any

from bench.gpu.goals import Verdict, verdicts
from bench.gpu.parts import PARTS
from bench.record import cell, markdown_table

DRY = "**CPU stand-ins at toy sizes: the figures say nothing of a GPU.**"


def find_verdicts(document: dict[str, Any]) -> list[Verdict]:
    """Verdicts on the JSON document; parts that failed count with what they had measured."""
    outcomes = document["parts"]
    statuses = {name: outcome["status"] for name, outcome in outcomes.items()}
    figures = {name: outcome["figures"] for name, outcome in outcomes.items()}
    return verdicts(figures, statuses, document["dry_run"])


def summary(document: dict[str, Any]) -> str:
    """Verdicts and parts."""
    outcomes = document["parts"]
    goals = [{"goal": x["goal"], "verdict": x["status"], "figure": x["figure"]} for x in document["goals"]]
    parts = [
        {"part": part.name, "status": x["status"], "seconds": x["seconds"], "why": x["why"]}
        for part in PARTS
        if (x := outcomes.get(part.name))
    ]
    head = ", ".join(f"{key} {value}" for key, value in document["identity"].items())
    lines = ["# One GPU", "", f"{document['date']}: {head}, {document['seconds']:.0f} s.", ""]
    lines += [DRY, ""] if document["dry_run"] else []
    return "\n".join([*lines, "## Goals", "", *markdown_table(goals), "", "## Parts", "", *markdown_table(parts), ""])


def markdown(document: dict[str, Any]) -> str:
    """The whole report."""
    lines = [summary(document)]
    for part in PARTS:
        outcome = document["parts"].get(part.name)
        if outcome is None or not (outcome["figures"] or outcome["output"]):
            continue
        lines += [f"## {part.name}: {part.title}", ""]
        for name, value in outcome["figures"].items():
            lines += _figure(name, value)
        if outcome["output"]:
            lines += ["What it printed last:", "", "```", outcome["output"].replace("```", "'''"), "```", ""]
    return "\n".join(lines)


def _figure(name: str, value: Any) -> list[str]:
    """Lines for a figure; what is nested deeper is in the JSON alone."""
    if isinstance(value, dict) and all(map(_fits, value.values())):
        value = ", ".join(f"{key} {cell(x)}" for key, x in value.items())
    if isinstance(value, list) and value and all(isinstance(x, str) for x in value):
        return [f"{name}:", "", "```", *value, "```", ""]
    if isinstance(value, list) and value and all(isinstance(x, dict) for x in value):
        return [f"{name}:", "", *markdown_table([{k: x for k, x in row.items() if _fits(x)} for row in value]), ""]
    return [f"{name}: {cell(value) if _fits(value) or not value else 'see the JSON'}", ""]


def _fits(value: Any) -> bool:
    """Whether it fits into a cell: a list of such values does, too."""
    values = value if isinstance(value, list) else [value]
    return all(x is None or isinstance(x, str | int | float) for x in values)
