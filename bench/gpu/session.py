# SPDX-License-Identifier: BSD-3-Clause
"""The run of all parts: order, budget, and the files written after every part."""

import hashlib
import itertools
import json
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.gpu.parts import ENVIRONMENT, Part
from bench.gpu.process import ROOT, Outcome, run_part
from bench.gpu.report import find_verdicts, markdown

JSON_NAME, REPORT_NAME = "gpu.json", "gpu.md"
RESERVE_S = 5.0
"""seconds of the budget: to end a part and to write"""
AT_ONCE = 4
"""parts: those that are not timed run so many at once"""
SOURCES = ("torchtitan_cad", "bench", "tests/gpu")


class Session:
    """One run, whose results are in ``folder`` after every part.

    Args:
        packages: folder of packages for what is not installed.
        seconds: budget; parts that do not fit are skipped.
        report: gets a line when a part begins and when it ends.
    """

    def __init__(
        self, folder: Path, device: str, packages: Path | None, seconds: float, report: Callable[[str], None]
    ) -> None:
        self.folder, self.device, self.packages, self.report = folder, device, packages, report
        self._begin, self._seconds = time.monotonic(), seconds
        self._lock = threading.Lock()
        self.document: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": f"python -m bench.gpu {shlex.join(sys.argv[1:])}".rstrip(),
            "dry_run": device == "cpu",
            "seconds": 0.0,
            "identity": {},
            "goals": [],
            "parts": {},
        }

    def run(self, parts: Sequence[Part], resume: bool = False) -> bool:
        """Runs ``parts`` after the environment; returns whether none failed or timed out.

        Args:
            resume: leaves out what the files of the same GPU, torch and sources have as done.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        before = _read(self.folder / JSON_NAME) if resume else {}
        environment = self._run(ENVIRONMENT)
        figures = environment.figures
        self.document["identity"] = identity = {
            **{name: str(figures.get(name, "unknown")) for name in ("gpu", "torch", "python")},
            "sources": source_hash(),
            "commit": commit(),
        }
        self._keep(ENVIRONMENT, environment)
        known = before.get("parts", {}) if _same(before.get("identity", {}), identity) else {}
        parts = [part for part in parts if part is not ENVIRONMENT]
        if environment.status != "done":
            for part in parts:
                self._keep(part, Outcome("skipped", "the environment cannot run it"))
            return False
        left = []
        for part in parts:
            if known.get(part.name, {}).get("status") == "done":
                self.document["parts"][part.name] = known[part.name]
                self.report(f"{part.name}: done before")
            else:
                left.append(part)
        for name, outcome in known.items():  # of parts that were not asked for this time
            self.document["parts"].setdefault(name, outcome)
        self._run_all(left)
        mine = [self.document["parts"][part.name] for part in (ENVIRONMENT, *parts)]
        return not any(outcome["status"] in ("failed", "timed out") for outcome in mine)

    def _run_all(self, parts: Sequence[Part]) -> None:
        def run(part: Part) -> None:
            self._keep(part, self._run(part))

        for is_timed, group in itertools.groupby(parts, lambda part: part.timed and self.device == "cuda"):
            if is_timed:  # in this thread, so that a signal ends the part, too
                for part in group:
                    run(part)
            else:
                pool = ThreadPoolExecutor(AT_ONCE)
                try:
                    list(pool.map(run, group))
                finally:  # after a signal the parts that run end within their limits, and no other begins
                    pool.shutdown(cancel_futures=True)

    def _run(self, part: Part) -> Outcome:
        left = self._begin + self._seconds - time.monotonic() - RESERVE_S
        limit_s = min(2 * part.seconds, left)
        if limit_s < part.seconds / 2:
            return Outcome("skipped", f"no time: {max(0.0, limit_s):.0f} s left for it, it takes {part.seconds:.0f}")
        self.report(f"{part.name}: {part.title} ...")
        return run_part(part, self.device, limit_s, self.packages)

    def _keep(self, part: Part, outcome: Outcome) -> None:
        with self._lock:
            self.document["parts"][part.name] = asdict(outcome)
            self.document["seconds"] = round(time.monotonic() - self._begin, 1)
            self.report(f"{part.name}: {outcome.status}, {outcome.seconds:.1f} s {outcome.why}".rstrip())
            self.document["goals"] = [verdict._asdict() for verdict in find_verdicts(self.document)]
            _write(self.folder / JSON_NAME, json.dumps(self.document, indent=1) + "\n")
            _write(self.folder / REPORT_NAME, markdown(self.document))


def _same(old: dict[str, str], new: dict[str, str]) -> bool:
    return all(old.get(name) == new[name] for name in ("gpu", "torch", "sources"))


def source_hash() -> str:
    """Hash of all code measured and measuring: it stands for the commit where there is no git, and shows edits."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def commit() -> str:
    """HEAD of the working tree, or "unknown" where there is no git."""
    try:
        command = ("git", "rev-parse", "--short=12", "HEAD")
        return subprocess.check_output(command, cwd=ROOT, text=True, timeout=10, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _read(path: Path) -> dict[str, Any]:
    """An earlier run's document; nothing if there is none that can be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    unfinished = path.with_suffix(path.suffix + ".tmp")
    unfinished.write_text(text)
    unfinished.replace(path)
