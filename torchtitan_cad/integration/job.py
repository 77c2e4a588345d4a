# SPDX-License-Identifier: BSD-3-Clause
"""A job as CAD sees it, whatever the training framework's config looks like."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchtitan_cad.integration.config import Cad
from torchtitan_cad.integration.loading.documents import DocumentRule
from torchtitan_cad.integration.topology import Topology
from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.planning.model.work import attention_flops


@dataclass(frozen=True)
class Job:
    """The numbers and names that CAD needs of a job.

    Attributes:
        cad: the ``[cad]`` table.
        topology: degrees of parallelism.
        kinds: of the model's attention, with the heads of this rank and bytes per element of the tensors that travel;
            "full" first where the model has it.
        dtype: of queries, keys and values.
        experts_per_token: experts of a layer that a token passes through.
        device: of this rank.
        documents: how they are told apart.
        row_tokens: of one row, over all context-parallel ranks.
        rows: of a batch of this rank's data-parallel coordinate.
        microbatches: of a batch in a pipeline; 1 without one.
        accumulation: batches per optimizer step.
        checkpoints: whether the loader's state is saved.
        deterministic: whether equal jobs must compute equal bits, so that nothing may depend on how long things take.
        start_timeout_s, step_timeout_s: bounds of a collective before and after the first step.
    """

    cad: Cad
    topology: Topology
    kinds: tuple[AttentionKind, ...]
    dtype: torch.dtype
    experts_per_token: int
    device: torch.device
    documents: DocumentRule
    row_tokens: int
    rows: int
    microbatches: int
    accumulation: int
    checkpoints: bool
    deterministic: bool
    start_timeout_s: float
    step_timeout_s: float

    def flops_beside_rows(self, pairs: Sequence[float]) -> float:
        """Return the model FLOPs of a token's attention less those by which torchtitan counts it.

        Args:
            pairs: (query, key) pairs of the mean token in a layer of each kind; torchtitan takes a row's tokens.
        """
        beside = [of_kind - self.row_tokens for of_kind in pairs]
        return self.topology.tp * attention_flops(self.kinds, beside)

    @property
    def planning_timeout_s(self) -> float:
        """Bound of a gather of the planning thread, which waits for the slowest rank's training as well."""
        return self.start_timeout_s + self.step_timeout_s

    @property
    def shape(self) -> AttentionShape:
        """Heads of the first kind."""
        return self.kinds[0].shape
