# SPDX-License-Identifier: BSD-3-Clause
"""Results: tables in Markdown, and JSON that begins with what is needed to repeat a bench."""

import datetime
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = (":!bench/results", ":!docs", ":!README.md")
"""What benches themselves write, as git excludes it."""
Record = dict[str, Any]
"""Figures of one case, with what names the case."""


def save(path: Path, module: str, content: Record) -> None:
    """Write date, machine, versions, commit and command, and ``content`` after them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_head(module) | content, indent=1, default=str) + "\n")


def save_records(path: Path, module: str, records: list[Record]) -> None:
    """Write a line of JSON for every record, all with the same keys."""
    columns = list(records[0])
    rows = [
        json.dumps([_rounded(record[name]) for name in columns]) for record in records
    ]
    head = json.dumps(_head(module) | {"columns": columns}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head[:-2] + ',\n "rows": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n")


def conclude(
    path: Path | None,
    module: str,
    records: list[Record],
    rows: list[Record],
    problems: Sequence[str] = (),
) -> int:
    """Write a bench's records, print the table of ``rows`` and what is wrong; returns the exit code."""
    if path is not None:
        save_records(path, module, records)
    print("\n".join(markdown_table(rows)))
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


def read_records(path: Path) -> list[Record]:
    """Records that ``save_records`` wrote."""
    data = json.loads(path.read_text())
    return [dict(zip(data["columns"], row, strict=True)) for row in data["rows"]]


def markdown_table(rows: list[Record]) -> list[str]:
    """Lines of a table whose columns are the keys of the first row."""
    if not rows:
        return ["none"]
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    return lines + [
        f"| {' | '.join(cell(row.get(name, '')) for name in names)} |" for row in rows
    ]


def cell(value: Any) -> str:
    """Text of a value, with four digits of a number."""
    if isinstance(value, list):
        return ", ".join(map(cell, value)) or "none"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(text.replace("|", "\\|").split())


def installed_version(package: str) -> str:
    """The version of a package, or "-" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


def _head(module: str) -> Record:
    arguments = [
        Path(word).name if word.startswith("/") else word for word in sys.argv[1:]
    ]
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpus = [
        line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
    ]
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": f"{cpus[0]}, {len(cpus)} cores"
        if cpus
        else platform.processor() or platform.machine(),
        "python": platform.python_version(),
        **{
            name: installed_version(name)
            for name in ("torch", "numpy", "numba", "torchtitan_cad")
        },
        **_revision(),
        "command": " ".join([f"python -m {module}", *arguments]),
    }


def _revision() -> Record:
    """HEAD, and whether the code has no other changes; both None without git."""
    commit = git(ROOT, "rev-parse", "--short=12", "HEAD")
    changes = git(ROOT, "status", "--porcelain", "--", ".", *WRITTEN)
    return {"commit": commit, "clean": None if changes is None else not changes}


def git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints; None without git or if it fails."""
    command = ["git", *arguments]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except OSError:
        return None
    return None if done.returncode else done.stdout.strip()


def _rounded(value: Any) -> Any:
    return float(f"{value:.7g}") if isinstance(value, float) else value
