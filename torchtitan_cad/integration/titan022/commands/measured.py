"""torchtitan's training with a record of every step; what a rank of ``torchtitan-cad compare`` runs.

    torchrun ... -m torchtitan_cad.integration.titan022.commands.measured FOLDER --job.config_file train.toml

trains as ``-m torchtitan_cad.train`` does and appends a line to FOLDER/rank<r>.jsonl for every step: see ``Step``.
Steps begin at a barrier, so that what one rank does between steps (logs, pictures) does not count as another's waiting.
On CPU ranks every rank of the machine gets a core of its own, if there are enough.
"""

import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_cad.integration.titan022.cpu import enable_cpu

PROFILED_STEPS = 3
"""On CUDA, the last steps, whose kernels are recorded."""
_ATTENTION = ("flash", "fmha", "attention", "attn")
_COMMUNICATION = ("nccl", "_wait", "_post", "_put_rows", "_put_messages", "_confirm")


@dataclasses.dataclass(frozen=True)
class Step:
    """Record of one rank in one step; times in seconds.

    Attributes:
        seconds: from the barrier to the end of the optimizer's step and of the loss's reduction.
        busy: of it, how long this rank computed: CPU time of the process, or the device's kernels other than those that
            communicate. None where that was not recorded; ``attention`` likewise.
        attention: of it, in attention kernels.
        tokens: of this step, this rank's share of its data-parallel coordinate's: those of all ranks add up to the
            global batch.
        loss: torchtitan's global average; -1 on pipeline stages that do not know it.
        imbalance_before, imbalance_after: attention work of the busiest rank over the mean; None without cad.
    """

    step: int
    seconds: float
    busy: float | None
    attention: float | None
    tokens: float
    loss: float
    imbalance_before: float | None = None
    imbalance_after: float | None = None


class _HostClock:
    """Times of a CPU rank."""

    def __init__(self) -> None:
        from torchtitan_cad.runtime.kernels.cpu import CpuKernel

        self._attention = 0.0
        for name in ("forward", "backward"):
            setattr(CpuKernel, name, self._timed(getattr(CpuKernel, name)))

    def _timed(self, compute: Any) -> Any:
        @functools.wraps(compute)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return compute(*args, **kwargs)
            finally:
                self._attention += time.thread_time() - begin

        return timed

    def begin(self, step: int) -> None:
        self._attention, self._begin = 0.0, time.process_time()

    def end(self) -> tuple[float | None, float | None]:
        """Return ``busy`` and ``attention`` since ``begin``."""
        return time.process_time() - self._begin, self._attention


class _DeviceClock:
    """Times of a CUDA rank, of the last ``PROFILED_STEPS`` steps."""

    def __init__(self, last_step: int) -> None:
        self._first_profiled = last_step - PROFILED_STEPS + 1
        self._profile: torch.profiler.profile | None = None

    def begin(self, step: int) -> None:
        torch.cuda.synchronize()
        if step >= self._first_profiled:
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profile.start()

    def end(self) -> tuple[float | None, float | None]:
        torch.cuda.synchronize()
        if self._profile is None:
            return None, None
        self._profile.stop()
        kernels = [(event.name, event.device_time_total / 1e6) for event in self._profile.events()]
        self._profile = None
        return kernel_seconds(kernels)


def kernel_seconds(kernels: Iterable[tuple[str, float]]) -> tuple[float, float]:
    """Sum seconds in kernels that compute, and of these in attention, from (name, seconds) of every kernel."""
    busy = attention = 0.0
    for name, seconds in kernels:
        plain = name.lower()
        if any(part in plain for part in _COMMUNICATION):
            continue
        busy += seconds
        if any(part in plain for part in _ATTENTION):
            attention += seconds
    return busy, attention


def main() -> None:
    """Train on the command line's arguments but the first, which names the folder for the records."""
    folder = Path(sys.argv.pop(1))
    on_cpu = enable_cpu()
    if on_cpu:
        torch.set_num_threads(1)
        _take_a_core(int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    from torchtitan_cad import train

    _record_steps(folder / f"rank{os.environ.get('RANK', '0')}.jsonl", on_cpu)
    train.start()


def _take_a_core(rank: int, ranks: int) -> None:
    """Keep this process on one core, if every rank of this machine can have one."""
    if hasattr(os, "sched_setaffinity") and ranks <= len(cores := sorted(os.sched_getaffinity(0))):
        os.sched_setaffinity(0, {cores[rank]})


def _record_steps(path: Path, on_cpu: bool) -> None:
    # torchtitan must not be imported before enable_cpu().
    from torchtitan.train import Trainer

    from torchtitan_cad.integration.report.statistics import StepStatistics

    seen: dict[str, Any] = {}
    clock: _HostClock | _DeviceClock | None = None
    train_step, drain = Trainer.train_step, StepStatistics.drain

    @functools.wraps(train_step)
    def measured_step(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal clock
        if clock is None:
            clock = _HostClock() if on_cpu else _DeviceClock(self.job_config.training.steps)
        dist.barrier()
        seen.clear()
        tokens, begin = self.ntokens_seen, time.perf_counter()
        clock.begin(self.step)
        # The processor is the job's, and what it does is the end of the step.
        processor_log = self.metrics_processor.log

        def end_and_log(step: int, loss: float, *rest: Any, **more: Any) -> None:
            seen["busy"], seen["attention"] = clock.end()
            seen.update(seconds=time.perf_counter() - begin, loss=float(loss))
            processor_log(step, loss, *rest, **more)

        self.metrics_processor.log = end_and_log
        try:
            train_step(self, *args, **kwargs)
        finally:
            self.metrics_processor.log = processor_log
        names = [field.name for field in dataclasses.fields(Step)]
        # torchtitan counts labels before context parallelism cuts them, so all these ranks count the same.
        share = (self.ntokens_seen - tokens) / self.parallel_dims.non_data_parallel_size
        record = Step(step=self.step, tokens=share, **{k: seen[k] for k in names if k in seen})
        with path.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(record)) + "\n")

    @functools.wraps(drain)
    def noted_drain(self: StepStatistics) -> dict[str, Any]:
        figures = drain(self)
        seen.update(figures)
        return figures

    Trainer.train_step, StepStatistics.drain = measured_step, noted_drain  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
