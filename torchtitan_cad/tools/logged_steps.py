# SPDX-License-Identifier: BSD-3-Clause
"""Reading the figures of a run's logged steps, every line of which is checked before any is used."""

import glob
from collections.abc import Callable
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from torchtitan_cad.integration.report.steps_file import STEPS_NAME
from torchtitan_cad.planning.files import read_lines
from torchtitan_cad.planning.text import (
    brief,
    is_integer,
    is_number,
    parse_json,
    printable,
)

RANKED = ("ranked_before", "ranked_after")
"""Keys of every line: the ranks' work over the mean, the busiest first."""
MEANS = {
    "imbalance_before": ("attention imbalance (max/mean), before", 1),
    "imbalance_after": ("attention imbalance (max/mean), after", 1),
    "bytes_per_rank_mean": ("sent per rank and layer forward (MB)", 1e-6),
    "bytes_per_rank_max": ("sent by the busiest rank (MB)", 1e-6),
    "tasks_moved": ("tasks moved per microbatch", 1),
    "exposed_percent": ("exposed wait (% of the time)", 1),
}
MEDIANS = {
    "tokens_per_second": ("tokens per second and GPU (median)", 1),
    "mfu_percent": ("mfu (%, median), by the documents' pairs", 1),
    "plan_seconds": ("planning (ms, median)", 1e3),
    "exchange_seconds": ("exchange (ms, median)", 1e3),
}
"""Both: keys that are summed up, with words and the factor for their unit."""
FIGURES = (*MEANS, *MEDIANS, "loss")
"""Keys of numbers, any of which may be missing or null."""
MOST = 1e30
"""largest number of a line, of whose sums none overflows"""
MOST_STEPS = 2**53

Say = Callable[[str], None]


def find_steps(path: Path) -> Path:
    """Return the steps file that is named, or in a folder, or else the newest below it, also behind links of folders.

    Raises ValueError if there is none.
    """
    for named in (path, path / STEPS_NAME):
        if named.name == STEPS_NAME and named.exists() and not named.is_dir():
            return named
    below = glob.glob(f"**/{STEPS_NAME}", root_dir=path, recursive=True)
    found = [path / name for name in below if (path / name).is_file()]
    if not found:
        raise ValueError(
            f"{printable(path)}: there is no {STEPS_NAME}; name the dump folder of a job with parallelism.cad"
        )
    return max(found, key=lambda file: file.stat().st_mtime_ns)


def read_steps(path: Path, say: Say = lambda text: None) -> list[dict[str, Any]]:
    """Return the figures of every logged step, the steps ascending.

    Where steps go back, a run was resumed from a checkpoint: the later lines count. Lines that a kill has cut are left
    out. ``say`` gets a line for either.

    Raises:
        ValueError: no step is there, or a line does not hold a step's figures; names file, line, key and value.
    """
    rows = list[tuple[int, dict[str, Any]]]()
    for number, line in read_lines(path):
        where = f"line {number}"
        if line.startswith("{") and not line.rstrip().endswith("}"):
            say(f"{printable(path)}: {where} is cut off, as by a kill: it is left out")
            continue
        try:
            row = _checked(line)
        except ValueError as error:
            raise ValueError(
                f"{printable(path)} does not hold the figures of a run: {where}: {error}"
            ) from None
        if rows and row["step"] <= rows[-1][1]["step"]:
            before = len(rows)
            rows = [known for known in rows if known[1]["step"] < row["step"]]
            text = f"goes back to step {row['step']}, as a resumed run does: {before - len(rows)} earlier lines"
            say(f"{printable(path)}: {where} {text} from that step on are left out")
        rows.append((number, row))
    if not rows:
        raise ValueError(f"{printable(path)}: no step has been logged yet")
    first = rows[0][0]
    ranks = len(rows[0][1][RANKED[0]])
    for number, row in rows:
        if (count := len(row[RANKED[0]])) != ranks:
            raise ValueError(
                f"{printable(path)}: line {number} has {count} ranks and line {first} has {ranks}: leave the lines of "
                "one run in it"
            )
    return [row for _, row in rows]


def _checked(line: str) -> dict[str, Any]:
    """Return a line's figures. Raises ValueError naming key and value."""
    try:
        row = parse_json(line)
    except JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{brief(row)} must be an object")
    if not is_integer(row.get("step"), 0, MOST_STEPS):
        raise ValueError(
            f"step = {brief(row.get('step'))}: must be an integer, 0 to {MOST_STEPS}"
        )
    for key in RANKED:
        ranks = row.get(key)
        if not isinstance(ranks, list) or not ranks or not all(map(_is_figure, ranks)):
            raise ValueError(
                f"{key} = {brief(ranks)}: must be a list of finite numbers, one a rank"
            )
    before, after = (len(row[key]) for key in RANKED)
    if before != after:
        raise ValueError(
            f"{RANKED[0]} has {before} ranks, {RANKED[1]} has {after}: must be as many"
        )
    for key in FIGURES:
        if row.get(key) is not None and not _is_figure(row[key]):
            raise ValueError(
                f"{key} = {brief(row[key])}: must be a finite number, at most {MOST:g}"
            )
    return row


def _is_figure(value: object) -> bool:
    return is_number(value) and abs(value) <= MOST  # type: ignore[arg-type]
