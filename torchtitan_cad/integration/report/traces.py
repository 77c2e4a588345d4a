"""Completes torchtitan's traces: names of linear work for Perfetto, and a name for TensorBoard's profile plugin."""

import json
import logging
import os
import re
import shutil
from pathlib import Path

from torchtitan_cad.integration.report.linear_work import Event, LinearWork, read_events, unnamed_linear_work

CATEGORY = "cad_linear"
"""Of the events that are added."""
ROW = 2**31 - 1
"""Their thread: no thread of Linux has that number."""
MOST_BYTES = 512 * 2**20
"""Of traces that are read when a job ends: about five seconds of it."""

logger = logging.getLogger(__name__)


def complete_traces(folder: Path, rank: int, *, failed: bool = False) -> list[Path]:
    """Name linear work in this rank's traces, and let ``rank0_trace.json`` have the name ``rank0.pt.trace.json`` too.

    Args:
        folder: holds torchtitan's ``iteration_N`` folders; it need not exist.
        failed: the job has; no trace is read then, as others may wait for this process to end.

    Returns:
        The new names. Traces that have theirs already are left alone.
    """
    named, unread, left = [], 0, 0 if failed else MOST_BYTES
    for trace in sorted(folder.glob(f"iteration_*/rank{rank}_trace.json")):
        name = trace.with_name(f"rank{rank}.pt.trace.json")
        if name.exists():
            continue
        try:
            size = trace.stat().st_size
            if size <= left:
                left -= size
                name_linear_work(trace)
            else:
                unread += 1
        except Exception as error:  # a trace that was cut short, a full disk: a job does not fail at its end for that
            logger.warning(f"{trace}: names of linear work are missing ({type(error).__name__}: {error})")
        try:
            os.link(trace, name)
        except OSError:  # a file system without links
            shutil.copyfile(trace, name)
        named.append(name)
    if unread and not failed:
        logger.info(
            f"Linear work has no name in {unread} of {len(named)} new traces below {folder}: they would take too long "
            "to read; bench.trace finds it"
        )
    return named


def name_linear_work(trace: Path) -> None:
    """Add to a trace the linear work that has no name in it, on a row of its own.

    Raises:
        ValueError, LookupError, TypeError, AttributeError, RecursionError: it is no trace of torch.profiler.
        OSError: it cannot be read or written.
    """
    content = trace.read_bytes()
    events = read_events(content)
    work = unnamed_linear_work(events)
    begin = re.search(rb'"traceEvents"\s*:\s*\[', content)
    if not work or begin is None or any(event.get("cat") == CATEGORY for event in events):
        return
    written = trace.with_suffix(".part")
    try:
        with written.open("wb") as file:
            file.write(content[: begin.end()])
            file.write("".join(f"\n{json.dumps(event)}," for event in _events(work)).encode())
            file.write(memoryview(content)[begin.end() :])
        written.replace(trace)  # whole at any moment
    finally:
        written.unlink(missing_ok=True)


def _events(work: list[LinearWork]) -> list[Event]:
    pids = dict.fromkeys(each.pid for each in work)
    rows = [
        {"ph": "M", "name": name, "pid": pid, "tid": ROW, "args": args}
        for pid in pids
        for name, args in (("thread_name", {"name": "linear work"}), ("thread_sort_index", {"sort_index": 0}))
    ]
    return rows + [
        {
            "ph": "X",
            "cat": CATEGORY,
            "name": f"cad/{each.name}",
            "pid": each.pid,
            "tid": ROW,
            "ts": each.start,
            "dur": each.end - each.start,
        }
        for each in work
    ]
