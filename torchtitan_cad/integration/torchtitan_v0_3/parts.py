# SPDX-License-Identifier: BSD-3-Clause
"""Components of a trainer that CAD wraps: the data loader, metrics, validation and activation checkpointing."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import _get_metrics_rank

from torchtitan_cad.integration.choices import DEMO_TEXTS
from torchtitan_cad.integration.loading.documents import DOCUMENT_IDS
from torchtitan_cad.integration.report.metrics import CadMetrics
from torchtitan_cad.integration.session import current_session
from torchtitan_cad.runtime import ops

_KEPT = {ops._core_attention._opoverload}
"""operators whose outputs activation checkpointing keeps"""


@dataclass(kw_only=True, slots=True)
class WrappedLoader(BaseDataLoader.Config):
    """Config of a recipe's own loader within another one."""

    inner: BaseDataLoader.Config
    wrap: Callable[[Any], Any]

    def build(self, **options: Any) -> Any:
        return self.wrap(self.inner.build(**options))


def add_demo_texts(config: Any) -> None:
    """Add the demo's datasets to torchtitan's if a data loader of ``config`` names one."""
    loaders = (config.dataloader, getattr(config.validator, "dataloader", None))
    if any(getattr(loader, "dataset", None) in DEMO_TEXTS for loader in loaders):
        from torchtitan_cad.demo.datasets import register_datasets

        register_datasets()


class PlannedMetrics(CadMetrics):
    """torchtitan's metrics plus CAD's."""

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__(config, **options)  # type: ignore[call-arg]
        rank = _get_metrics_rank(
            parallel_dims=self.parallel_dims, pp_schedule=options["pp_schedule"]
        )
        self.begin(
            writes_steps=dist.get_rank() == rank,
            folder=os.path.join(options["dump_folder"], config.save_tb_folder),
        )


class PlannedValidator:
    """torchtitan's validator with plans that are made as batches come."""

    def post_dataloading_process(
        self, input_dict: Any, labels: Any, model_parts: Any
    ) -> tuple[Any, Any, Any]:
        """Return tokens, labels and the models' arguments, the plan's key in place of a mask."""
        key = current_session().plan_now(input_dict)
        stock: Any = super()
        tokens, labels, others = stock.post_dataloading_process(
            input_dict, labels, model_parts
        )
        others.pop(DOCUMENT_IDS, None)
        others["attention_masks"] = key
        return tokens, labels, others


class KeptAttentionAlone:
    """torchtitan's activation checkpointing that keeps the output of core attention and computes all else again."""

    def get_save_ops(self) -> set[Any]:
        """Return the operators whose outputs are kept."""
        return _KEPT


class KeptAttention:
    """torchtitan's activation checkpointing by operator that keeps the output of core attention."""

    def get_save_ops(self) -> set[Any]:
        """Return the operators whose outputs are kept."""
        return super().get_save_ops() | _KEPT  # type: ignore[misc]
