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

import numpy as np
import tyro

from bench.record import Record, conclude
from bench.workloads import GRID, SHAPE, TOKENS_PER_RANK, document_lengths, spanning_layout
from torchtitan_cad.planning import Plan, PlannerConfig, TokenLayout
from torchtitan_cad.planning.memory import AttentionMemory, attention_memory
from torchtitan_cad.planning.placement.place import place_and_plan

LAYOUTS = ("whole documents", "lognormal", "one big", "uniform")
"""Documents of at most a rank's tokens; and those of ``bench/workloads.py``, laid end to end over the ranks."""


@dataclasses.dataclass(frozen=True)
class Options:
    ranks: tuple[int, ...] = (8, 64)
    seeds: tuple[int, ...] = tuple(range(11, 21))
    output: Path | None = None
    """JSON file for the figures."""


def make_layout(name: str, num_ranks: int, seed: int, share: int = 1) -> TokenLayout:
    """A layout of a ``share``-th of the tokens of every rank."""
    if name != "whole documents":
        return spanning_layout(document_lengths(name, num_ranks // share, seed), num_ranks)
    rng, segments, doc = np.random.default_rng(seed), [], 0
    for _ in range(num_ranks):
        left, mine = TOKENS_PER_RANK // share, []
        while left:
            length = min(left, -(-max(1, int(rng.lognormal(np.log(4096), 1.5))) // GRID) * GRID)
            mine.append((doc, 0, length))
            doc, left = doc + 1, left - length
        segments.append(mine)
    return TokenLayout.from_segments(segments)


def plans_of(name: str, num_ranks: int, seed: int, nano_batches: int) -> list[Plan]:
    """A plan of every nano-batch, for homes as training chooses them."""
    layouts = [make_layout(name, num_ranks, seed + 100 * nano, nano_batches) for nano in range(nano_batches)]
    config = PlannerConfig(tolerance=0.02)
    return [place_and_plan(layout, SHAPE, config)[0] for layout in layouts]


def measure(name: str, num_ranks: int, seeds: tuple[int, ...], nano_batches: int) -> AttentionMemory:
    """The largest figures of all seeds."""
    each = [attention_memory(plans_of(name, num_ranks, seed, nano_batches)) for seed in seeds]
    return AttentionMemory(*(max(sizes) for sizes in zip(*map(dataclasses.astuple, each), strict=True)))


def main(options: Options) -> None:
    """Stock is varlen attention over the same tokens without CAD."""
    records, rows = [], []
    for name, num_ranks, nano_batches in product(LAYOUTS, options.ranks, (1, 2)):
        memory = measure(name, num_ranks, options.seeds, nano_batches)
        case = {"layout": name, "ranks": num_ranks, "nano_batches": nano_batches}
        records.append(case | dataclasses.asdict(memory))
        row: Record = case | {"buffers, GB": f"{memory.buffers / 1e9:.2f}"}
        row["forward (stock), GB"] = f"{memory.forward / 1e9:.2f} ({memory.stock_forward / 1e9:.2f})"
        row["backward (stock), GB"] = f"{memory.backward / 1e9:.2f} ({memory.stock_backward / 1e9:.2f})"
        row["backward / stock"] = f"{memory.backward / memory.stock_backward:.1f}"
        rows.append(row | {"kept, GB": f"{memory.kept / 1e9:.2f}"})
    conclude(options.output, "bench.memory", records, rows)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
