"""Plans of a pipeline in ticks: one per pool, over all stages (see ``planning.program``)."""

from torchtitan_cad.integration.loading.batch_planner import BatchPlanner
from torchtitan_cad.integration.loading.documents import BatchShape, pool_layouts
from torchtitan_cad.planning import PlanCosts, PlanPair, TokenLayout
from torchtitan_cad.planning.pipeline.program import Pool, Program

KEY_STEP = 2
"""Between the keys of one planner, in multiples of the nano-batches: training and validation take turns."""


def pool_keys(first: int, pool: int, nano_batches: int) -> tuple[int, ...]:
    """Keys of a pool's plans, one per nano-batch, in a batch whose first plan has key ``first``."""
    key = first + pool * KEY_STEP * nano_batches
    return tuple(range(key, key + nano_batches))


class TickPlanner(BatchPlanner):
    """Plans batches for the ticks of a pipeline.

    ``program`` has to be set before the first batch; it is known once the model has been cut into stages. Row keys are
    distinct for microbatches, and those of microbatch 0 are the first plan's key.
    """

    program: Program | None = None

    def _num_plans(self, shape: BatchShape) -> int:
        return len(self._pools) * self._nano_batches

    def _plan_layouts(self, layouts: list[list[TokenLayout]]) -> list[list[PlanPair]]:
        return [self._plan_pool(layouts, pool) for pool in self._pools]

    def _plan_pool(self, layouts: list[list[TokenLayout]], pool: Pool) -> list[PlanPair]:
        costs = self._costs
        if costs is not None and pool.forward:
            costs = PlanCosts(costs.forward)
        pooled = pool_layouts(layouts, pool.microbatches, self._per_stage)
        return [self._make_pair(layout, costs) for layout in pooled]

    @property
    def _pools(self) -> tuple[Pool, ...]:
        if self.program is None:
            raise RuntimeError("a batch is to be planned before the pipeline's stages are known")
        return self.program.pools
