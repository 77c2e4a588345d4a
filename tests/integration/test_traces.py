# SPDX-License-Identifier: BSD-3-Clause
"""Traces that training writes, asked by SQL as Perfetto is: the phases, and both nano-batches."""

import json
import re
import sqlite3
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_metrics import documented
from tests.lib.jobs.compositions import HALVES, PLACED, PROFILED
from tests.lib.jobs.harness import run
from tests.lib.sets import matrix

Ask = Callable[[str], list[tuple[Any, ...]]]
CAD = "category = 'user_annotation' AND name GLOB 'cad/*'"


def in_sqlite(trace: Path) -> Ask:
    """Answer from a table like Perfetto's of slices, with the columns that the queries use."""
    table = sqlite3.connect(":memory:")
    columns = "ts INTEGER, dur INTEGER, category TEXT, name TEXT"
    table.execute(f"CREATE TABLE slice ({columns})")
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event["ph"] == "X":
            begin = round(1e3 * event["ts"])
            duration = round(1e3 * event["dur"])
            row = (begin, duration, event.get("cat"), event["name"])
            table.execute("INSERT INTO slice VALUES (?, ?, ?, ?)", row)
    return lambda query: table.execute(query).fetchall()


def in_perfetto(trace: Path) -> Ask:
    """Answer from Perfetto itself, where its package is installed and can download its program."""
    api = pytest.importorskip("perfetto.trace_processor")
    try:
        processor = api.TraceProcessor(trace=str(trace))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"perfetto's trace processor cannot be downloaded: {error}")
    return lambda query: [tuple(vars(row).values()) for row in processor.query(query)]


@pytest.fixture(scope="module")
def trace() -> Path:
    job = run([*PLACED, *PROFILED, *HALVES, "--training.steps=2"])
    (path,) = job.dump_folder.rglob("rank0_trace.json")
    return path


def without_numbers(names: Iterable[str]) -> set[str]:
    return {re.sub(r"\d+", "N", name) for name in names}


@matrix
@pytest.mark.parametrize("open_trace", [in_sqlite, in_perfetto])
def test_phases_and_nano_batches_are_found_by_sql(open_trace, trace):
    ask = open_trace(trace)
    names = [name for (name,) in ask(f"SELECT DISTINCT name FROM slice WHERE {CAD}")]
    for name in without_numbers(documented("Traces")):
        assert name in without_numbers(names)

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
