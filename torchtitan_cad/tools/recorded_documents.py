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
from torchtitan_cad.planning.text import is_integer, printable
from torchtitan_cad.tools.steps import integer, read_steps

MOST = 2**31 - 1
"""largest number of a line"""


@dataclass(frozen=True)
class RecordedDocuments:
    """The last steps of a record.

    Attributes:
        batches: of every step, the lengths in tokens of the documents of every row, in the order of loaders: by
            data-parallel rank, then by microbatch.
        ranks: of the job.
        microbatches: of a data-parallel rank in a step.
        last_step: number of the last step.
    """

    batches: list[list[list[int]]]
    ranks: int
    microbatches: int
    last_step: int


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
    steps = read_steps(path, KEYS)[-count:]
    batches = []
    for step in steps:
        rows = _rows(step["microbatches"])
        if any(sum(row) != step["row_tokens"] for row in rows):
            raise ValueError(
                f"{printable(path)}: step {step['step']}: documents of a row do not add up to row_tokens = "
                f"{step['row_tokens']}; record them anew"
            )
        batches.append(rows)
    last = steps[-1]
    return RecordedDocuments(
        batches, last["ranks"], len(last["microbatches"]), last_step=last["step"]
    )


def _rows(microbatches: list[list[list[list[int]]]]) -> list[list[int]]:
    """Return the rows of [microbatches, ranks], those of a rank together."""
    by_rank = zip(*microbatches, strict=True)
    return list(chain.from_iterable(chain.from_iterable(by_rank)))


def _are_microbatches(value: Any) -> bool:
    """Tell whether the value is lists, none of them empty, of as many ranks each, of rows, of lengths."""
    level = [value]
    for _ in ("microbatches", "ranks", "rows", "lengths"):
        if not all(isinstance(part, list) and part for part in level):
            return False
        level = list(chain.from_iterable(level))
    return len(set(map(len, value))) == 1 and all(
        is_integer(length, 1, MOST) for length in level
    )


KEYS = {
    "version": integer(DOCUMENTS_VERSION, DOCUMENTS_VERSION),
    "step": integer(1, MOST),
    "ranks": integer(1, MOST),
    "row_tokens": integer(1, MOST),
    "microbatches": (
        _are_microbatches,
        "lists of as many ranks each, of rows, of lengths in tokens",
    ),
}
