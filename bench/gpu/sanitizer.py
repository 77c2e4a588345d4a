# SPDX-License-Identifier: BSD-3-Clause
"""compute-sanitizer over two ranks in one process: what the kernels read, write and share is theirs.

memcheck finds accesses outside of allocations, initcheck reads of what nobody wrote, racecheck races in shared memory.
The tools run at once, as each of them keeps one CPU core and little of the GPU busy. Without torch's caching allocator
every tensor is an allocation of its own, so that a read behind its end is found. On the CPU the same program runs
without a sanitizer.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu.child import TOO_NEW
from bench.gpu.parts import Emit, Skip
from bench.gpu.process import ROOT
from bench.gpu.sanitized import PLANTED

PROGRAM = "compute-sanitizer"
FOLDERS = "/usr/local/cuda*/bin"
FOUND = 9
"""Exit code of the sanitizer where it reports errors."""
LIMIT_S = 60.0
SHOWN = 3000
"""Characters kept of a bad tool's output, from its first report on and at its end."""
KERNELS = (
    "_gather_rows",
    "_merge_rows",
    "_post",
    "_prepare_statistics",
    "_put_rows",
    "_row_delta",
    "_sum_rows",
    "_wait",
)
"""CAD's own, as the sanitizer names them."""
REPORT = re.compile(
    r"^========= (?!COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY|Target application)(\S.*)$"
)
SUMMARY = re.compile(r"SUMMARY: (\d+)")
PLACE = re.compile(r"\bat (?:0x[0-9a-f]+ in )?(?:void )?([\w:<>~]+)")
"""Where a report names a kernel: "at _put_rows+0x160", or "at 0x160 in _put_rows" before CUDA 12.3."""


class Tool(NamedTuple):
    """A tool of the sanitizer; the ports on which it talks to its program differ, so that several can run."""

    name: str
    port: int
    options: tuple[str, ...]


TOOLS = (
    Tool("memcheck", 49152, ("--report-api-errors=no",)),
    Tool("initcheck", 49252, ()),
    Tool("racecheck", 49352, ("--kernel-name=regex=_sum_rows|_merge_rows|_row_delta",)),
)
CONTROL = Tool("memcheck", 49452, ("--report-api-errors=no",))
"""For the program with a planted fault, which it must find."""


@dataclass
class Finding:
    """What became of a tool.

    Attributes:
        errors: that it reports.
        of_others: kernels that are not CAD's and that initcheck reports, which it forgives: some libraries read rows
            behind the last one and do not use them.
        output: from the first report on, and the end; "" unless ``bad``.
        bad: why the part fails, or "".
    """

    tool: str
    seconds: float
    errors: int
    of_others: list[str]
    output: str
    bad: str


def measure(device: str, emit: Emit) -> None:
    """Emits a row per tool.

    Raises:
        Skip: there is no compute-sanitizer, or it does not support this system.
        RuntimeError: a tool reports errors of CAD's kernels, fails or takes too long.
    """
    if device == "cpu":
        _run_unwatched(emit)
        return
    program = find_program()
    rows: list[dict[str, Any]] = []
    bad = []
    with ThreadPoolExecutor(len(TOOLS) + 1) as pool:
        planted = pool.submit(
            run_tool, program, CONTROL, [*watched_program(device), PLANTED], LIMIT_S
        )
        for finding in pool.map(
            lambda tool: run_tool(program, tool, watched_program(device), LIMIT_S),
            TOOLS,
        ):
            rows.append(
                {
                    name: value
                    for name, value in asdict(finding).items()
                    if value or name != "output"
                }
            )
            emit("tools", rows)
            bad += [f"{finding.tool}: {finding.bad}"] if finding.bad else []
        found = planted.result().errors
    emit("errors found where one is planted", found)
    if not found:
        bad.append("memcheck does not find a planted read behind the last row")
    if bad:
        raise RuntimeError("; ".join(bad))


