# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan 0.2.2's metrics with CAD's, and those of a job with ``cad.shadow``."""

import os
from typing import Any

import torch.distributed as dist
from torchtitan.components.metrics import MetricsProcessor, _get_metrics_rank
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

from torchtitan_cad.integration.report.metrics import CadMetrics, ShadowMetrics
from torchtitan_cad.integration.shadow import Shadow


class CadMetricsProcessor(CadMetrics, MetricsProcessor):
    """torchtitan's metrics plus CAD's."""

    def __init__(
        self, job_config: JobConfig, parallel_dims: ParallelDims, model_args: Any = None
    ) -> None:
        super().__init__(job_config, parallel_dims)
        self.begin(
            writes_steps=dist.get_rank()
            == _get_metrics_rank(parallel_dims, job_config),
            folder=os.path.join(
                job_config.job.dump_folder, job_config.metrics.save_tb_folder
            ),
        )


class ShadowMetricsProcessor(ShadowMetrics, MetricsProcessor):
    """torchtitan's metrics plus the imbalance as loaded."""

    def __init__(
        self, job_config: JobConfig, parallel_dims: ParallelDims, shadow: Shadow
    ) -> None:
        super().__init__(job_config, parallel_dims)
        self.shadow = shadow

    def should_log(self, step: int) -> bool:
        """Record a step, and tell whether it is logged; torchtitan asks at the end of every step, on all ranks."""
        self.shadow.end_step(step)
        return super().should_log(step)
