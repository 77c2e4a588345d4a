# SPDX-License-Identifier: BSD-3-Clause
"""What ranks of small jobs write down, whatever version of torchtitan they train with; harness.py reads it."""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch._dynamo.utils import counters


def record_metrics(
    processor, path: Path, is_metrics_rank: Callable[[Any], bool]
) -> None:
    """Append figures of every logged step and validation to a file.

    Args:
        is_metrics_rank: whether torchtitan reports this rank's loss: other pipeline ranks hold a placeholder.
    """
    log = processor.log
    log_validation = processor.log_validation

    def write(self, **figures):
        graphs = counters["aot_autograd"]
        figures |= {
            "is_metrics_rank": is_metrics_rank(self),
            "graphs": counters["stats"]["unique_graphs"],
            "hit": graphs["autograd_cache_hit"],
            "miss": graphs["autograd_cache_miss"],
            "resident_bytes": resident_bytes(),
            "descriptors": len(os.listdir("/dev/fd")),
        }
        with path.open("a") as file:
            print(json.dumps(figures), file=file)

    @functools.wraps(log)
    def record(self, step, loss, *rest, **others):
        _, norm, *_ = rest
        write(self, kind="train", step=step, loss=float(loss), grad_norm=float(norm))
        log(self, step, loss, *rest, **others)

    @functools.wraps(log_validation)
    def record_validation(self, loss, step, *rest, **others):
        write(self, kind="validation", step=step, loss=float(loss))
        log_validation(self, loss, step, *rest, **others)

    processor.log = record
    processor.log_validation = record_validation


def resident_bytes() -> int:
    """Memory of this process that is in use: its own and what it shares; 0 where the system does not say."""
    memory = Path("/proc/self/statm")
    pages = memory.read_text().split()[1] if memory.exists() else 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def before_clipping(trainer, utils, record: Callable[[Any], None]) -> None:
    """Call ``record`` with every trainer of this class whose gradients are summed, and not yet clipped by ``utils``."""
    train_step = trainer.train_step
    clip = utils.clip_grad_norm_

    @functools.wraps(train_step)
    def recorded_step(self, *args, **kwargs):
        def record_and_clip(*clip_args, **clip_kwargs):
            record(self)
            return clip(*clip_args, **clip_kwargs)

        utils.clip_grad_norm_ = record_and_clip
        train_step(self, *args, **kwargs)

    trainer.train_step = recorded_step
