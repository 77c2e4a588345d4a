# SPDX-License-Identifier: BSD-3-Clause
"""A job on the nodes of tests/lib/network.py, and what every node prints."""

import re
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tests.lib.jobs.harness import ENVIRONMENT, job_files
from tests.lib.jobs.launched import CONFIG, SMALL, losses_in, read_lines
from tests.lib.network import Nodes


class NodesJob:
    """``train_configs/llama3_debug_cpu.toml``, made small, with ``ranks`` ranks on every node."""

    def __init__(
        self, nodes: Nodes, ranks: int, args: Sequence[str], folder: Path
    ) -> None:
        job = [*job_files(CONFIG, folder), *SMALL, *args]
        self.lines = [[] for _ in range(nodes.count)]
        """Per node, every line with the time when it came."""
        pipe = {
            "env": ENVIRONMENT,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
        }
        self.processes = [
            nodes.torchrun(node, ranks, ["-m", "tests.lib.jobs.train", *job], **pipe)
            for node in range(nodes.count)
        ]
        for process, lines in zip(self.processes, self.lines, strict=True):
            take = lambda line, lines=lines: lines.append((time.monotonic(), line))  # noqa: E731
            threading.Thread(
                target=read_lines, args=(process, take), daemon=True
            ).start()

    @property
    def text(self) -> str:
        """Everything that was printed, node by node."""
        return "\n".join(
            f"node{node}: {line}"
            for node, lines in enumerate(self.lines)
            for _, line in lines
        )

    @property
    def losses(self) -> list[float]:
        """Losses of the steps so far, once each: in a pipeline only the last stage knows them."""
        return [loss for _, loss in sorted(set(losses_in(self.text)))]

    def wait_for(
        self, node: int, pattern: str, timeout_s: float, since: float = 0.0
    ) -> None:
        """Wait for a line of a node, printed after ``since``. Raises AssertionError if none comes in time."""
        deadline = time.monotonic() + timeout_s
        while not any(
            at >= since and re.search(pattern, line) for at, line in self.lines[node]
        ):
            assert time.monotonic() < deadline, (
                f"no line {pattern!r} of node {node}:\n{self.text}"
            )
            time.sleep(0.05)

    def finish(self, timeout_s: float) -> list[int]:
        """Wait for the launchers; returns their exit codes."""
        deadline = time.monotonic() + timeout_s
        return [
            process.wait(max(0.0, deadline - time.monotonic()))
            for process in self.processes
        ]
