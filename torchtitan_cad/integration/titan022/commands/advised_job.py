"""A torchtitan job as advice sees it: its settings, the keys that others stand for, and what its checks refuse."""

import copy
from typing import Any

from torchtitan_cad.integration.titan022 import plugin
from torchtitan_cad.integration.titan022.commands.reading import quiet
from torchtitan_cad.integration.titan022.commands.simulated_job import SimulatedJob
from torchtitan_cad.integration.topology import TICK_SCHEDULES
from torchtitan_cad.simulation.inputs import Checkpointing
from torchtitan_cad.simulation.search import Configuration


def written(job: SimulatedJob) -> Configuration:
    """Return the settings of a job; schedules other than the two that are simulated count as the nearer of them."""
    cad: Any = job.config.cad
    in_ticks = job.config.parallelism.pipeline_parallel_schedule in TICK_SCHEDULES
    return Configuration(
        nano_batches=cad.nano_batches,
        tolerance=cad.tolerance,
        backward=cad.backward,
        ranks_per_node=cad.ranks_per_node,
        placement=job.settings.placement,
        checkpointing=job.model.checkpointing,
        cp=job.config.parallelism.context_parallel_degree,
        pp=job.config.parallelism.pipeline_parallel_degree,
        microbatches=job.microbatches,
        schedule="CAD1F1B" if in_ticks else "1F1B",
    )


def keys(job: SimulatedJob, choice: Configuration) -> dict[str, Any]:
    """Return the TOML keys, with their values, that the job would have to change to take a choice.

    A value of None means that the key is to be left out.
    """
    now, parallelism = written(job), job.config.parallelism
    changes = choice.changes(now)
    found: dict[str, Any] = {} if parallelism.cad else {"parallelism.cad": True}
    for name in ("nano_batches", "tolerance", "backward", "ranks_per_node", "placement"):
        if name in changes:
            found[f"cad.{name}"] = "auto" if changes[name] == "balanced" else changes[name]
    if "checkpointing" in changes:
        found.update(_checkpointing(job, choice.checkpointing))
    if "schedule" in changes:
        found["parallelism.pipeline_parallel_schedule"] = choice.schedule
    if {"cp", "pp", "microbatches"} & set(changes):
        dp = job.cluster.ranks // (job.cluster.tp * choice.pp * choice.cp)
        rows = job.step_tokens // job.row_tokens
        per_microbatch = rows // (dp * choice.microbatches)
        degrees = {
            "parallelism.context_parallel_degree": choice.cp,
            "parallelism.pipeline_parallel_degree": choice.pp,
            "training.local_batch_size": rows // dp if choice.pp > 1 else per_microbatch,
        }
        if choice.pp > 1:
            degrees["parallelism.pipeline_parallel_microbatch_size"] = per_microbatch
        elif choice.microbatches > 1:
            degrees["training.global_batch_size"] = rows
        if parallelism.data_parallel_shard_degree > 1:
            degrees["parallelism.data_parallel_shard_degree"] = dp // job.cluster.replicas
        found.update({key: value for key, value in degrees.items() if _get(job.config, key) != value})
    return found


def keys_without(job: SimulatedJob) -> dict[str, Any]:
    """Return the TOML keys by which the job runs without CAD; schedules in ticks are CAD's."""
    found: dict[str, Any] = {"parallelism.cad": False}
    if job.config.parallelism.pipeline_parallel_schedule in TICK_SCHEDULES:
        found["parallelism.pipeline_parallel_schedule"] = "1F1B"
    return found


def _checkpointing(job: SimulatedJob, kind: Checkpointing) -> dict[str, Any]:
    wanted: dict[str, Any] = {"activation_checkpoint.mode": "full" if kind == "linear" else kind}
    if kind == "selective":
        wanted["activation_checkpoint.selective_ac_option"] = "op"
    if kind in ("linear", "full"):
        wanted["cad.recompute_attention"] = kind == "full"
    return {key: value for key, value in wanted.items() if _get(job.config, key) != value}


def notes(job: SimulatedJob) -> list[str]:
    """Return remarks on parts of the job that the simulation replaces."""
    config, now, found = job.config, written(job), []
    schedule = config.parallelism.pipeline_parallel_schedule
    if now.pp > 1 and schedule not in ("1F1B", "CAD1F1B"):
        found.append(f"schedule: {schedule} is simulated as {now.schedule}")
    if config.activation_checkpoint.mode == "selective" and config.activation_checkpoint.selective_ac_option != "op":
        found.append('activation checkpointing: "selective" is simulated as selective_ac_option = "op"')
    if config.activation_checkpoint.mode == "memory_budget":
        found.append('activation checkpointing: "memory_budget" is simulated as "selective"')
    rows_per_pass = config.training.local_batch_size * job.cluster.ranks // (job.cluster.tp * now.pp * now.cp)
    if now.pp > 1 and job.step_tokens // job.row_tokens > rows_per_pass:
        found.append("gradient accumulation: simulated as one pipeline, without a bubble between its parts")
    return found


def refused(job: SimulatedJob, choice: Configuration) -> str:
    """Say why the job could not start with a choice; empty if it could."""
    try:
        with quiet():  # warnings about what is tried would be taken for warnings about the job
            plugin.check(changed(job, keys(job, choice)), job.cluster.ranks)
    except ValueError as error:
        return str(error)
    return ""


def changed(job: SimulatedJob, values: dict[str, Any]) -> Any:
    """Return a copy of the job's config with other values."""
    config = copy.deepcopy(job.config)
    for key, value in values.items():
        table, name = key.split(".")
        setattr(getattr(config, table), name, value)
    return config


def _get(config: Any, key: str) -> Any:
    table, name = key.split(".")
    return getattr(getattr(config, table), name)
