# SPDX-License-Identifier: BSD-3-Clause
"""Reading the documents that a job with ``cad.shadow`` has recorded."""

import json
import os
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from torchtitan_cad.integration.report.steps_file import (
    DOCUMENTS_NAME,
    DOCUMENTS_VERSION,
)
from torchtitan_cad.planning.files import read_lines
from torchtitan_cad.planning.text import brief, is_integer, parse_json, printable

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
    if os.path.isfile(inside):
        return inside
    return path if path.suffix == ".jsonl" else None


def read_record(path: Path, count: int) -> RecordedDocuments:
    """Return the last ``count`` steps. Where steps go back, as after a resume, the later lines count.

    Raises:
        ValueError: no step is there, or a line does not hold a step's documents; names file, line, and what is wrong.
    """
    name = printable(path)
    lines = list[tuple[int, str]]()
    for number, text in read_lines(path):
        try:
            step = _check_line(parse_json(text))
        except ValueError as error:
            raise ValueError(
                f"{name} does not hold recorded documents: line {number}: {error}"
            ) from None
        while lines and lines[-1][0] >= step:
            lines.pop()
        lines.append((step, text))
    if not lines:
        raise ValueError(
            f"{name}: no step has been recorded; name the dump folder of a job with cad.shadow = true"
        )
    rows = [json.loads(text) for _, text in lines[-count:]]
    batches = []
    for line in rows:
        parts = chain.from_iterable(zip(*line["microbatches"], strict=True))
        batches.append(list(chain.from_iterable(parts)))
    last = rows[-1]
    return RecordedDocuments(
        batches, last["ranks"], len(last["microbatches"]), last_step=last["step"]
    )


def _check_line(line: Any) -> int:
    """Return a line's step. Raises ValueError for anything but a step's documents."""
    if not isinstance(line, dict) or line.get("version") != DOCUMENTS_VERSION:
        raise ValueError(
            f"{brief(line)} must be an object with version = {DOCUMENTS_VERSION}"
        )
    for key in ("step", "ranks", "row_tokens"):
        if not is_integer(line.get(key), 1, MOST):
            raise ValueError(
                f"{key} = {brief(line.get(key))}: must be a positive integer"
            )
    microbatches: Any = line.get("microbatches")
    rows = [microbatches]
    for _ in range(3):  # microbatches, ranks, rows
        if not all(isinstance(part, list) and part for part in rows):
            raise ValueError(
                f"microbatches = {brief(microbatches)}: must be lists of ranks of rows of lengths"
            )
        rows = list(chain.from_iterable(rows))
    if len({len(ranks) for ranks in microbatches}) > 1:
        raise ValueError("microbatches: must have as many ranks each")
    for row in rows:
        if not isinstance(row, list) or not all(
            is_integer(length, 1, MOST) for length in row
        ):
            raise ValueError(
                f"microbatches: a row is {brief(row)}: must be a list of positive integers"
            )
        if sum(row) != line["row_tokens"]:
            raise ValueError(
                f"microbatches: a row is {brief(row)}: must add up to row_tokens = {line['row_tokens']}"
            )
    return line["step"]
