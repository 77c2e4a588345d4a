# SPDX-License-Identifier: BSD-3-Clause
"""``torchtitan-cad advise``: is CAD worth it for this job on this cluster, and with which settings?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from torchtitan_cad.planning.text import aligned
from torchtitan_cad.tools.options import (
    CommandOptions,
    Options,
    documents_file,
    read_inputs,
)
from torchtitan_cad.tools.shared import (
    JobFile,
    Overrides,
    check_outputs,
    load_planner,
    write_json,
)
from torchtitan_cad.tools.simulation.advice import Advice, advise
from torchtitan_cad.tools.simulation.inputs import Configuration, Model
from torchtitan_cad.tools.simulation.search import Trial
from torchtitan_cad.tools.simulation.systems import servers_line

KEYS = {
    "nano_batches": "cad.nano_batches",
    "tolerance": "cad.tolerance",
    "backward": "cad.backward",
    "placement": "cad.placement",
    "checkpointing": "activation_checkpoint.mode",
    "cp": "parallelism.context_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
    "schedule": "parallelism.pipeline_parallel_schedule",
}
"""Field of a configuration: the key that sets it, or the first of several."""
OF_THE_JOB = {
    **dict.fromkeys(
        ("model", *(field.name for field in dataclasses.fields(Model))), "model.flavor"
    ),
    **KEYS,
    "dtype_bytes": "training.mixed_precision_param",
    "tp": "parallelism.tensor_parallel_degree",
    "fsdp": "parallelism.data_parallel_shard_degree",
    "row_tokens": "training.seq_len",
    "tokens_per_rank": "training.local_batch_size",
    "microbatches": "training.global_batch_size",
}
"""Options of `simulate` that would make another job of this one, and the keys that do so here."""

DEFAULTS = Options()
MOST_BATCHES = 3
"""Most steps that are simulated unless more are asked for, as every setting is tried by all of them."""


def run(
    job: JobFile,
    overrides: Overrides = (),
    *,
    options: CommandOptions = DEFAULTS,
    output: Path | None = None,
) -> None:
    """Predict whether CAD is worth it for a job on a cluster, and which settings it should take.

    Changes one setting at a time, and takes what gains 1 % and more until nothing does. Prints a verdict, what every
    setting gains and the memory it needs, keys to set in the job's tables, and what was assumed. docs/results.md
    says what is modelled.

    Args:
        job: torchtitan's TOML file.
        overrides: Further arguments of the job, such as --training.seq_len 65536. They come last.
        output: Write everything to this JSON file.
    """
    check_outputs(
        {"--output": output}, job, options.profile, documents_file(options.documents)
    )
    for name, key in OF_THE_JOB.items():
        if getattr(options, name, None) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')}: advice is for the job itself; set --{key} instead"
            )
    inputs, notes, titan = read_inputs(job, overrides, options)
    assert titan is not None
    if (
        options.batches is None
        and not inputs.documents.given_batches
        and inputs.documents.batches > MOST_BATCHES
    ):
        documents = dataclasses.replace(inputs.documents, batches=MOST_BATCHES)
        inputs = dataclasses.replace(inputs, documents=documents)
    from tqdm import tqdm

    load_planner(placement=True)
    with tqdm(bar_format="{desc} [{elapsed}]", leave=False, disable=None) as bar:
        advice = advise(inputs, refused=titan.refused, progress=bar.set_description_str)
    keys = (titan.keys if advice.worth_it else titan.keys_without)(
        advice.recommended.configuration
    )
    toml = snippet(keys)
    print(
        f"{verdict(advice)}; means of {inputs.documents.batches} steps\n{reordering(advice)}\n"
    )
    gain = None if advice.servers is None else advice.servers.gain_over(advice.best)
    if gain is not None:
        print(f"{servers_line(inputs.cluster, 1 + gain)}\n")
    print(f"{table(advice)}\n\n{toml}\n", *notes, sep="\n")
    if output is not None:
        document = {
            "inputs": inputs.described(),
            "notes": notes,
            **_document(advice),
            "keys": keys,
            "toml": toml,
        }
        write_json(output, document)


def _document(advice: Advice) -> dict[str, Any]:
    def of(trial: Trial) -> dict[str, Any]:
        return {
            "settings": trial.configuration.described(),
            "seconds_per_step": trial.seconds if trial.fits else None,
            "gain": trial.gain_over(advice.base),
            "memory_bytes": trial.memory,
            "reason": trial.reason,
        }

    return {
        "verdict": verdict(advice),
        "worth_it": advice.worth_it,
        "reordering_is_enough": advice.reordering_is_enough,
        "speedup": advice.speedup,
        "job_as_written": of(advice.written),
        "gains_are_over": of(advice.base),
        "recommended": of(advice.recommended),
        "without_cad": {
            "as_written": of(advice.without_written),
            "at_its_best": of(advice.without),
        },
        "reordered": of(advice.reorder),
        "servers": None if advice.servers is None else of(advice.servers),
        "trials": {
            KEYS[name]: [of(trial) for trial in trials]
            for name, trials in advice.trials.items()
        },
    }


def verdict(advice: Advice) -> str:
    """Say in one line whether CAD is worth it for the job."""
    best = advice.best
    without = advice.without
    if advice.speedup is None:
        if best.fits:
            return f"worth it: without cad the job does not fit, it {without.reason}; with cad {_step(best)}"
        what = "with cad nothing" if without.fits else "nothing"
        return f"not worth it: {what} that was tried fits; the job {best.reason}"
    word = "worth it" if advice.worth_it else "not worth it"
    return f"{word}: {advice.speedup:.2f}x as fast as without cad (predicted: {_step(best)}, {_step(without)} without)"


def reordering(advice: Advice) -> str:
    """Say in one line whether it is enough to distribute whole rows anew over ranks and microbatches."""
    if (more := advice.best.gain_over(advice.reorder)) is None:
        return f"reordering alone is not compared: {advice.reorder.reason or advice.best.reason}"
    return (
        f"reordering alone is {'' if advice.reordering_is_enough else 'not '}enough: whole rows distributed anew over "
        f"ranks and microbatches, with nothing exchanged, take {_step(advice.reorder)} "
        f"({100 * more:+z.1f} % beside cad)"
    )


def table(advice: Advice) -> str:
    """Return every setting that was tried: its value, what it gains alone, and the memory of the fullest GPU."""
    rows = [["setting", "value", "a step", "gain", "GB", ""]]

    def add(setting: str, trial: Trial, over: Configuration, note: str = "") -> None:
        gain = trial.gain_over(advice.base)
        memory = f"{trial.memory / 1e9:.1f}" if trial.memory else "-"
        changes = trial.configuration.changes(over)
        value = (
            ", ".join(f"{field} {value}" for field, value in changes.items())
            or "as written"
        )
        seconds = _step(trial).removesuffix(" a step") if trial.fits else "-"
        share = "-" if gain is None else f"{100 * gain:+z.1f} %"
        rows.append(
            [
                setting,
                value,
                seconds,
                share,
                memory,
                note if trial.fits else trial.reason,
            ]
        )

    written = advice.written.configuration
    base = advice.base.configuration
    add(
        "without cad",
        advice.without_written,
        advice.without_written.configuration,
        "torchtitan alone",
    )
    add("without cad", advice.without, written, "its best")
    add("without cad", advice.reorder, written, "its best with whole rows reordered")
    add("with cad", advice.written, written)
    add("with cad", advice.base, written, "gains are over this")
    for name, trials in advice.trials.items():
        for trial in trials:
            add(KEYS[name], trial, base)
    add(
        "recommended",
        advice.recommended,
        written,
        "" if advice.worth_it else "without cad",
    )
    return aligned(rows, (0, 1, 5))


def snippet(keys: dict[str, Any]) -> str:
    """Write these keys as TOML; those of value None are to be left out."""
    tables: dict[str, list[str]] = {}
    for key, value in keys.items():
        owner, name = key.split(".")
        text = (
            f"# leave {name} out" if value is None else f"{name} = {json.dumps(value)}"
        )
        tables.setdefault(owner, []).append(text)
    lines = [] if keys else ["# nothing to change: no setting gains 1 %"]
    return "\n".join(
        [
            *lines,
            *("\n".join([f"[{owner}]", *texts]) for owner, texts in tables.items()),
        ]
    )


def _step(trial: Trial) -> str:
    return (
        f"{trial.seconds:.3f} s a step"
        if trial.seconds >= 1
        else f"{1e3 * trial.seconds:.3g} ms a step"
    )
