# SPDX-License-Identifier: BSD-3-Clause
"""One rank of a job whose ranks share a device: torchtitan's training over gloo, with a record of every step.

    RANK=0 WORLD_SIZE=2 ... python -m bench.gpu.shared_rank FOLDER --job.config_file train.toml

NCCL refuses ranks that share a device, so gloo carries what FSDP2 and DDP send, through the host. Exchanges of core
attention use symmetric memory as they do on devices of their own. A rank takes its share of the device when the file
FOLDER/start appears, and writes the number of multiprocessors that it then occupies to FOLDER/share<rank>.json.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.turns import POLL_S, TURN, take_turns, time_waits_of_host
from torchtitan_cad.integration.cpu import force_sum_reduction_in_fsdp
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu
from torchtitan_cad.runtime.exchange import ExchangeClock
from torchtitan_cad.tools.compare import measured

START = "start"
START_S = 600.0
"""seconds to wait for the turn to start"""
FLAVOR = "bench_attention"
"""A llama3 of 35 million parameters with heads of 128: most of its work on long rows is attention."""


def main() -> None:
    """Train on the command line's arguments but the first, which names the job's folder."""
    folder = Path(sys.argv[1])
    if not enable_cpu():
        share_one_device()
    _register_flavor()
    _wait_for(folder / START)
    if torch.cuda.is_available():
        from bench.gpu.multiprocessors import occupied

        (folder / f"share{os.environ['RANK']}.json").write_text(json.dumps(occupied()))
    time_waits = (
        time_waits_of_streams if torch.cuda.is_available() else time_waits_of_host
    )
    measured.main(take_turns(folder / TURN), time_waits())


def share_one_device() -> None:
    """Let ranks of one device form groups: gloo in place of NCCL, which has no other reduction than a sum."""
    dist.Backend.default_device_backend_map["cuda"] = "gloo"
    force_sum_reduction_in_fsdp()


def time_waits_of_streams() -> Callable[[], float | None]:
    """Make the stream that computes time its waits for rows.

    Returns:
        A function that gives the seconds of all waits since its last call, None if there were none. The device must
        have done its work.
    """
    measure = ExchangeClock.measure
    waits = list[tuple[torch.cuda.Event, torch.cuda.Event]]()

    @contextmanager
    def measure_on_stream(self: ExchangeClock, what: Any) -> Iterator[None]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        with measure(self, what):
            yield
        end.record()
        if what == "waiting":
            waits.append((begin, end))

    def drain() -> float | None:
        milliseconds = [begin.elapsed_time(end) for begin, end in waits]
        waits.clear()
        return 1e-3 * sum(milliseconds) if milliseconds else None

    ExchangeClock.measure = measure_on_stream  # type: ignore[method-assign]
    return drain


def _register_flavor() -> None:
    from torchtitan.models.llama3 import TransformerModelArgs, llama3_args

    llama3_args[FLAVOR] = TransformerModelArgs(
        dim=1024,
        n_layers=6,
        n_heads=8,
        n_kv_heads=2,
        vocab_size=2048,
        multiple_of=256,
        ffn_dim_multiplier=0.375,  # feed-forward layers as wide as the model
        rope_theta=500000,
        attn_type="varlen",
        attn_mask_type="block_causal",
    )


def _wait_for(path: Path) -> None:
    """Wait for a file; raise TimeoutError after ``START_S``, as whoever makes it may have been killed."""
    deadline = time.monotonic() + START_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"nobody has made {path} within {START_S:.0f} s: the job's starter is gone"
            )
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
