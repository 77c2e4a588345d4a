# SPDX-License-Identifier: BSD-3-Clause
"""``torchtitan-cad compare``: how much faster is this job with CAD, on this machine?"""

import os
from pathlib import Path
from typing import Any

from torchtitan_cad.tools.shared import (
    JobFile,
    Overrides,
    check_folder,
    check_job,
    check_output,
    load_planner,
    write_json,
)

MOST_RANKS = 16
"""ranks: most of a core. Each is a process that takes 0.5 GB and more."""


def run(
    job: JobFile,
    overrides: Overrides = (),
    steps: int = 20,
    rounds: int = 2,
    warmup: int = 3,
    nproc: int | None = None,
    output: Path = Path("outputs/compare"),
) -> None:
    """Train a job with and without CAD, in turns, and say how much faster it is.

    Runs on the GPUs of this machine, or on its CPU cores, one rank a core. Prints tokens per second of both, the
    speed-up, what `simulate` predicts for the same documents, and the largest difference between the losses; writes
    compare.json.

    Args:
        job: torchtitan's TOML file.
        overrides: Further arguments of the job, such as --training.seq_len 8192. They come last.
        steps: Steps of every run.
        rounds: Runs of each kind; times of a step are the median over them.
        warmup: First steps of every run that do not count.
        nproc: Ranks; by default as many as there are GPUs, or cores.
        output: Folder for results, and for records and logs of the runs.
    """
    _require("--steps", steps, warmup + 1)
    _require("--rounds", rounds, 1)
    _require("--warmup", warmup, 0)
    check_job(job)
    check_folder("--output", output)
    check_output("--output", output / "compare.json")
    from tqdm import tqdm

    from torchtitan_cad.tools.compare import comparison
    from torchtitan_cad.tools.simulated_job import read_simulated_job

    ranks, places = _places(nproc)
    args = [f"--job.config_file={job}", "--cad.no-shadow", *overrides]
    own = [f"--training.steps={steps}", *comparison.FORCED, "--parallelism.cad"]
    simulated = read_simulated_job([*args, *own], ranks)
    with tqdm(
        total=2 * rounds * steps,
        desc=f"on {ranks} ranks",
        unit="step",
        leave=False,
        disable=None,
    ) as bar:
        result = comparison.run(
            args,
            output,
            ranks=ranks,
            steps=steps,
            rounds=rounds,
            warmup=warmup,
            progress=bar.update,
            switches=comparison.switches_of(simulated.config),
        )
    figures = {
        "job": str(job),
        "overrides": list(overrides),
        "places": places,
        "predicted_speedup": None,
        "model_flops_per_second_and_rank": None,
        "peak_flops": _peak_flops(),
        **result.report(),
    }
    load_planner(placement=True)
    try:
        figures["predicted_speedup"] = result.predicted(simulated)
        model_flops = result.rank_flops(simulated.inputs)
        figures["model_flops_per_second_and_rank"] = model_flops
    except ValueError as error:  # rows that differ in length
        print(f"no prediction: {error}")
    print(text(figures))
    write_json(output / "compare.json", figures)


def _require(option: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{option} {value}: set {least} or more")


def _peak_flops() -> float | None:
    """Return torchtitan's figure for this GPU; None on CPU ranks."""
    import torch

    if not torch.cuda.is_available():
        return None
    from torchtitan.tools.utils import get_peak_flops

    return get_peak_flops(torch.cuda.get_device_name(0))


def _places(nproc: int | None) -> tuple[int, str]:
    """Tell the number of ranks, and where they run."""
    import torch

    if torch.cuda.is_available():
        places = torch.cuda.get_device_name(0)
        available = torch.cuda.device_count()
        most = available
    else:
        places = "CPU cores"
        available = _num_cores()
        most = available * MOST_RANKS
    ranks = max(2, available) if nproc is None else nproc
    if not 2 <= ranks <= most:
        raise ValueError(
            f"--nproc {ranks}: core attention moves between ranks; set 2 or more, at most {most} on {available} "
            f"{places}, or CUDA_VISIBLE_DEVICES to nothing to compare on CPU cores"
        )
    if ranks > available:
        places = f"{available} {places} for {ranks} ranks, which wait for each other: no gain can show"
    return ranks, places


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def text(figures: dict[str, Any]) -> str:
    """Return the text that `compare` prints."""
    ranks = figures["ranks"]
    speeds = {
        mode: f"{speed:12,.0f} tokens/s ({speed / ranks:,.0f} a rank)"
        for mode, speed in figures["tokens_per_second"].items()
    }
    gain = figures["speedup"]
    half = f"half of the steps between {gain['quarter']:.2f} and {gain['three_quarters']:.2f}"
    lines = [
        f"{ranks} ranks ({figures['places']}), {figures['steps']} steps, {figures['rounds']} runs of each",
        f"  without CAD        {speeds['off']}",
        f"  with CAD           {speeds['on']}",
        f"  speed-up           {gain['overall']:12.2f} x ({half})",
    ]
    model_flops = figures["model_flops_per_second_and_rank"]
    if model_flops is not None:
        work = [f"{flops / 1e9:,.1f}" for flops in model_flops.values()]
        lines.append(f"  model FLOP/s       {' -> '.join(work)} GFLOP/s a rank")
        if figures["peak_flops"] is not None:
            mfu = [
                f"{flops / figures['peak_flops']:.3f}" for flops in model_flops.values()
            ]
            lines.append(f"  mfu                {' -> '.join(mfu)}")
    predicted = figures["predicted_speedup"]
    if predicted is not None:
        spread = f"steps from {predicted['least']:.2f} to {predicted['most']:.2f}"
        alone = predicted["reordering_alone"]
        lines += [
            f"  predicted          {predicted['overall']:12.2f} x ({spread})",
            f"  reordering alone   {alone:12.2f} x (predicted, whole rows, no exchange)",
        ]
    share = figures["attention_share"]
    if share == share:  # known
        imbalance = figures["imbalance"]
        change = f"{imbalance['before']:.2f} -> {imbalance['after']:.2f}"
        lines.append(
            f"  attention          {share:12.0%} of the work, imbalance (max/mean) {change}"
        )
    if not figures["same_documents"]:
        lines.append(
            "  without CAD attention ends at other places: that is other work, and other losses"
        )
    difference = figures["largest_loss_difference"]
    relative = figures["largest_relative_loss_difference"]
    lines.append(
        f"  losses differ by at most {difference:.1e} ({relative:.1e} of the loss)"
    )
    return "\n".join(lines)
