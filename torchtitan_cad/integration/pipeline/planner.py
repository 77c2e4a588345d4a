# SPDX-License-Identifier: BSD-3-Clause
"""Plans of a pipeline in ticks: one per pool, over all stages (see ``planning.pipeline.program``)."""

from typing import Any

from torchtitan_cad.integration.loading.batch_planner import BatchPlanner
from torchtitan_cad.integration.loading.placement import Layouts, PlannedMicrobatches
from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.model.batch import pool_layouts
from torchtitan_cad.planning.pipeline.program import TickProgram

KEY_STEP = 2
"""Between the keys of one planner, in multiples of the nano-batches: training and validation take turns."""


def pool_keys(first: int, pool: int, nano_batches: int) -> tuple[int, ...]:
    """Return the keys of a pool's plans, one per nano-batch, in a batch whose first plan has key ``first``."""
    key = first + pool * KEY_STEP * nano_batches
    return tuple(range(key, key + nano_batches))


class TickPlanner(BatchPlanner):
    """Plans batches for the ticks of a pipeline's ``program``, with the ``options`` of ``BatchPlanner``.

    Row keys are distinct for microbatches, and those of microbatch 0 are the first plan's key.
    """

    def __init__(self, program: TickProgram, *options: Any, **more: Any) -> None:
        super().__init__(*options, **more)
        self._pools = program.pools

    def _plan_batch(
        self,
        layouts: Layouts,
        columns: IntArray,
        placed: PlannedMicrobatches | None,
    ) -> PlannedMicrobatches:
        homes = (
            layouts if placed is None else [microbatch.layouts for microbatch in placed]
        )
        pools = [
            pool_layouts(homes, pool.microbatches, self._per_stage)
            for pool in self._pools
        ]
        return super()._plan_batch(pools, columns, None)
