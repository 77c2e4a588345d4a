# SPDX-License-Identifier: BSD-3-Clause
"""``torchtitan-cad simulate``: the predicted time of a training step, with CAD and without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import tyro

from torchtitan_cad.tools.options import (
    CommandOptions,
    Options,
    read_inputs,
)
from torchtitan_cad.tools.shared import (
    Overrides,
    check_output,
    load_planner,
    write_json,
)
from torchtitan_cad.tools.simulation.systems import simulate

DEFAULTS = Options()


def run(
    job: Annotated[Path | None, tyro.conf.Positional] = None,
    overrides: Overrides = (),
    *,
    options: CommandOptions = DEFAULTS,
    output: Path | None = None,
) -> None:
    """Predict the time of a training step under several systems on the same documents.

    packed: equal chunks, no balancing. reorder: whole rows distributed anew over ranks and microbatches. packing_cp:
    variable-length packing with context parallelism per document. dynamic_cp: the same, over as many ranks as a
    microbatch's longest document needs. cad: this package. perfect: balanced, nothing exchanged for attention.
    docs/results.md says what is modelled. Of a job, the last line has the keys by which it takes the settings of cad.

    Args:
        job: torchtitan's TOML file; without one, --ranks and a model are needed.
        overrides: Further arguments of the job, such as --training.seq_len 65536. They come last.
        output: Write everything to this JSON file.
    """
    check_output("--output", output)
    inputs, notes, titan = read_inputs(job, overrides, options)
    if inputs.cluster.is_large:
        notes += _notes_of_large(inputs.cluster.ranks // inputs.cluster.tp)
    load_planner(placement=True)
    print("\n".join(notes), end="\n\n", flush=True)
    from tqdm import tqdm

    with tqdm(bar_format="{desc} [{elapsed}]", leave=False, disable=None) as bar:
        report = simulate(inputs, progress=bar.set_description_str)
    print(report.table())
    best = report.systems["cad"]
    settings = titan.settings(best.configuration) if titan and best.fits else {}
    if settings:
        lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        print(f"cad: the job takes these settings with {', '.join(lines)}")
    if output is not None:
        document = {
            "inputs": inputs.described(),
            "notes": notes,
            "settings": settings,
            **report.to_dict(),
        }
        write_json(output, document)


def _notes_of_large(ranks: int) -> list[str]:
    """Say what the simulation of a large cluster leaves out, and about how long it takes."""
    minutes = max(1.0, ranks / 1400)
    return [
        "cad: in the configuration that is best with the loader's homes, of those with the lowest cp",
        f"configurations: ranked by the first step; all takes about {minutes:.0f} min on an idle core",
    ]
