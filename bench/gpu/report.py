# SPDX-License-Identifier: BSD-3-Clause
"""The page of all results in Markdown, and what the terminal shows of it."""

from collections.abc import Sequence
from typing import Any

from bench.gpu.goals import Verdict, verdicts
from bench.gpu.parts import PARTS
from bench.gpu.results import Result, gpu_name, same_code
from bench.record import cell, markdown_table

DRY = "**CPU stand-ins at toy sizes: the figures say nothing of a GPU.**"
HEAD = """# Results on one GPU

Written by `python -m bench.gpu`. Every part has a file of its own, with the commit that it measured. Goals are judged
on the parts of one state of the sources, the latest."""


def find_verdicts(results: Sequence[Result]) -> list[Verdict]:
    """Return verdicts on results of one state of the sources; parts that failed count with what they had measured."""
    statuses = {result["part"]: result["status"] for result in results}
    figures = {result["part"]: result["figures"] for result in results}
    return verdicts(figures, statuses, any(result["dry_run"] for result in results))


def latest_state(results: Sequence[Result]) -> list[Result]:
    """Return the results of the state of the sources that was measured last."""
    last = max(results, key=lambda result: result["date"])
    return [result for result in results if same_code(result, last)]


def summary(results: Sequence[Result]) -> str:
    """Return goals and parts of one GPU."""
    latest = latest_state(results)
    goals = [
        {"goal": x.goal, "verdict": x.status, "figure": x.figure}
        for x in find_verdicts(latest)
    ]
    by_name = {result["part"]: result for result in results}
    rows = []
    for part in PARTS:
        result = by_name.get(part.name)
        if result is not None:
            tree = {True: "", False: " with changes", None: "?"}[result["clean"]]
            measured = {"seconds": result["seconds"], "of expected": part.seconds}
            code = {"date": result["date"][:16], "commit": f"{result['commit']}{tree}"}
            rows.append(
                {
                    "run": part.run,
                    "part": part.name,
                    "status": result["status"],
                    **measured,
                    **code,
                }
            )
            rows[-1]["why"] = result["why"]
    last = latest[0]
    head = f"{last['gpu']}, torch {last['torch']}, Python {last['python']}, sources {last['sources']}"
    lines = [f"## {head}", "", *([DRY, ""] if last["dry_run"] else [])]
    return "\n".join([*lines, *markdown_table(goals), "", *markdown_table(rows), ""])


def page(results: Sequence[Result]) -> str:
    """Return the whole page."""
    lines = [HEAD, ""]
    for name in dict.fromkeys(map(gpu_name, results)):
        of_gpu = [result for result in results if gpu_name(result) == name]
        lines.append(summary(of_gpu))
        by_part = {result["part"]: result for result in of_gpu}
        for part in PARTS:
            result = by_part.get(part.name)
            if result is None or not (result["figures"] or result["output"]):
                continue
            lines += [
                f"### {part.name}: {part.title}",
                "",
                f"`{result['command']}`, commit {result['commit']}",
                "",
            ]
            if "note" in result:
                lines += [result["note"], ""]
            for figure, value in result["figures"].items():
                lines += _figure(figure, value)
            if result["output"]:
                lines += [
                    "What it printed last:",
                    "",
                    "```",
                    result["output"].replace("```", "'''"),
                    "```",
                    "",
                ]
    return "\n".join(lines)


def _figure(name: str, value: Any) -> list[str]:
    """Return the lines for a figure; what is nested deeper is in the JSON alone."""
    if isinstance(value, dict) and all(map(_fits, value.values())):
        value = ", ".join(f"{key} {cell(x)}" for key, x in value.items())
    if isinstance(value, list) and value and all(isinstance(x, str) for x in value):
        return [f"{name}:", "", "```", *value, "```", ""]
    if isinstance(value, list) and value and all(isinstance(x, dict) for x in value):
        return [
            f"{name}:",
            "",
            *markdown_table(
                [{k: x for k, x in row.items() if _fits(x)} for row in value]
            ),
            "",
        ]
    return [
        f"{name}: {cell(value) if _fits(value) or not value else 'see the JSON'}",
        "",
    ]


def _fits(value: Any) -> bool:
    """Return whether a value fits into a cell; a list of such values does, too."""
    values = value if isinstance(value, list) else [value]
    return all(x is None or isinstance(x, str | int | float) for x in values)
