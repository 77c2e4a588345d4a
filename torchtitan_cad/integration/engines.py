# SPDX-License-Identifier: BSD-3-Clause
"""The engines of a job: one for each kind of the model's attention, over one transport."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_cad.integration.gathering import gather_objects
from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.planning.keeping import KeepCapacity, kept_by_setting
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.planning.pipeline.program import TickProgram
from torchtitan_cad.runtime.engine import CoreAttentionEngine, register_engine
from torchtitan_cad.runtime.tick_engine import TickEngine

logger = logging.getLogger(__name__)

ENGINE = "cad"
"""Name of the first kind's engine in the core-attention operator."""


@dataclass(frozen=True)
class Ticks:
    """A pipeline in ticks: what its ranks run in training and validation, and the dtype of their queries and keys."""

    training: TickProgram
    validation: TickProgram
    dtype: torch.dtype


def engine_name(kinds: Sequence[AttentionKind], name: str) -> str:
    """Return the name of the engine of the kind ``name``."""
    return ENGINE if name == kinds[0].name else f"{ENGINE}/{name}"


def kernel_shape(kinds: Sequence[AttentionKind]) -> AttentionShape:
    """Return the shape for which a kernel of all kinds is chosen: the first kind's, with the window of any."""
    windows = (kind.shape.window for kind in kinds)
    return replace(
        kinds[0].shape,
        window=next((window for window in windows if window is not None), None),
    )


def kept_bytes(
    backward: str,
    room: KeepCapacity,
    group: dist.ProcessGroup | None,
    *,
    in_ticks: bool,
) -> float:
    """Return the bytes of rows that servers may keep in a call, equal on all ranks of ``group``. Collective over it.

    Args:
        backward: ``cad.backward``.
        room: of this rank.
        group: a CAD group on the host; None for one rank.
        in_ticks: True in a pipeline in ticks, where backward meets other microbatches than forward did.
    """
    kept = kept_by_setting(backward, in_ticks=in_ticks)
    if kept is not None:
        return kept
    rooms = gather_objects(room, group, "set-up")
    least = min(rooms, key=lambda room: room.bytes_per_call)
    logger.info(f"cad.backward = 'auto': {least.describe()}")
    return least.bytes_per_call


def build_engines(
    kinds: Sequence[AttentionKind], ticks: Ticks | None, **options: Any
) -> list[CoreAttentionEngine]:
    """Build and register an engine for each kind; ``options`` are those of all of them.

    They count exchanges together, and a plan has the same key in all of them.

    Raises:
        ValueError: several kinds in a pipeline in ticks, where ranks that attend together are in different layers.
    """
    if ticks is not None and len(kinds) > 1:
        raise ValueError(
            "parallelism.pipeline_parallel_schedule: in a schedule of CAD's the layers of all stages attend together, "
            f"but those of this model have {len(kinds)} kinds of attention; set a schedule of torch, such as '1F1B'"
        )
    engines = list[CoreAttentionEngine]()
    for kind in kinds:
        of_kind = {**options, "scale": kind.score_scale}
        engine = (
            CoreAttentionEngine(**of_kind)
            if ticks is None
            else TickEngine(kind.shape, ticks.dtype, **of_kind)
        )
        engine.clock = engines[0].clock if engines else engine.clock
        register_engine(engine_name(kinds, kind.name), engine)
        engines.append(engine)
    return engines
