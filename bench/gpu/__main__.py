# SPDX-License-Identifier: BSD-3-Clause
"""Run: python -m bench.gpu [--run 1|2] [--output FOLDER] [--only PART ...] [--resume] [--minutes 8] [--dry-run]."""

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.gpu import results
from bench.gpu.parts import PARTS, RUN_S, RUNS, expected_seconds
from bench.gpu.process import ROOT
from bench.gpu.report import summary
from bench.gpu.session import Session


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 0 if nothing failed or timed out, 1 otherwise, 2 for arguments that cannot be."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description="Tests, speeds and goals on a machine with one GPU (CONTRIBUTING.md).",
        epilog=f"parts: {', '.join(part.name for part in PARTS)}",
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="folder for a file of each part and their page (default: bench/results/gpu; of a dry run a temporary one)",
    )
    parser.add_argument(
        "--run",
        type=int,
        choices=RUNS,
        help="the parts of one of the two runs (default: of both)",
    )
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts alone")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="leave out what is done for this GPU, torch and sources",
    )
    parser.add_argument(
        "--minutes", type=float, help="for everything (default: 8 a run)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="CPU stand-ins at toy sizes"
    )
    parser.add_argument(
        "--packages",
        type=Path,
        help="folder with what is not installed (default: gpu_packages, if it is there)",
    )
    options = parser.parse_args(arguments)
    names = [part.name for part in PARTS]
    if unknown := set(options.only or ()) - set(names):
        parser.error(
            f"--only {unknown.pop()}: there is no such part, choose among {', '.join(names)}"
        )
    runs = RUNS if options.run is None else (options.run,)
    chosen = [
        part
        for part in PARTS
        if part.run in runs and (options.only is None or part.name in options.only)
    ]
    if not chosen:
        parser.error(
            f"--run {options.run} has none of --only {' '.join(options.only)}: leave out one of them"
        )
    if options.minutes is not None and not options.minutes > 0:
        parser.error(f"--minutes {options.minutes}: set a number greater than 0")
    packages = options.packages or ROOT / "gpu_packages"
    if options.packages and not packages.is_dir():
        parser.error(
            f"--packages {packages}: there is no such folder; CONTRIBUTING.md says how to make it"
        )
    output = options.output or (
        Path(tempfile.mkdtemp(prefix="bench_gpu_"))
        if options.dry_run
        else results.RESULTS
    )
    budget_s = 60 * options.minutes if options.minutes else len(runs) * RUN_S
    session = Session(
        output,
        "cpu" if options.dry_run else "cuda",
        packages.resolve() if packages.is_dir() else None,
        budget_s,
        lambda line: print(line, flush=True),
    )
    print(f"{expected_seconds(chosen):.0f} s expected of {budget_s:.0f}", flush=True)
    good = session.run(chosen, options.resume)
    found = [
        result
        for result in results.read(session.folder)
        if results.same_code(result, session.identity)
    ]
    if found:
        print(f"\n{summary(found)}\n{session.folder / results.PAGE}")
    return 0 if good else 1


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit("bench.gpu: stopped"))
    sys.exit(main(sys.argv[1:]))
