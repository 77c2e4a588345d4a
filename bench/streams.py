# SPDX-License-Identifier: BSD-3-Clause
"""Time of a step with exchanges in compiled graphs, against between them.

    torchtitan-cad prepare --output outputs/assets
    python -m bench.streams --steps 20 --rounds 3 --training.seq_len=8192

trains the same job with ``cad.streams`` "opaque" and "traced", in turns, one rank a core or GPU, and prints the time
of a step: that of the slowest rank, the median of the runs. Needs torch 2.14.1 or newer. Nothing else should run then.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tyro
from tqdm import tqdm

from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu

enable_cpu()

# torchtitan must not be imported before enable_cpu().
from bench.record import save  # noqa: E402
from torchtitan_cad.tools.compare import comparison  # noqa: E402

TWO_HALVES = ("--cad.nano_batches=2", "--compile.enable")
SWITCHES = ("--cad.streams=opaque", "--cad.streams=traced")


@dataclasses.dataclass(frozen=True)
class Options:
    """Arguments that are none of these are the job's."""

    job: Path = Path("train_configs/llama3_debug_cpu.toml")
    ranks: int = 2
    steps: int = 20
    rounds: int = 3
    """Runs of each kind."""
    warmup: int = 3
    """First steps of every run that do not count: they compile."""
    folder: Path = Path("outputs/streams")
    """For records and logs of the runs."""
    output: Path | None = None
    """JSON file for the figures."""


def main(options: Options, overrides: Sequence[str] = ()) -> None:
    """Train, print and write the figures; ``overrides`` are further arguments of the job."""
    with tqdm(
        total=2 * options.rounds * options.steps, unit="step", leave=False, disable=None
    ) as bar:
        result = comparison.run(
            [f"--job.config_file={options.job}", *TWO_HALVES, *overrides],
            options.folder,
            ranks=options.ranks,
            steps=options.steps,
            rounds=options.rounds,
            warmup=options.warmup,
            progress=bar.update,
            switches=SWITCHES,
        )
    opaque, traced = result.off.step_seconds, result.on.step_seconds
    difference = result.report()["largest_relative_loss_difference"]
    print(
        f"{options.ranks} ranks, {len(opaque)} steps, {options.rounds} runs of each, in turns"
    )
    for name, seconds in zip(SWITCHES, (opaque, traced), strict=True):
        print(f"  {name:24} {1e3 * seconds.mean():9.1f} ms a step")
    longer = traced.sum() / opaque.sum()
    low, high = 100 * (np.quantile(traced / opaque, (0.25, 0.75)) - 1)
    print(
        f"  traced over opaque {100 * longer - 100:+15.1f} % (half of the steps: {low:+.1f} to {high:+.1f} %)"
    )
    print(f"  losses differ by at most {difference:9.1e} of the loss")
    if options.output is not None:
        figures = {
            "opaque_seconds": float(opaque.mean()),
            "traced_seconds": float(traced.mean()),
            "traced_over_opaque": float(longer),
            "largest_relative_loss_difference": difference,
        }
        save(options.output, "bench.streams", {"figures": figures})


if __name__ == "__main__":
    main(*tyro.cli(Options, return_unknown_args=True))
