# SPDX-License-Identifier: BSD-3-Clause
"""Reading the documents that a job with ``cad.shadow`` has recorded."""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from torchtitan_cad.integration.report.steps_file import (
    DOCUMENTS_NAME,
    DOCUMENTS_VERSION,
)
from torchtitan_cad.planning.text import is_integer
from torchtitan_cad.tools.steps import read_steps, require

MOST = 2**31 - 1
"""most ranks, and tokens of a document"""


@dataclass(frozen=True)
class RecordedDocuments:
    """The last steps of a record.

    Attributes:
        batches: of every step, the lengths in tokens of the documents of every row, in the order of loaders: by
            data-parallel rank, then by microbatch.
        ranks: of the job.
        microbatches: of a data-parallel rank in a step.
    """

    batches: list[list[list[int]]]
    ranks: int
    microbatches: int


def find_record(path: Path) -> Path | None:
    """Return the record that is named, or in a dump folder; None for another file, or a folder without one."""
    inside = path / DOCUMENTS_NAME
    if inside.is_file():
        return inside
    return path if path.suffix == ".jsonl" else None


def read_record(path: Path, count: int) -> RecordedDocuments:
    """Return the last ``count`` steps. Where steps go back, as after a resume, the later lines count.

    Raises:
        ValueError: no step is there, or a line does not hold a step's documents; names file, line, and what is wrong.
    """
    steps = read_steps(path, _check)[-count:]
    batches = [_rows(step["microbatches"]) for step in steps]
    last = steps[-1]
    return RecordedDocuments(batches, last["ranks"], len(last["microbatches"]))


def _rows(microbatches: list[list[list[list[int]]]]) -> list[list[int]]:
    """Return the rows of [microbatches, ranks], those of a rank together."""
    by_rank = zip(*microbatches, strict=True)
    return list(chain.from_iterable(chain.from_iterable(by_rank)))


def _check(step: dict[str, Any]) -> None:
    """Raise ValueError for a step whose documents do not fill its rows."""
    require(
        step,
        "version",
        lambda version: version == DOCUMENTS_VERSION,
        f"{DOCUMENTS_VERSION}",
    )
    require(step, "ranks", _is_count, "a whole number")
    words = "lists of as many ranks each, of rows, of lengths in tokens"
    require(step, "microbatches", _are_microbatches, words)
    sums = {sum(row) for row in _rows(step["microbatches"])}

    def fills_rows(tokens: Any) -> bool:
        return _is_count(tokens) and sums == {tokens}

    words = "what the documents of every row add up to"
    require(step, "row_tokens", fills_rows, words)


def _is_count(value: Any) -> bool:
    return is_integer(value, 1, MOST)


def _are_microbatches(value: Any) -> bool:
    try:
        rows = _rows(value)
        return len(rows) > 0 and all(map(_is_count, chain.from_iterable(rows)))
    except (TypeError, ValueError):  # of other depths, or unequal ranks
        return False
