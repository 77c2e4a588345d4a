# SPDX-License-Identifier: BSD-3-Clause
"""Traces that training writes, asked by SQL as Perfetto is: the phases, and both nano-batches."""

import json
import re
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lib.jobs.compositions import PLACED, PROFILED
from tests.lib.jobs.harness import REPOSITORY, run
from tests.lib.sets import matrix

Ask = Callable[[str], list[tuple[Any, ...]]]
CAD = "category = 'user_annotation' AND name GLOB 'cad/*'"


def in_sqlite(trace: Path) -> Ask:
    """Answer from a table like Perfetto's of slices, with the columns that the queries use."""
    table = sqlite3.connect(":memory:")
    table.execute(
        "CREATE TABLE slice (ts INTEGER, dur INTEGER, category TEXT, name TEXT)"
    )
    events = [
        event
        for event in json.loads(trace.read_text())["traceEvents"]
        if event["ph"] == "X"
    ]
    rows = [
        (round(1e3 * e["ts"]), round(1e3 * e["dur"]), e.get("cat"), e["name"])
        for e in events
    ]
    table.executemany("INSERT INTO slice VALUES (?, ?, ?, ?)", rows)
    return lambda query: table.execute(query).fetchall()


def in_perfetto(trace: Path) -> Ask:
    """Answer from Perfetto itself, where its package is installed and can download its program."""
    api = pytest.importorskip(
        "perfetto.trace_processor", reason="the package perfetto is not installed"
    )
    try:
        processor = api.TraceProcessor(trace=str(trace))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"perfetto's trace processor cannot be downloaded: {error}")
    return lambda query: [tuple(vars(row).values()) for row in processor.query(query)]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    run(
        [*PLACED, *PROFILED, "--training.steps=2", "--cad.nano_batches=2"],
        dump_folder=folder,
    )
    (path,) = folder.rglob("rank0_trace.json")
    return path


def documented_phases() -> set[str]:
    """First column of the table of docs/operations.md, without what tensor parallelism adds."""
    page = (REPOSITORY / "docs" / "operations.md").read_text().split("## Traces")[1]
    rows = [
        line
        for line in page.splitlines()
        if line.startswith("| `cad/") and "tensor parallel" not in line
    ]
    return {
        re.sub(r"\d+", "N", name)
        for row in rows
        for name in re.findall(r"`(cad/[^`]+)`", row.split("|")[1])
    }


@matrix
@pytest.mark.parametrize("open_trace", [in_sqlite, in_perfetto])
def test_phases_and_nano_batches_are_found_by_sql(open_trace, trace):
    ask = open_trace(trace)
    names = {
        re.sub(r"\d+", "N", name)
        for (name,) in ask(f"SELECT DISTINCT name FROM slice WHERE {CAD}")
    }
    assert documented_phases() <= names

    query = (
        "SELECT substr(name, -12), COUNT(*), MIN(dur) FROM slice "
        f"WHERE {CAD} AND name GLOB '*.nano_batch_?' GROUP BY 1"
    )
    (first, firsts, least), (second, seconds, _) = ask(query)
    assert (first, second) == ("nano_batch_0", "nano_batch_1")
    assert firsts == seconds > 0
    assert least > 0

    # While nano-batch 0's rows are on their way, nano-batch 1's linear work is done.
    first = f"SELECT MIN(ts) FROM slice WHERE {CAD} AND name ="
    meanwhile = f"ts BETWEEN ({first} 'cad/exchange forward rows') AND ({first} 'cad/wait forward rows')"
    ((hidden,),) = ask(
        f"SELECT SUM(dur) FROM slice WHERE {CAD} AND name GLOB '*.nano_batch_1' AND {meanwhile}"
    )
    assert hidden > 0
