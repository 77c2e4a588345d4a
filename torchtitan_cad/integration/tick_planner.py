"""Plans of a pipeline in ticks: one per pool, over all stages (see ``planning.program``)."""

import numpy as np

from torchtitan_cad.integration.batch_planner import BatchPlanner
from torchtitan_cad.integration.documents import BatchShape, pool_layout
from torchtitan_cad.planning import PlanCosts, PlanPair
from torchtitan_cad.planning.program import Pool, Program

KEY_STEP = 2
"""Between the keys of one planner: plan i of a batch has key first + i KEY_STEP. Training and validation take turns."""


class TickPlanner(BatchPlanner):
    """Plans batches for the ticks of a pipeline.

    ``program`` has to be set before the first batch; it is known once the model has been cut into stages. Row keys are
    distinct for microbatches, and those of microbatch 0 are the first plan's key.
    """

    program: Program | None = None

    def _num_plans(self, shape: BatchShape) -> int:
        return len(self._pools)

    def _plan_batch(self, gathered: list[np.ndarray], shape: BatchShape) -> list[list[PlanPair]]:
        return [[self._plan_pool(gathered, shape, pool)] for pool in self._pools]

    def _plan_pool(self, gathered: list[np.ndarray], shape: BatchShape, pool: Pool) -> PlanPair:
        costs = self._costs
        if costs is not None and pool.forward:
            costs = PlanCosts(costs.forward)
        return self._make_pair(pool_layout(gathered, shape, pool.microbatches, self._cp), costs)

    @property
    def _pools(self) -> tuple[Pool, ...]:
        if self.program is None:
            raise RuntimeError("a batch is to be planned before the pipeline's stages are known")
        return self.program.pools
