# SPDX-License-Identifier: BSD-3-Clause
"""Checks the folders that a job writes to and resumes from, before training starts."""

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.config import JobConfig

from torchtitan_cad.integration.torchtitan_v0_2.rules import read_key

METADATA = ".metadata"
"""File that torch writes when a checkpoint is complete."""


def check_folders(config: JobConfig) -> None:
    """Raise ValueError if the job cannot write where it says, or there is no checkpoint where it is to go on."""
    if config.checkpoint.enable:
        _check_writable(config, "checkpoint.folder")
        resumed_from(config)
    _check_writable(config, "job.dump_folder")
    for key, is_used in _FOLDERS.items():
        if is_used(config):
            _check_writable(config, key)
    _check_schedule_file(config)
    if config.job.save_config_file is not None:
        _check_writable(config, "job.save_config_file")
        if Path(config.job.dump_folder, config.job.save_config_file).is_dir():
            raise ValueError(
                f"job.save_config_file = {config.job.save_config_file!r} is a folder; name a file"
            )


_FOLDERS: dict[str, Callable[[JobConfig], bool]] = {
    "comm.save_traces_folder": lambda config: (
        config.comm.trace_buf_size > 0 and config.comm.mode == "default"
    ),
    "metrics.save_tb_folder": lambda config: config.metrics.enable_tensorboard,
    "profiling.save_traces_folder": lambda config: config.profiling.enable_profiling,
    "profiling.save_memory_snapshot_folder": lambda config: (
        config.profiling.enable_memory_snapshot
    ),
}
"""Keys of folders in ``job.dump_folder``, and whether a job writes to them."""


def _check_schedule_file(config: JobConfig) -> None:
    parallelism = config.parallelism
    path = parallelism.pipeline_parallel_schedule_csv
    if path and parallelism.pipeline_parallel_degree > 1 and not Path(path).is_file():
        raise ValueError(
            f"parallelism.pipeline_parallel_schedule_csv = {path!r}: there is no such file; set it to one, or leave it "
            "out"
        )


def checkpoint_folder(config: JobConfig) -> Path:
    """Return the folder that torchtitan writes checkpoints to."""
    return Path(config.job.dump_folder, config.checkpoint.folder)


def resumed_from(config: JobConfig) -> Path | None:
    """Return the checkpoint that torchtitan will load, None if training begins anew; ValueError if it is not there."""
    checkpoint = config.checkpoint
    folder = checkpoint_folder(config)
    if not checkpoint.enable:
        return None
    step = checkpoint.load_step
    if not folder.exists():
        initial = _initial_checkpoint(config)
        if initial is None and step != -1:
            raise ValueError(
                f"checkpoint.load_step = {step}: there is no {folder}; set checkpoint.folder and job.dump_folder to "
                "those of the run that goes on, or checkpoint.load_step to -1 to begin anew"
            )
        return initial
    if step == -1:
        step = CheckpointManager._find_load_step(None, str(folder))
    if step == -1:
        return None
    if not (folder / f"step-{step}").is_dir():
        raise ValueError(
            f"checkpoint.load_step = {step}: there is no {folder / f'step-{step}'}; set it to a step that is there, or "
            "to -1 for the last one"
        )
    return folder / f"step-{step}"


def _initial_checkpoint(config: JobConfig) -> Path | None:
    checkpoint = config.checkpoint
    if checkpoint.initial_load_path:
        key = "checkpoint.initial_load_path"
        path = checkpoint.initial_load_path
    elif checkpoint.initial_load_in_hf:
        key = "checkpoint.initial_load_in_hf = true, model.hf_assets_path"
        path = config.model.hf_assets_path
    else:
        return None
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(
            f"{key} = {path!r}: there is no such folder; set it to that of a checkpoint"
        )
    if checkpoint.initial_load_in_hf:
        if not any(folder.glob("*.safetensors")):
            raise ValueError(
                f"{key} = {path!r}: there is no *.safetensors; set it to a folder with a model's weights"
            )
    elif not (folder / METADATA).is_file():
        raise ValueError(
            f"{key} = {path!r}: there is no {METADATA}, which a complete checkpoint has; set it to a folder such as "
            "checkpoint/step-100, or checkpoint.initial_load_in_hf to true for Hugging Face's format"
        )
    return folder


def nearest_folder(folder: Path) -> Path:
    """Return ``folder``, or the nearest one above that is there."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def _check_writable(config: JobConfig, key: str) -> None:
    """Make and remove an unnamed file in the nearest folder that is there, as access rights do not tell all."""
    value = read_key(config, key)
    dump_folder = config.job.dump_folder
    folder = Path(dump_folder, value)
    place = "it"
    try:
        nearest = nearest_folder(folder)
        place = str(nearest)
        tempfile.TemporaryFile(dir=nearest).close()
        _check_names(folder, nearest)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        in_folder = (
            "" if key == "job.dump_folder" else f" in job.dump_folder = {dump_folder!r}"
        )
        is_absolute = Path(value).is_absolute()
        is_long = getattr(error, "errno", None) == errno.ENAMETOOLONG
        setting = key if is_absolute or is_long else "job.dump_folder"
        raise ValueError(
            f"{key} = {value!r}{in_folder}: cannot write to {place}: {reason}; set {setting} to a folder that can be "
            "written to"
        ) from error


def _check_names(folder: Path, nearest: Path) -> None:
    """Raise OSError if a folder below ``nearest`` has a name that is too long for its file system."""
    longest = os.pathconf(nearest, "PC_NAME_MAX")
    for name in folder.absolute().relative_to(nearest).parts:
        if len(os.fsencode(name)) > longest:
            raise OSError(
                errno.ENAMETOOLONG,
                f"{os.strerror(errno.ENAMETOOLONG)} ({longest} bytes at most)",
            )
