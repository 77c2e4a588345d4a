# SPDX-License-Identifier: BSD-3-Clause
"""Runs one part in a process of its own, within a time limit."""

import contextlib
import getpass
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu.parts import Part

ROOT = Path(__file__).parents[2]
TAIL = 4000
"""Characters kept of what a part has printed, unless it is done."""
LAST_WORDS_S = 2.0
"""For a process that hangs to say where."""
GIVEN_UP_S = 10.0
"""To wait for a process that was killed: one that hangs in a driver may stay."""


@dataclass
class Outcome:
    """The end of a part.

    Attributes:
        status: "done", "failed", "timed out" or "skipped".
        why: unless it is done.
        output: the end of what it has printed, unless it is done.
    """

    status: str
    why: str = ""
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    output: str = ""


def run_part(part: Part, device: str, limit_s: float, packages: Path | None) -> Outcome:
    """The part's outcome; what it had measured before it failed or was ended is among the figures."""
    with tempfile.TemporaryDirectory(prefix="bench_gpu_") as folder:
        lines = Path(folder, "lines")
        log = Path(folder, "log")
        lines.touch()
        command = [
            sys.executable,
            "-u",
            "-m",
            "bench.gpu.child",
            json.dumps(asdict(part)),
            device,
            str(lines),
        ]
        begin = time.monotonic()
        with log.open("w") as file:
            process = subprocess.Popen(
                [*command, *([str(packages)] if packages else [])],
                cwd=ROOT,
                env=_environment(device, folder),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            code = _wait(process, limit_s)
        outcome = _outcome(code, lines.read_text(), log.read_text(errors="replace"))
        outcome.seconds = round(time.monotonic() - begin, 1)
        if code is None:
            outcome.why = f"ended after {limit_s:.0f} s" + (
                f"; {outcome.why}" if outcome.why else ""
            )
        return outcome


def _environment(device: str, folder: str) -> dict[str, str]:
    """Return a part's variables: what it leaves in its folder for temporary files ends with it, but for caches."""
    cache = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    env = {
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        **os.environ,
        "TMPDIR": folder,
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        ),
    }
    # stand-ins: no GPU even if there is one, and parts that run at once share few cores
    if device == "cpu":
        env |= {
            "CUDA_VISIBLE_DEVICES": "",
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
        }
    return env


def _wait(process: subprocess.Popen, limit_s: float) -> int | None:
    """The exit code, or None for a process that had to be ended. Nothing that it has started is left."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGUSR1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LAST_WORDS_S)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GIVEN_UP_S)


def _outcome(code: int | None, lines: str, output: str) -> Outcome:
    figures: dict[str, Any] = {}
    skip = None
    output = output.replace(str(ROOT), ".")  # results say nothing of folders
    for line in lines.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            # of a line that was being written
            entry = json.loads(line)
            if "skip" in entry:
                skip = entry["skip"]
            else:
                figures[entry["name"]] = entry["value"]
    running = figures.pop("running", None)
    if code is None:
        return Outcome(
            "timed out",
            f"in {running}" if running else "",
            0.0,
            figures,
            output[-TAIL:],
        )
    if code == 0:
        return (
            Outcome("done", "", 0.0, figures)
            if skip is None
            else Outcome("skipped", skip, 0.0, figures)
        )
    last = next(
        (line.strip() for line in reversed(output.splitlines()) if line.strip()), ""
    )
    why = (
        f"killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else last
    )
    return Outcome(
        "failed",
        f"{why}, in {running}" if running else why,
        0.0,
        figures,
        output[-TAIL:],
    )
