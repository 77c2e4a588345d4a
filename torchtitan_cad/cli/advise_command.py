"""``torchtitan-cad advise``: is CAD worth it for this job on this cluster, and with which settings?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import tyro

from torchtitan_cad.cli.advise_text import KEYS, snippet, table, verdict
from torchtitan_cad.cli.files import check_output
from torchtitan_cad.cli.loading import load_planner
from torchtitan_cad.cli.simulation_inputs import Options, described, read_inputs
from torchtitan_cad.simulation import Advice, Trial, advise

OF_THE_JOB = {
    **dict.fromkeys(
        ("model", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocabulary"), "model.flavor"
    ),
    "dtype_bytes": "training.mixed_precision_param",
    "checkpointing": "activation_checkpoint.mode",
    "tp": "parallelism.tensor_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
    "cp": "parallelism.context_parallel_degree",
    "fsdp": "parallelism.data_parallel_shard_degree",
    "row_tokens": "training.seq_len",
    "tokens_per_rank": "training.local_batch_size",
    "microbatches": "training.global_batch_size",
    "tolerance": "cad.tolerance",
    "nano_batches": "cad.nano_batches",
    "backward": "cad.backward",
    "placement": "cad.placement",
}
"""Options of `simulate` that would make another job of this one, and the keys that do so here."""


DEFAULTS = Options(batches=3)


def run(
    job: Annotated[Path, tyro.conf.Positional],
    overrides: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    *,
    options: Options = DEFAULTS,
    output: Path | None = None,
) -> None:
    """Predict whether CAD is worth it for a job on a cluster, and which settings it should take.

    Changes one setting at a time, keeps what gains 1 % and more, and simulates the settings that are left together.
    Prints a verdict, what every setting gains and the memory it needs, keys to set in the job's tables, and what was
    assumed. docs/simulation.md says what is modelled.

    Args:
        job: torchtitan's TOML file.
        overrides: Further arguments of the job, such as --training.seq_len 65536. They come last.
        output: Write everything to this JSON file.
    """
    if output is not None:
        check_output("--output", output)
    for name, key in OF_THE_JOB.items():
        if getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')}: advice is for the job itself; set --{key} instead")
    inputs, notes, titan = read_inputs(job, overrides, options)
    assert titan is not None
    from tqdm import tqdm

    from torchtitan_cad.integration.titan022.commands import advised_job

    load_planner(placement=True)
    written = advised_job.written(titan)
    with tqdm(bar_format="{desc} [{elapsed}]", leave=False, disable=None) as bar:
        advice = advise(
            *inputs, written, lambda each: advised_job.refused(titan, each), progress=bar.set_description_str
        )
    keys = advised_job.keys(titan, advice.best.configuration)
    if not advice.worth_it:
        keys = advised_job.keys_without(titan)
    print(f"{verdict(advice)}; means of {inputs[2].batches} steps")
    toml = snippet(advice, keys)
    print(f"\n{table(advice)}\n\n{toml}\n")
    notes += advised_job.notes(titan)
    print("\n".join(notes))
    if output is not None:
        document = _document(advice, keys)
        everything = {"inputs": described(inputs), "notes": notes, **document, "toml": toml}
        output.write_text(json.dumps(everything, indent=1, allow_nan=False) + "\n")
        print(f"wrote {output}")


def _document(advice: Advice, keys: dict[str, Any]) -> dict[str, Any]:
    def of(trial: Trial) -> dict[str, Any]:
        return {
            "settings": dataclasses.asdict(trial.configuration),
            "seconds_per_step": trial.seconds if trial.fits else None,
            "gain": trial.gain_over(advice.base),
            "memory_bytes": trial.memory,
            "reason": trial.reason,
        }

    return {
        "verdict": verdict(advice),
        "worth_it": advice.worth_it,
        "speedup": advice.speedup,
        "keys": keys,
        "job_as_written": of(advice.written),
        "gains_are_over": of(advice.base),
        "recommended": of(advice.best),
        "longer_without": {KEYS[name]: worth for name, worth in advice.worth.items()},
        "without_cad": {"as_written": of(advice.without_written), "at_its_best": of(advice.without)},
        "trials": {KEYS[name]: [of(trial) for trial in trials] for name, trials in advice.trials.items()},
    }
