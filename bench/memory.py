# SPDX-License-Identifier: BSD-3-Clause
"""Device memory of core attention of Llama 3 8B, by layout and number of ranks, beside stock varlen attention.

    python -m bench.memory

32,768 tokens a rank at the homes that ``place`` chooses, tolerance 0.02; the formula is in
``torchtitan_cad/planning/memory.py``. Each figure is the largest of several seeds, on the busiest rank. Nano-batches
have half of the tokens each, of documents as long; stock attention has no nano-batches and takes all tokens at once.
While one nano-batch computes, what the other has computed travels, and counts. Receive buffers have the default size
of ``cad.receive_buffer_gb``. Nothing runs on a device.
"""

import dataclasses
from itertools import product
from pathlib import Path

import tyro

from bench.record import Record, conclude
from tests.lib.attention_memory import LAYOUTS, measure


@dataclasses.dataclass(frozen=True)
class Options:
    ranks: tuple[int, ...] = (8, 64)
    seeds: tuple[int, ...] = tuple(range(11, 21))
    output: Path | None = None
    """JSON file for the figures."""


def main(options: Options) -> None:
    """Stock is varlen attention over the same tokens without CAD."""
    records, rows = [], []
    for name, num_ranks, nano_batches in product(LAYOUTS, options.ranks, (1, 2)):
        memory = measure(name, num_ranks, options.seeds, nano_batches)
        case = {"layout": name, "ranks": num_ranks, "nano_batches": nano_batches}
        records.append(case | dataclasses.asdict(memory))
        row: Record = case | {"buffers, GB": f"{memory.buffers / 1e9:.2f}"}
        row["forward (stock), GB"] = (
            f"{memory.forward / 1e9:.2f} ({memory.stock_forward / 1e9:.2f})"
        )
        row["backward (stock), GB"] = (
            f"{memory.backward / 1e9:.2f} ({memory.stock_backward / 1e9:.2f})"
        )
        row["backward / stock"] = f"{memory.backward / memory.stock_backward:.1f}"
        rows.append(row | {"kept, GB": f"{memory.kept / 1e9:.2f}"})
    conclude(options.output, "bench.memory", records, rows)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
