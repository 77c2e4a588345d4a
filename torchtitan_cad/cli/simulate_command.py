"""``torchtitan-cad simulate``: the predicted time of a training step, with CAD and without."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import tyro

from torchtitan_cad.cli.files import check_output, check_picture
from torchtitan_cad.cli.loading import load_planner
from torchtitan_cad.cli.simulation_inputs import Inputs, Options, described, read_inputs
from torchtitan_cad.simulation import SOURCES, Report, losses, simulate, speedups, table
from torchtitan_cad.simulation.inputs import with_tolerance

DEFAULTS = Options()


def run(
    job: Annotated[Path | None, tyro.conf.Positional] = None,
    overrides: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    *,
    options: Options = DEFAULTS,
    vary: tuple[str, ...] = (),
    output: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Predict the time of a training step under several systems on the same documents.

    packed: equal chunks, no balancing. packing_cp: variable-length packing with context parallelism per document.
    greedy: CAD with the paper's planner. cad: this package's, cad_placed: with placement, where the job leaves it out.
    perfect: balanced, nothing exchanged for attention. What cad loses to it is named if it is more than 2 %.
    docs/simulation.md says what is modelled.

    Args:
        job: torchtitan's TOML file; without one, --ranks and a model are needed.
        overrides: Further arguments of the job, such as --training.seq_len 65536. They come last.
        vary: Simulate again with other numbers, such as net=25e9,50e9 tolerance=0.02,0.1.
        output: Write everything to this JSON file.
        plot: Draw the parts of a step to this file (png, pdf or svg; needs matplotlib).
    """
    if output is not None:
        check_output("--output", output)
    if plot is not None:
        check_picture("--plot", plot)
    inputs, notes, _ = read_inputs(job, overrides, options)
    variations = [variation for item in vary for variation in _variations(inputs, item)]
    load_planner(placement=True)
    for note in notes:
        print(note)
    print(flush=True)
    report = _simulate(inputs)
    _show(report)
    others = []
    for key, value, varied in variations:
        other = _simulate(varied)
        print(f"\n{key} = {value:g}")
        _show(other)
        others.append((key, value, other))
    if output is not None:
        output.write_text(json.dumps(_document(inputs, notes, report, others), indent=1, allow_nan=False) + "\n")
        print(f"wrote {output}")
    if plot is not None:
        from torchtitan_cad.cli.simulate_plot import draw

        draw(report, others, plot)
        print(f"wrote {plot}")


def _show(report: Report) -> None:
    print("\n".join(filter(None, (table(report), speedups(report), losses(report)))), flush=True)


def _simulate(inputs: Inputs) -> Report:
    from tqdm import tqdm

    with tqdm(bar_format="{desc} [{elapsed}]", leave=False, disable=None) as bar:
        return simulate(*inputs, progress=bar.set_description_str)


def _document(
    inputs: Inputs, notes: list[str], report: Report, others: list[tuple[str, float, Report]]
) -> dict[str, Any]:
    return {
        "inputs": described(inputs),
        "notes": notes,
        **report.to_dict(),
        "vary": [{"key": key, "value": value, **other.to_dict()} for key, value, other in others],
    }


def _variations(inputs: Inputs, item: str) -> Iterator[tuple[str, float, Inputs]]:
    """Yield key, value and the inputs with it, for every value of a text such as ``net=25e9,50e9``."""
    model, cluster, documents, settings, rates = inputs
    key, _, values = item.partition("=")
    varied = (*SOURCES, "seconds_per_step", "tolerance")
    if key not in varied:
        raise ValueError(f"--vary {key}: choose one of {', '.join(varied)}")
    for text in values.split(","):
        try:
            value = float(text)
        except ValueError:
            message = f"--vary {item}: {text!r} is no number; write key=value,value, such as net=25e9,50e9"
            raise ValueError(message) from None
        number: dict[str, Any] = {key: value}
        if key == "tolerance":
            yield key, value, (model, cluster, documents, with_tolerance(settings, value), rates)
        elif hasattr(cluster, key):
            yield key, value, (model, dataclasses.replace(cluster, **number), documents, settings, rates)
        else:
            yield key, value, (model, cluster, documents, settings, dataclasses.replace(rates, **number))
