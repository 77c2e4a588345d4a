# SPDX-License-Identifier: BSD-3-Clause
"""Checks the folders that a job writes to and resumes from, before training starts."""

import tempfile
from importlib.util import find_spec
from pathlib import Path

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.config import JobConfig

from torchtitan_cad.integration.titan022.checks import launched_ranks
from torchtitan_cad.integration.titan022.resume import check_resumed


def check_folders(config: JobConfig, world_size: int | None = None) -> None:
    """Raise ValueError if the job cannot write to ``job.dump_folder``, or save and load checkpoints where it says.

    ``world_size`` is by default the launcher's.
    """
    job, checkpoint = config.job, config.checkpoint
    if checkpoint.enable:
        key = f"checkpoint.folder = {checkpoint.folder!r} in job.dump_folder = {job.dump_folder!r}"
        setting = "checkpoint.folder" if Path(checkpoint.folder).is_absolute() else "job.dump_folder"
        _check_writable(key, checkpoint_folder(config), setting)
        if checkpoint.keep_latest_k == 1:
            raise ValueError(
                "checkpoint.keep_latest_k = 1: while one is saved another must be kept; set it to 2 or more, "
                "or to 0 for all"
            )
        _check_safetensors(config)
        if (start := resumed_from(config)) is not None:
            check_resumed(config, start, launched_ranks(config) if world_size is None else world_size)
    has_cad = getattr(config.parallelism, "cad", False)  # which writes the figures of its steps
    if has_cad or config.metrics.enable_tensorboard or config.profiling.enable_profiling:
        _check_writable(f"job.dump_folder = {job.dump_folder!r}", Path(job.dump_folder), "job.dump_folder")


def _check_safetensors(config: JobConfig) -> None:
    """Raise ValueError if a checkpoint in Hugging Face's format needs the package safetensors, and it is not there."""
    for key in ("last_save_in_hf", "initial_load_in_hf"):
        if getattr(config.checkpoint, key) and find_spec("safetensors") is None:
            raise ValueError(
                f"checkpoint.{key} = true needs the package safetensors: `pip install safetensors`, or set "
                f"checkpoint.{key} to false"
            )


def checkpoint_folder(config: JobConfig) -> Path:
    """Return the folder that torchtitan writes checkpoints to."""
    return Path(config.job.dump_folder, config.checkpoint.folder)


def resumed_from(config: JobConfig) -> Path | None:
    """Return the checkpoint that torchtitan will load, None if training begins anew; ValueError if it is not there."""
    checkpoint, folder = config.checkpoint, checkpoint_folder(config)
    if not checkpoint.enable:
        return None
    if not folder.exists():
        return _initial_checkpoint(config)
    if (step := checkpoint.load_step) == -1:
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
        key, path = "checkpoint.initial_load_path", checkpoint.initial_load_path
    elif checkpoint.initial_load_in_hf:
        key, path = "checkpoint.initial_load_in_hf = true, model.hf_assets_path", config.model.hf_assets_path
    else:
        return None
    if not Path(path).is_dir():
        raise ValueError(f"{key} = {path!r}: there is no such folder; set it to that of a checkpoint")
    return Path(path)


def nearest_folder(folder: Path) -> Path:
    """Return ``folder``, or the nearest one above that is there."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def _check_writable(key: str, folder: Path, setting: str) -> None:
    """Make and remove an unnamed file in the nearest folder that is there, as access rights do not tell all."""
    try:
        tempfile.TemporaryFile(dir=nearest_folder(folder)).close()
    except OSError as error:
        reason = f"cannot write to {nearest_folder(folder)}: {error.strerror}"
        raise ValueError(f"{key}: {reason}; set {setting} to a folder that can be written to") from error
