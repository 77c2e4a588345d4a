# SPDX-License-Identifier: BSD-3-Clause
"""Does a checkpoint go on as this job? What torchtitan would stop at, said before it is loaded, with the remedy."""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torchtitan.components.checkpoint import (
    DATALOADER,
    LR_SCHEDULER,
    OPTIMIZER,
    TRAIN_STATE,
)
from torchtitan.config import JobConfig

from torchtitan_cad.integration.topology import Topology

_BESIDE_MODEL = (OPTIMIZER, LR_SCHEDULER, DATALOADER, TRAIN_STATE)
"""Names of what a full checkpoint holds beside the model; its keys begin with them."""
METADATA = ".metadata"
"""File that torch writes when a checkpoint is complete."""
_RANK = re.compile(rf"{DATALOADER}\.dp_rank_(\d+)")
"""Key of the state of a data-parallel rank's loader."""
_DATA_ANEW = (
    f"add {DATALOADER!r} to checkpoint.exclude_from_loading: the data then begin anew"
)
_STEP = re.compile(r"step-(\d+)$")


def check_resumed(config: JobConfig, start: Path, world_size: int | None) -> None:
    """Raise ValueError if the checkpoint that the job goes on from lacks what its options ask of it.

    Args:
        start: folder of the checkpoint.
        world_size: ranks of the job; None if it is not known, as their number is then not compared.
    """
    checkpoint = config.checkpoint
    is_own = start.parent == Path(config.job.dump_folder, checkpoint.folder)
    loads_model_only = (
        start.name == "step-0" if is_own else checkpoint.initial_load_model_only
    )
    wanted = [
        name for name in _BESIDE_MODEL if name not in checkpoint.exclude_from_loading
    ]
    if loads_model_only or not wanted:
        return
    keys = _saved_keys(start)
    if keys is not None and not any(key.startswith(_BESIDE_MODEL) for key in keys):
        raise ValueError(_model_alone(config, start, is_own))
    saved = {int(found[1]) for key in keys or () if (found := _RANK.fullmatch(key))}
    if not saved or world_size is None or DATALOADER not in wanted:
        return
    ranks = Topology.from_job(config.parallelism, world_size).dp
    if ranks != len(saved):
        raise ValueError(
            f"{start} was saved with {len(saved)} data-parallel ranks, and this job has {ranks}, for which torchtitan "
            f"cannot cut the loader's state anew; start as many as then, or {_DATA_ANEW}"
        )


def _saved_keys(start: Path) -> set[str] | None:
    """Return the keys of a checkpoint, none of one in Hugging Face's format; None if it is not complete.

    Raises ValueError if they cannot be read.
    """
    if not (start / METADATA).is_file():
        return set() if any(start.glob("*.safetensors*")) else None
    try:
        return {*FileSystemReader(str(start)).read_metadata().state_dict_metadata}
    except Exception as error:  # whatever unpickling a broken file raises
        raise ValueError(
            f"{start / METADATA} cannot be read ({type(error).__name__}: {error}); remove {start}, or set "
            "checkpoint.load_step to that of another checkpoint"
        ) from error


def _model_alone(config: JobConfig, start: Path, is_own: bool) -> str:
    """Say that a checkpoint holds the model alone, and which one to take."""
    if not is_own:
        return (
            f"checkpoint.initial_load_path = {str(start)!r} holds the model alone; set "
            "checkpoint.initial_load_model_only to true"
        )
    found = f"checkpoint.load_step = {config.checkpoint.load_step} is {start}, which holds the model alone"
    folders = [
        path
        for path in start.parent.glob("step-*")
        if _STEP.match(path.name) and path != start
    ]
    full = [
        path
        for path in folders
        if any(key.startswith(_BESIDE_MODEL) for key in _saved_keys(path) or ())
    ]
    if full:
        last = max(int(path.name.removeprefix("step-")) for path in full)
        return f"{found} (checkpoint.last_save_model_only); set checkpoint.load_step to {last}, the last full one"
    return (
        f"{found} (checkpoint.last_save_model_only), and there is no full one beside it; to begin anew from its "
        f"weights, set checkpoint.initial_load_path to it and checkpoint.folder to another"
    )


def check_workers_when_loaded(loader: Any) -> None:
    """Make ``loader``, one of torchtitan's, raise ValueError for the state of another number of worker processes."""
    original = loader.load_state_dict

    @functools.wraps(original)
    def load_state_dict(state: dict[str, Any]) -> None:
        original(state)
        saved = _saved_workers(getattr(loader, "next_iter_state", None))
        if saved is not None and saved != loader.num_workers:
            raise ValueError(
                f"training.dataloader.num_workers = {loader.num_workers}: the checkpoint was saved with {saved}, for "
                f"which torchdata cannot cut the loader's state anew; set it to {saved}, or {_DATA_ANEW}"
            )

    loader.load_state_dict = load_state_dict


def _saved_workers(state: Mapping[str, Any] | None) -> int | None:
    """Return the number of worker processes that a state of torchdata's loader is for; None if it does not say."""
    if state is None:
        return None
    if "_num_yielded" in state:  # of a loader without workers
        return 0
    return state.get("_snapshot", {}).get("_main_snapshot", {}).get("_num_workers")
