# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan's training with a record of every step; what a rank of ``torchtitan-cad compare`` runs.

    torchrun ... -m torchtitan_cad.tools.compare.measured FOLDER --job.config_file train.toml

trains as ``-m torchtitan_cad.train`` does and appends a line to FOLDER/rank<r>.jsonl for every step: see ``FIGURES``.
Steps begin at a barrier, so that what one rank does between steps (logs, checkpoints) does not count as another's
waiting. On CPU ranks every rank of the machine gets a core of its own, if there are enough.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchtitan_cad.integration.loading.documents import DocumentRule
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu

FIGURES = (
    *("seconds", "busy", "attention", "waiting", "tokens", "loss", "gradient_norm"),
    *("imbalance_before", "imbalance_after", "bytes_per_rank_mean"),
)
"""Figures of one rank in one step. Beside them its record has ``step``, ``rows``, the tokens of the documents of every
row that it has loaded, and ``same_documents``: attention stays inside these, also without cad. Seconds from the
barrier to the end of the optimizer's step and of the loss's reduction; CPU seconds of the process in it, and of
attention kernels (null on CUDA); seconds of waits for rows, if they are timed; this rank's share of its
data-parallel coordinate's tokens, which add up to the global batch; torchtitan's global average, -1 on pipeline stages
that do not know it; the norm of all gradients before they are clipped; attention work of the busiest rank over the
mean, at the homes of tokens and as planned, and the bytes that the mean rank receives for a layer's forward (null
without cad)."""


def main(
    before_step: Callable[[int], None] = lambda step: None,
    seconds_of_waits: Callable[[], float | None] = lambda: None,
) -> None:
    """Train on the command line's arguments but the first, which names the folder for the records.

    Args:
        before_step: is called with the number of every step before it begins.
        seconds_of_waits: gives the ``waiting`` of a step that has been logged.
    """
    folder = Path(sys.argv.pop(1))
    on_cpu = enable_cpu()
    if on_cpu:
        torch.set_num_threads(1)
        _take_a_core(
            int(os.environ.get("LOCAL_RANK", 0)),
            int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        )
    from torchtitan_cad import train

    records = folder / f"rank{os.environ.get('RANK', '0')}.jsonl"
    _record_steps(records, on_cpu, before_step, seconds_of_waits)
    train.start()


def _take_a_core(rank: int, ranks: int) -> None:
    """Keep this process on one core, if every rank of this machine can have one."""
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if ranks <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})


def _time_attention(seen: dict[str, Any]) -> None:
    """Make the kernel of CPU ranks add its CPU time to ``seen["attention"]``."""
    from torchtitan_cad.runtime.kernels.cpu import CpuKernel

    def timed(compute: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return compute(*args, **kwargs)
            finally:
                seen["attention"] = (
                    seen.get("attention", 0.0) + time.thread_time() - begin
                )

        return call

    for name in ("forward", "backward"):
        setattr(CpuKernel, name, timed(getattr(CpuKernel, name)))


def _note_figures(seen: dict[str, Any]) -> None:
    """Make every step note in ``seen`` what it loads, and what CAD says of it."""
    from torchtitan.train import Trainer

    from torchtitan_cad.integration.report.statistics import StepStatistics

    forward_backward = Trainer.forward_backward_step
    drain = StepStatistics.drain

    def noted_pass(self: Any, *, input_dict: dict[str, Any], **rest: Any) -> Any:
        if not self.job_config.parallelism.cad:  # with it, tokens may be redistributed
            seen.setdefault("inputs", []).append({**input_dict})
        return forward_backward(self, input_dict=input_dict, **rest)

    def noted_drain(self: StepStatistics) -> dict[str, Any]:
        seen.update(figures := drain(self))
        return figures

    Trainer.forward_backward_step = noted_pass
    StepStatistics.drain = noted_drain  # type: ignore[method-assign]


def _documents(trainer: Any, batches: list[dict[str, Any]]) -> dict[str, Any]:
    """Return ``rows`` and ``same_documents`` of a step's batches; on devices this waits for them."""
    from torchtitan_cad.integration.torchtitan_v0_2.job import document_rule

    vocabulary = trainer.model_args.vocab_size
    eos_id = trainer.tokenizer.eos_id
    rule = document_rule(trainer.job_config.cad, eos_id, vocabulary)
    is_cut = trainer.model_args.attn_mask_type != "causal"
    stock = DocumentRule(eos_id if is_cut else None)
    rows = []
    same = True
    for batch in batches:
        rows += rule.lengths(batch)
        starts = stock.starts({"input": batch["input"]})
        same = same and np.array_equal(starts, rule.starts(batch))
    return {"rows": rows, "same_documents": same}


def _record_steps(
    path: Path,
    on_cpu: bool,
    before_step: Callable[[int], None],
    seconds_of_waits: Callable[[], float | None],
) -> None:
    # torchtitan must not be imported before enable_cpu().
    from torchtitan.train import Trainer

    seen: dict[str, Any] = {}
    train_step = Trainer.train_step

    def measured_step(self: Any, *args: Any, **kwargs: Any) -> None:
        before_step(self.step)
        dist.barrier()
        _synchronize(on_cpu)
        seen.clear()
        tokens = self.ntokens_seen
        # The processor is the job's, and what it does is the end of the step.
        processor_log = self.metrics_processor.log
        note_end = _clock(seen, on_cpu)

        def end_and_log(
            step: int, loss: float, most_loss: float, gradient_norm: float, **more: Any
        ) -> None:
            note_end()
            if (batches := seen.pop("inputs", None)) is not None:
                seen.update(_documents(self, batches))
            seen.update(loss=float(loss), gradient_norm=float(gradient_norm))
            processor_log(step, loss, most_loss, gradient_norm, **more)
            seen["waiting"] = seconds_of_waits()

        self.metrics_processor.log = end_and_log
        try:
            train_step(self, *args, **kwargs)
        finally:
            self.metrics_processor.log = processor_log
        # torchtitan counts labels before context parallelism cuts them, so all these ranks count the same.
        sharing = self.parallel_dims.non_data_parallel_size
        seen["tokens"] = (self.ntokens_seen - tokens) / sharing
        _write_record(path, self.step, seen)

    if on_cpu:
        _time_attention(seen)
    _note_figures(seen)
    Trainer.train_step = measured_step


def _clock(seen: dict[str, Any], on_cpu: bool) -> Callable[[], None]:
    """Begin to measure; return a function that notes the seconds, and on CPU ranks the busy ones, in ``seen``."""
    begin = time.perf_counter()
    busy = time.process_time()

    def note_end() -> None:
        if on_cpu:
            seen["busy"] = time.process_time() - busy
        _synchronize(on_cpu)
        seen["seconds"] = time.perf_counter() - begin

    return note_end


def _synchronize(on_cpu: bool) -> None:
    if not on_cpu:
        torch.cuda.synchronize()


def _write_record(path: Path, step: int, seen: dict[str, Any]) -> None:
    record = {
        "step": step,
        "rows": seen.get("rows", []),
        **{name: seen.get(name) for name in FIGURES},
        "same_documents": seen.get("same_documents", True),
    }
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
