# SPDX-License-Identifier: BSD-3-Clause
"""Ten planted faults, each of which the short tests must find: ``make mutations``; exit code 1 if one is not found.

A fault replaces a piece of the package's text in a copy of the repository, where tests run until the first failure.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = "torchtitan_cad"


@dataclass(frozen=True)
class Fault:
    """``new`` in place of ``old``, which ``file`` of the package has once; to be found by the files ``tests``."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def plant(self, repository: Path) -> None:
        """Raises ValueError if the text to replace is not there once."""
        path = repository / PACKAGE / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: {self.file} has {text.count(self.old)} times {self.old!r}, not once"
            )
        path.write_text(text.replace(self.old, self.new))
        if "jit" in text:  # numba looks for changes in the file of the entry point only
            for compiled in (repository / PACKAGE).rglob("*.nbi"):
                compiled.unlink()


FAULTS = [
    Fault(
        "planner: what is left behind a piece that moves is lost",
        "planning/planners/local_search/board.py",
        "add_piece(board, board.parts[k], before)",
        "_ = board.parts[k]",
        ("planning/test_planner.py", "planning/test_properties.py"),
    ),
    Fault(
        "planner: tasks of different servers are joined",
        "planning/model/tasks.py",
        'for name in ("doc", "server", "kv_start")',
        'for name in ("doc", "kv_start")',
        (
            "planning/test_plan.py",
            "planning/test_planner.py",
            "planning/test_properties.py",
        ),
    ),
    Fault(
        "exchange: the offset at a server counts the server's own rows",
        "planning/exchange/needs.py",
        "lower_homes = self.travels & (self.home < rank)",
        "lower_homes = self.home < rank",
        ("planning/test_validate.py",),
    ),
    Fault(
        "exchange: received rows are looked up by position instead of by sender",
        "planning/exchange/tables.py",
        'arrival = remote[np.argsort(home[remote], kind="stable")]',
        "arrival = remote",
        ("planning/test_properties.py", "runtime/test_engine.py"),
    ),
    Fault(
        "merge: each partial gets the other one's weight",
        "runtime/kernels/merge.py",
        "weight_a = (lse_a - top).exp_()\n    weight_b = (lse_b - top).exp_()",
        "weight_b = (lse_a - top).exp_()\n    weight_a = (lse_b - top).exp_()",
        ("runtime/test_kernels.py", "runtime/test_engine.py"),
    ),
    Fault(
        "backward: rowsum(dO * O) is left out",
        "runtime/kernels/cpu.py",
        "torch.baddbmm(neg_delta, dout, v_t)",
        "torch.bmm(dout, v_t)",
        ("runtime/test_kernels.py", "runtime/test_engine.py"),
    ),
    Fault(
        "transport: a chunk brings rows of the chunk before",
        "runtime/row_tables.py",
        "index = concat_ranges(first_sent + first - counts.offsets, sent)",
        "index = concat_ranges(first_sent, sent)",
        ("runtime/test_engine.py",),
    ),
    Fault(
        "loader: a batch carries the plan before its own",
        "integration/loading/loader.py",
        "HostTensor.wrap(planned_batch.keys)",
        "HostTensor.wrap(planned_batch.keys - 1)",
        ("integration/test_loader.py",),
    ),
    Fault(
        "schedule: backward goes down the pipeline as forward does",
        "planning/pipeline/ticks.py",
        "first = [rank if forward else num_ranks - 1 - rank for rank in range(num_ranks)]",
        "first = [rank for rank in range(num_ranks)]",
        ("planning/test_pipeline.py",),
    ),
    Fault(
        "schedule: backward asks the first block instead of the last whether it recomputes",
        "planning/pipeline/program.py",
        "stage[-1 - index]",
        "stage[index]",
        ("planning/test_pipeline.py",),
    ),
]


def first_failure(repository: Path, tests: tuple[str, ...]) -> str | None:
    """The short set's first test of those files that fails; None if all pass.

    Raises:
        RuntimeError: the tests cannot run.
    """
    files = [f"tests/{test}" for test in tests]
    options = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command = [sys.executable, *options, *files]
    env = {**os.environ, "PYTHONPATH": str(repository)}
    done = subprocess.run(
        command, cwd=repository, env=env, capture_output=True, text=True
    )
    if done.returncode == 0:
        return None
    found = re.search(
        r"^(?:FAILED|ERROR) (tests/\S+::\S.*?)(?: - .*)?$", done.stdout, re.MULTILINE
    )
    if done.returncode != 1 or not found:
        said = f"{done.stdout[-4000:]}{done.stderr[-4000:]}"
        raise RuntimeError(f"pytest ended with exit code {done.returncode}:\n{said}")
    return found[1]


def main() -> int:
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, fault in enumerate(FAULTS):
            copy = Path(folder) / str(number)
            shutil.copytree(
                REPOSITORY,
                copy,
                ignore=shutil.ignore_patterns(
                    ".*", "outputs", "build", "*.egg-info", "*.pyc"
                ),
                symlinks=True,
            )
            fault.plant(copy)
            begin = time.monotonic()
            found = first_failure(copy, fault.tests)
            missed += found is None
            seconds = time.monotonic() - begin
            print(
                f"{fault.name}\n    {found or 'NOT FOUND'}  ({seconds:.0f} s)",
                flush=True,
            )
            shutil.rmtree(copy)
    print(f"{len(FAULTS) - missed} of {len(FAULTS)} faults found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
