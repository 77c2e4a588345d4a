# SPDX-License-Identifier: BSD-3-Clause
"""``torchtitan-cad simulate``: the predicted time of a training step, with CAD and without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import tyro

from torchtitan_cad.tools.options import Options, documents_file, read_inputs
from torchtitan_cad.tools.shared import (
    check_outputs,
    check_picture,
    load_planner,
    say_written,
)
from torchtitan_cad.tools.simulation import simulate
from torchtitan_cad.tools.simulation.memory import COMPARED
from torchtitan_cad.tools.simulation.systems import PARTS

DEFAULTS = Options()


def run(
    job: Annotated[Path | None, tyro.conf.Positional] = None,
    overrides: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    *,
    options: Options = DEFAULTS,
    output: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Predict the time of a training step under several systems on the same documents.

    packed: equal chunks, no balancing. reorder: whole rows distributed anew over ranks and microbatches. packing_cp:
    variable-length packing with context parallelism per document. greedy: CAD with the paper's planner. cad: this
    package's. perfect: balanced, nothing exchanged for attention. docs/tools.md says what is modelled.

    Args:
        job: torchtitan's TOML file; without one, --ranks and a model are needed.
        overrides: Further arguments of the job, such as --training.seq_len 65536. They come last.
        output: Write everything to this JSON file.
        plot: Draw the parts of a step to this file (png, pdf or svg; needs matplotlib).
    """
    if plot is not None:
        check_picture("--plot", plot)
    check_outputs(
        {"--output": output, "--plot": plot},
        job,
        options.profile,
        documents_file(options.documents),
    )
    inputs, notes, _ = read_inputs(job, overrides, options)
    if inputs.cluster.is_large:
        notes += _notes_of_large(inputs.cluster.ranks // inputs.cluster.tp)
    load_planner(placement=True)
    print("\n".join(notes), end="\n\n", flush=True)
    from tqdm import tqdm

    with tqdm(bar_format="{desc} [{elapsed}]", leave=False, disable=None) as bar:
        report = simulate(
            *inputs[:5], open=inputs.open, progress=bar.set_description_str
        )
    print(report.table())
    if output is not None:
        document = {"inputs": inputs.described(), "notes": notes, **report.to_dict()}
        output.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
        say_written(output)
    if plot is not None:
        from torchtitan_cad.tools.plots import draw_parts

        systems = {
            name: system for name, system in report.systems.items() if system.fits
        }
        labels = [
            f"{name}, {report.share_of_perfect(name):.0%} of perfect"
            for name in systems
        ]
        parts = {
            part: [system.part(part) for system in systems.values()] for part in PARTS
        }
        draw_parts(
            plot,
            f"{report.cluster.ranks} GPUs, {report.step_tokens:,} tokens per step",
            labels,
            parts,
        )
        say_written(plot)


def _notes_of_large(ranks: int) -> list[str]:
    """Say what the simulation of a large cluster leaves out, and how long it takes."""
    return [
        "greedy, cad: in the configuration that is best with the loader's homes, of those with the lowest cp",
        f"memory: of attention, that of the {COMPARED} GPUs that serve the most rows",
        f"configurations: ranked by the first step; all takes about {_minutes(ranks):.0f} min on an idle core",
    ]


def _minutes(ranks: int) -> float:
    """Return about how long the simulation takes."""
    return max(1.0, ranks / 1400)
