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
from torchtitan_cad.tools.steps import read_steps

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
    steps = read_steps(path, _is_step)[-count:]
    batches = [_rows(step) for step in steps]
    last = steps[-1]
    return RecordedDocuments(batches, last["ranks"], len(last["microbatches"]))


def _rows(step: dict[str, Any]) -> list[list[int]]:
    """Return the rows of a step's [microbatches, ranks], those of a rank together."""
    by_rank = zip(*step["microbatches"], strict=True)
    return list(chain.from_iterable(chain.from_iterable(by_rank)))


def _is_step(step: dict[str, Any]) -> bool:
    """Tell whether the step has as many ranks in each microbatch, and rows of documents that fill them."""
    rows = _rows(step)
    lengths = chain.from_iterable(rows)
    are_lengths = all(is_integer(length, 1, MOST) for length in lengths)
    has_ranks = is_integer(step["ranks"], 1, MOST) and len(rows) > 0
    is_filled = are_lengths and {sum(row) for row in rows} == {step["row_tokens"]}
    return has_ranks and is_filled and step["version"] == DOCUMENTS_VERSION
