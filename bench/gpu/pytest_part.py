# SPDX-License-Identifier: BSD-3-Clause
"""One file of tests, with its results test by test."""

from collections import Counter
from typing import Any

import pytest

from bench.gpu.parts import Emit, Skip

SHOWN = 2000
"""Characters of a failure that are kept: its end, which says what failed."""


class _Results:
    """Emits what has passed, failed and been skipped so far, and the test that runs now."""

    def __init__(self, emit: Emit) -> None:
        self.emit = emit
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.failures: list[dict[str, Any]] = []

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.emit("running", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._count(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._count(report)

    def _count(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        self.counts[report.outcome] += 1
        if report.outcome == "failed":
            self.failures.append(
                {"test": report.nodeid, "text": report.longreprtext[-SHOWN:]}
            )
            self.emit("failures", self.failures)
        elif report.outcome == "skipped":
            reason = (
                report.longrepr[2]
                if isinstance(report.longrepr, tuple)
                else str(report.longrepr)
            )
            self.reasons[reason.removeprefix("Skipped: ")] += 1
            self.emit("skips", dict(self.reasons))
        self.emit("tests", dict(self.counts))


def run(device: str, emit: Emit, file: str) -> None:
    """Runs the tests of ``file`` that need a GPU. Exits if one fails; skips if all are skipped."""
    results = _Results(emit)
    code = pytest.main(
        ["-m", "gpu", "--tb=short", "-p", "no:cacheprovider", file], plugins=[results]
    )
    emit("running", None)
    if results.failures:
        raise SystemExit(f"{len(results.failures)} of {results.counts.total()} failed")
    if not results.counts["passed"] and results.reasons:
        raise Skip(f"every test was skipped: {', '.join(results.reasons)}")
    if code:
        raise SystemExit(f"pytest ended with code {int(code)}")
