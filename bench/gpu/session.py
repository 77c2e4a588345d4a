# SPDX-License-Identifier: BSD-3-Clause
"""The run of parts: order and budget, and the files written after every part."""

import shlex
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.gpu import results
from bench.gpu.parts import AT_ONCE, ENVIRONMENT, Part, in_groups
from bench.gpu.process import Outcome, run_part
from bench.gpu.report import page

RESERVE_S = 5.0
"""seconds of the budget: to end a part and to write"""
LIMIT = {"cuda": 2.0, "cpu": 4.0}
"""A part is ended after so many times its seconds; stand-ins share few cores."""


class Session:
    """One run, whose results are in ``folder`` after every part.

    Args:
        packages: folder of packages for what is not installed.
        seconds: budget; parts that do not fit are skipped.
        report: gets a line when a part begins and when it ends.

    Attributes:
        outcomes: of the parts of this run that have ended, by name.
        identity: of this run's results.
    """

    def __init__(
        self,
        folder: Path,
        device: str,
        packages: Path | None,
        seconds: float,
        report: Callable[[str], None],
    ) -> None:
        self.folder = folder
        self.device = device
        self.packages = packages
        self.report = report
        self.outcomes: dict[str, Outcome] = {}
        self._begin = time.monotonic()
        self._seconds = seconds
        self._lock = threading.Lock()
        self.identity: dict[str, Any] = {}

    def run(self, parts: Sequence[Part], resume: bool = False) -> bool:
        """Run ``parts`` after the environment and return whether none failed or timed out.

        Args:
            resume: leave out what the folder has as done for the same GPU, torch and sources.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = self._run(ENVIRONMENT)
        self.identity = results.identity(
            environment.figures, dry_run=self.device == "cpu"
        )
        left = [part for part in parts if part is not ENVIRONMENT]
        if environment.status != "done":  # a device that cannot compute has no results
            self.outcomes[ENVIRONMENT.name] = environment
            self.outcomes |= {
                part.name: Outcome("skipped", "the environment cannot run it")
                for part in left
            }
            self.report(
                f"{ENVIRONMENT.name}: {environment.status}: {environment.why}; nothing was run or written"
            )
            return False
        self._keep(ENVIRONMENT, environment)
        if resume:
            done = results.done(results.read(self.folder), self.identity)
            for part in left:
                if part.name in done:
                    self.report(f"{part.name}: done before")
            left = [part for part in left if part.name not in done]
        for group in in_groups(left):
            self._run_group(group)
        return not any(
            outcome.status in ("failed", "timed out")
            for outcome in self.outcomes.values()
        )

    def _run_group(self, group: Sequence[Part]) -> None:
        def run(part: Part) -> None:
            self._keep(part, self._run(part))

        if len(group) == 1:  # in this thread, so that a signal ends the part, too
            run(group[0])
            return
        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            list(pool.map(run, group))
        finally:  # after a signal the parts that run end within their limits, and no other begins
            pool.shutdown(cancel_futures=True)

    def _run(self, part: Part) -> Outcome:
        left = self._begin + self._seconds - time.monotonic() - RESERVE_S
        limit_s = min(LIMIT[self.device] * part.seconds, left)
        if limit_s < part.seconds / 2:
            return Outcome(
                "skipped",
                f"no time: {max(0.0, limit_s):.0f} s left for it, it takes {part.seconds:.0f}",
            )
        self.report(f"{part.name}: {part.title} ...")
        return run_part(part, self.device, limit_s, self.packages)

    def _keep(self, part: Part, outcome: Outcome) -> None:
        with self._lock:
            self.outcomes[part.name] = outcome
            self.report(
                f"{part.name}: {outcome.status}, {outcome.seconds:.1f} s {outcome.why}".rstrip()
            )
            result = {
                "part": part.name,
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "command": f"python -m bench.gpu {shlex.join(sys.argv[1:])}".rstrip(),
                **self.identity,
                **asdict(outcome),
            }
            results.write(self.folder, result)
            results.write_page(self.folder, page(results.read(self.folder)))
