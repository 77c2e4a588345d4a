# SPDX-License-Identifier: BSD-3-Clause
"""Batches of torchtitan's validation, as many on every rank of a CAD group."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan.config import JobConfig
from torchtitan.tools.logging import logger

from torchtitan_cad.integration.loading.batch_planner import Exhausted
from torchtitan_cad.integration.loading.loader import (
    PLAN_KEYS,
    Loader,
)
from torchtitan_cad.integration.loading.redistribution import Batch
from torchtitan_cad.integration.run_state import run_state
from torchtitan_cad.integration.session import CadSession, current_session


def plan_validation(validator: Any, config: JobConfig) -> None:
    """Make torchtitan's ``validator`` draw its batches through a ``ValidationLoader``; others plan as they compute."""
    loader = getattr(validator, "validation_dataloader", None)
    if loader is not None:
        validator.validation_dataloader = ValidationLoader(
            loader, config, current_session()
        )


@dataclass(eq=False)
class ValidationLoader:
    """Plans the batches of ``inner`` and, with ``validation.steps = -1``, ends on all ranks with the first to end.

    torchtitan 0.2.2 then waits for ranks that have no more, and finds no data the second time: here every validation
    begins with the first batch. A last batch that the job cannot run is left out.
    """

    inner: Loader
    config: JobConfig
    session: CadSession

    def __post_init__(self) -> None:
        dataset: Any = getattr(self.inner, "dataset", None)
        self._is_whole_set = self.config.validation.steps == -1
        starts_over = self._is_whole_set and hasattr(dataset, "load_state_dict")
        self._first = copy.deepcopy(dataset.state_dict()) if starts_over else None

    def __iter__(self) -> Iterator[Batch]:
        planner = self.session.validation
        handed_out = 0
        if self._first is not None:
            loader: Any = self.inner
            loader.dataset.load_state_dict(copy.deepcopy(self._first))
            loader._iterator = None  # ends persistent workers, whose copies of the data set are at its end
        with planner.announced_failure("loading a batch"):
            batches = iter(self.inner)
        try:
            while self._is_whole_set or handed_out < self.config.validation.steps:
                with planner.announced_failure("loading a batch"):
                    batch = next(batches, None)
                if batch is None or not self._fits(len(batch[1])):
                    planner.announce_exhausted()
                inputs, labels = batch
                yield {**inputs, PLAN_KEYS: self.session.plan_now(inputs)}, labels
                handed_out += 1
            # torchtitan draws one more and does not use it; the next validation begins behind it
            self._draw_one_more(batches)
        except Exhausted as end:
            self._explain(end.args, handed_out)

    def _draw_one_more(self, batches: Iterator[Batch]) -> None:
        try:
            next(batches, None)
        except Exception as error:
            # not announced: peers come to the next gather with the next validation
            run_state().own_error = error
            raise

    def _fits(self, rows: int) -> bool:
        """Tell whether the job can run a batch of that many rows, which may be the rest of a data set."""
        parallelism = self.config.parallelism
        wanted = self.config.validation.local_batch_size
        # buffers between stages have one size, and tensor parallelism does not allow halves of a row
        in_pipeline = parallelism.pipeline_parallel_degree > 1
        has_tp = parallelism.tensor_parallel_degree > 1
        is_cut = has_tp and self.config.cad.nano_batches == 2 and rows % 2 == 1
        fits = rows == wanted or not (in_pipeline or is_cut)
        if not fits:
            logger.warning(
                f"validation leaves out the last {rows} rows of this rank: with validation.local_batch_size = {wanted} "
                "this job cannot run as few; set it to a divisor of the rows that each rank has"
            )
        return fits

    def _explain(self, ended: tuple[int, ...], batches: int) -> None:
        """Say if ranks had more batches; raise ValueError if one had none."""
        ranks = f"rank{'s' if len(ended) > 1 else ''} {', '.join(map(str, ended))}"
        name = self.config.validation.dataset
        if not batches:
            raise ValueError(
                f"validation.dataset = {name!r} has no batch for {ranks}; set a larger one, or "
                "validation.local_batch_size or validation.seq_len lower"
            )
        if len(ended) < len(self.session.ranks) and self.session.group_rank == 0:
            logger.warning(
                f"validation.steps = {self.config.validation.steps} ends after {batches} batches, with the data of "
                f"{ranks}: other ranks have more of validation.dataset = {name!r}; set it to {batches} or less, or let "
                "all have as many"
            )
