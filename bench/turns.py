# SPDX-License-Identifier: BSD-3-Clause
"""Jobs of ``measured`` that take turns of one step, so that all have the same share of what else the machine does.

    torchrun ... -m bench.turns FOLDER --job.config_file train.toml

is a rank of such a job: a step waits until the number in FOLDER/turn is at least its own. The process's
``time.perf_counter`` stands still meanwhile.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from torchtitan_cad.runtime.exchange import ExchangeClock
from torchtitan_cad.tools.compare import measured

TURN = "turn"
"""name of the file"""
POLL_S = 0.01
"""seconds: how often it is read"""


class TurnTaker:
    """A job that trains only in its turns.

    Whoever makes it starts its ranks, appends them to ``processes`` and lets them write to ``log``.

    Attributes:
        folder: of its records, its logs and the file by which it gets its turns.
        steps: that it has been allowed so far.
    """

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self.folder = folder
        self.num_ranks = num_ranks
        self.steps, self.processes = 0, list[subprocess.Popen]()
        folder.mkdir(parents=True, exist_ok=True)
        self._records = [folder / f"rank{rank}.jsonl" for rank in range(num_ranks)]
        for old_record in self._records:
            old_record.unlink(missing_ok=True)
        (folder / TURN).write_text("0")

    def log(self, number: int) -> Path:
        """Return the log of one of the job's processes."""
        return self.folder / f"log{number}.txt"

    def turn(self, steps: int = 1) -> None:
        """Let the job train some steps, and wait until all ranks have recorded them; raise as ``await_records``."""
        self.allow(steps)
        self.await_records()

    def allow(self, steps: int) -> None:
        """Let the job train some steps more."""
        self.steps += steps
        allowed = self.folder / "next"
        allowed.write_text(str(self.steps))
        allowed.rename(self.folder / TURN)

    def await_records(self) -> None:
        """Wait until all ranks have recorded the steps that they were allowed.

        Raises:
            RuntimeError: the job ended before; says where its logs are, and how the first of them ends.
        """
        while not all(map(self._has_recorded, self._records)):
            for number, process in enumerate(self.processes):
                if process.poll() is not None and not self._has_recorded(
                    self._records[number]
                ):
                    self._raise_early_end(number)
            time.sleep(POLL_S)

    def _has_recorded(self, record: Path) -> bool:
        return record.exists() and len(record.read_text().splitlines()) >= self.steps

    def _raise_early_end(self, number: int) -> None:
        path = self.log(number)
        lines = [
            line.strip()
            for line in path.read_text(errors="replace").splitlines()
            if line.strip()
        ]
        last_line = lines[-1] if lines else "it said nothing"
        raise RuntimeError(
            f"a job ended early: see {path} and those beside it: {last_line}"
        )


def take_turns(path: Path) -> Callable[[int], None]:
    """Return a function that waits until ``path``, if it exists, has a step's number; the clock stands still."""
    if not path.exists():
        return lambda step: None
    clock = time.perf_counter
    waited = 0.0
    time.perf_counter = lambda: clock() - waited

    def wait(step: int) -> None:
        nonlocal waited
        begin = clock()
        while int(path.read_text()) < step:
            time.sleep(POLL_S)
        waited += clock() - begin

    return wait


def time_waits_of_host() -> Callable[[], float | None]:
    """Note how long the host waits for rows.

    Returns:
        A function that gives the seconds of the last step that has been logged, None if it was not.
    """
    seconds = list[float]()
    reset = ExchangeClock.reset

    def noted_reset(self: ExchangeClock) -> tuple[float, float]:
        starting, waiting = reset(self)
        seconds[:] = [waiting]
        return starting, waiting

    ExchangeClock.reset = noted_reset  # type: ignore[method-assign]
    return lambda: seconds.pop() if seconds else None


if __name__ == "__main__":
    measured.main(take_turns(Path(sys.argv[1]) / TURN), time_waits_of_host())
