# SPDX-License-Identifier: BSD-3-Clause
"""Checks the folders that a job writes to and resumes from, before training starts."""

import tempfile
from pathlib import Path

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.config import JobConfig

from torchtitan_cad.integration.torchtitan_v0_2.rules import read_key

METADATA = ".metadata"
"""File that torch writes when a checkpoint is complete."""
_WRITTEN = (
    "job.dump_folder",
    "job.save_config_file",
    "checkpoint.folder",
    "comm.save_traces_folder",
    "metrics.save_tb_folder",
    "profiling.save_traces_folder",
    "profiling.save_memory_snapshot_folder",
)
"""Keys of folders, and a file, of which those that are not absolute are in ``job.dump_folder``."""


def check_folders(config: JobConfig) -> None:
    """Raise ValueError if the job cannot write where it says, or there is no checkpoint where it is to go on."""
    for key in _WRITTEN:
        value = read_key(config, key)
        folder = Path(config.job.dump_folder, value or "")
        # that of an earlier start is written again
        if key == "job.save_config_file" and folder.is_file():
            folder = folder.parent
        try:
            # as access rights do not tell all
            tempfile.TemporaryFile(dir=nearest_folder(folder)).close()
        except OSError as error:
            raise ValueError(
                f"{key} = {value!r}: cannot write to it: {error.strerror}; set it or job.dump_folder to a folder that "
                "can be written to"
            ) from error
    resumed_from(config)


def checkpoint_folder(config: JobConfig) -> Path:
    """Return the folder that torchtitan writes checkpoints to."""
    return Path(config.job.dump_folder, config.checkpoint.folder)


def resumed_from(config: JobConfig) -> Path | None:
    """Return the checkpoint that torchtitan will load, None if training begins anew; ValueError if it is not there."""
    if not config.checkpoint.enable:
        return None
    folder = checkpoint_folder(config)
    step = config.checkpoint.load_step
    if not folder.exists():
        initial = _initial_checkpoint(config)
        if initial is not None or step == -1:
            return initial
    elif step == -1:
        step = CheckpointManager._find_load_step(None, str(folder))
        if step == -1:
            return None
    path = folder / f"step-{step}"
    if not path.is_dir():
        raise ValueError(
            f"checkpoint.load_step = {step}: there is no {path}; set it to a step that is there, or to -1 for the last "
            "one, or to begin anew"
        )
    return path


def _initial_checkpoint(config: JobConfig) -> Path | None:
    key = "checkpoint.initial_load_path"
    in_hf = config.checkpoint.initial_load_in_hf
    if in_hf and not config.checkpoint.initial_load_path:
        key = "model.hf_assets_path"
    path = read_key(config, key)
    if not path:
        return None
    pattern = "*.safetensors" if in_hf else METADATA
    folder = Path(path)
    if not any(folder.glob(pattern)):
        raise ValueError(
            f"{key} = {path!r}: there is no {pattern} in such a folder; set it to a complete checkpoint such as "
            "checkpoint/step-100, or, with checkpoint.initial_load_in_hf = true, to Hugging Face's weights"
        )
    return folder


def nearest_folder(folder: Path) -> Path:
    """Return ``folder``, or the nearest one above that is there."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())