def find_program() -> str:
    """Path of compute-sanitizer.

    Raises:
        Skip: there is none.
    """
    folders = [
        str(folder)
        for folder in sorted(Path("/").glob(FOLDERS.lstrip("/")), reverse=True)
    ]
    found = shutil.which(
        PROGRAM, path=os.pathsep.join([os.environ.get("PATH", ""), *folders])
    )
    if found is None:
        raise Skip(f"there is no {PROGRAM} on PATH or in {FOLDERS}")
    return found


def watched_program(device: str) -> list[str]:
    """The command that plays two ranks."""
    return [sys.executable, "-m", "bench.gpu.sanitized", device]


def run_tool(program: str, tool: Tool, command: list[str], limit_s: float) -> Finding:
    """Runs ``command`` under a tool, for ``limit_s`` seconds at most.

    Raises:
        Skip: the sanitizer does not support this system.
    """
    watched = [
        program,
        f"--tool={tool.name}",
        f"--error-exitcode={FOUND}",
        f"--port={tool.port}",
    ]
    watched += [
        "--target-processes=application-only",
        "--launch-timeout=0",
        *tool.options,
        *command,
    ]
    begin = time.monotonic()
    code, output = _run(watched, limit_s)
    return judge(tool.name, code, output, round(time.monotonic() - begin, 1))


def _run(command: list[str], limit_s: float) -> tuple[int | None, str]:
    """Exit code, None after ``limit_s``, and output. Nothing that the command has started is left."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return None, output


def judge(tool: str, code: int | None, output: str, seconds: float) -> Finding:
    """What a tool has found, by its exit code and output.

    Raises:
        Skip: the sanitizer does not support this system.
    """
    if "Device not supported" in output:
        raise Skip(f"{PROGRAM} does not support this device or system")
    summaries = SUMMARY.findall(output)
    errors = int(summaries[-1]) if summaries else 0
    finding = Finding(tool, seconds, errors, [], "", "")
    if code == 0:
        finding.bad = "" if summaries else "it says nothing of errors"
        finding.output = finding.bad and shown(output)
        return finding
    if code is None:
        finding.bad = f"ended after {seconds:.0f} s"
    elif code != FOUND:
        finding.bad = f"exit code {code}"
    else:
        reports = kernels_of_reports(output)
        forgiven = tool == "initcheck" and all(
            kernel not in (None, *KERNELS) for kernel in reports
        )
        if reports and forgiven:
            finding.of_others = sorted({kernel for kernel in reports if kernel})
            return finding
        finding.bad = f"errors: {errors or 'not counted'}"
    finding.output = shown(output)
    return finding


def kernels_of_reports(output: str) -> list[str | None]:
    """The kernel of every report, None where it names none."""
    kernels: list[str | None] = []
    for line in output.splitlines():
        place = PLACE.search(line)
        name = place[1] if place else None
        if REPORT.match(line):
            kernels.append(name)
        elif kernels and kernels[-1] is None and line.startswith("=========     at "):
            kernels[-1] = name
    return kernels


def shown(output: str) -> str:
    """The first report and the end of a tool's output."""
    lines = output.splitlines(keepends=True)
    first = next((number for number, line in enumerate(lines) if REPORT.match(line)), 0)
    reports = "".join(lines[first:])
    return (
        reports
        if len(reports) <= SHOWN
        else f"{reports[: SHOWN // 2]}\n...\n{reports[-SHOWN // 2 :]}"
    )


def _run_unwatched(emit: Emit) -> None:
    """Runs the program alone, as a sanitizer would.

    Raises:
        Skip: Triton's interpreter does not work with the installed numpy.
        RuntimeError: the program fails.
    """
    code, output = _run(watched_program("cpu"), LIMIT_S)
    if code and TOO_NEW in output:
        raise Skip("Triton's interpreter does not work with this numpy")
    emit("without a sanitizer", output[-SHOWN:].strip())
    if code != 0:
        raise RuntimeError(
            f"two ranks in one process failed with code {code}: {output[-SHOWN:]}"
        )
