# SPDX-License-Identifier: BSD-3-Clause
"""A job with ``cad.shadow`` in torchtitan 0.2.2: its ``TrainSpec``."""

import copy
import dataclasses
from typing import Any

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import TrainSpec

from torchtitan_cad.integration.shadow import Shadow, open_shadow
from torchtitan_cad.integration.torchtitan_v0_2.inputs import open_dataset
from torchtitan_cad.integration.torchtitan_v0_2.job import read_job
from torchtitan_cad.integration.torchtitan_v0_2.metrics import ShadowMetricsProcessor


def shadow_train_spec(spec: TrainSpec, flavor: str) -> TrainSpec:
    """Make a spec that trains as ``spec`` does, while a ``Shadow`` sees the batches."""
    shadow: Shadow | None = None

    def build_dataloader(
        *, tokenizer: Any, job_config: JobConfig, **kwargs: Any
    ) -> BaseDataLoader:
        nonlocal shadow
        loader = open_dataset(
            "training",
            spec.build_dataloader_fn,
            tokenizer=tokenizer,
            job_config=job_config,
            **kwargs,
        )
        args = copy.deepcopy(spec.model_args[flavor])
        args.update_from_config(job_config)
        job = read_job(job_config, args, tokenizer.eos_id if tokenizer else None)
        shadow = open_shadow(loader, job, job_config.job.dump_folder)
        return shadow

    def build_metrics(
        job_config: JobConfig, parallel_dims: ParallelDims, model_args: Any = None
    ) -> MetricsProcessor:
        assert shadow is not None, "torchtitan builds the data loader first"
        return ShadowMetricsProcessor(job_config, parallel_dims, shadow)

    return dataclasses.replace(
        spec,
        build_dataloader_fn=build_dataloader,
        build_metrics_processor_fn=build_metrics,
    )
