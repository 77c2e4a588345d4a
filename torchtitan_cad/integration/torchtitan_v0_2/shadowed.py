# SPDX-License-Identifier: BSD-3-Clause
"""A job with ``cad.shadow`` in torchtitan 0.2.2: its ``TrainSpec`` and its metrics."""

import copy
import dataclasses
import statistics
from typing import Any

from torch import nn
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.tools.logging import logger

from torchtitan_cad.integration.shadow import Shadow, open_shadow
from torchtitan_cad.integration.torchtitan_v0_2.compile_caches import separate_compile_caches
from torchtitan_cad.integration.torchtitan_v0_2.inputs import open_dataset
from torchtitan_cad.integration.torchtitan_v0_2.job import read_job
from torchtitan_cad.integration.torchtitan_v0_2.resume import check_workers_when_loaded


def shadow_train_spec(spec: TrainSpec, flavor: str) -> TrainSpec:
    """Make a spec that trains as ``spec`` does, while a ``Shadow`` sees the batches, with compile caches as CAD's."""
    shadow: Shadow | None = None

    def build_dataloader(*, tokenizer: Any, job_config: JobConfig, **kwargs: Any) -> BaseDataLoader:
        nonlocal shadow
        build, options = spec.build_dataloader_fn, {"tokenizer": tokenizer, **kwargs}
        loader = open_dataset("training", build, job_config=job_config, **options)
        check_workers_when_loaded(loader)
        args = copy.deepcopy(spec.model_args[flavor])
        args.update_from_config(job_config)
        job = read_job(job_config, args, tokenizer.eos_id if tokenizer else None)
        shadow = open_shadow(loader, job, job_config.job.dump_folder)
        return shadow

    def build_metrics(job_config: JobConfig, parallel_dims: ParallelDims, model_args: Any = None) -> MetricsProcessor:
        assert shadow is not None, "torchtitan builds the data loader first"
        return ShadowMetricsProcessor(job_config, parallel_dims, shadow)

    def parallelize(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
        separate_compile_caches(parallel_dims)
        return spec.parallelize_fn(model, parallel_dims, job_config)

    return dataclasses.replace(
        spec,
        parallelize_fn=parallelize,
        build_dataloader_fn=build_dataloader,
        build_metrics_processor_fn=build_metrics,
    )


class ShadowMetricsProcessor(MetricsProcessor):
    """torchtitan's metrics plus the imbalance as loaded."""

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims, shadow: Shadow) -> None:
        super().__init__(job_config, parallel_dims)
        self._shadow = shadow

    def should_log(self, step: int) -> bool:
        """Record a step, and tell whether it is logged; torchtitan asks at the end of every step, on all ranks."""
        self._shadow.end_step(step)
        return super().should_log(step)

    def log(self, step: int, global_avg_loss: float, *others: float, extra_metrics: Any = None, **named: float) -> None:
        """Log a step, with the mean imbalance of the steps since the last log line."""
        imbalances = self._shadow.drain_imbalances()
        scalars = {"cad/imbalance/before": statistics.fmean(imbalances)} if imbalances else {}
        super().log(step, global_avg_loss, *others, extra_metrics={**(extra_metrics or {}), **scalars}, **named)
        for imbalance in scalars.values():
            logger.info(f"cad.shadow: imbalance {imbalance:.3f} as loaded")
