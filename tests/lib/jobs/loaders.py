# SPDX-License-Identifier: BSD-3-Clause
"""A data loader to plan for in tests."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu

enable_cpu()

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402

EOS = 9
CPU = torch.device("cpu")


def gloo_group(
    store: dist.Store, rank: int, size: int, timeout_s: float
) -> dist.ProcessGroup:
    """A gloo group of threads, this one of which is ``rank``; blocks until all have come."""
    gloo: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


class CountingLoader(BaseDataLoader):
    """Batches whose tokens all equal their number; optionally fails at one, or has documents that depend on it."""

    documents: Callable[[int], torch.Tensor] | None = None

    def __init__(
        self,
        num_batches: int,
        fails_at: int | None = None,
        extra: dict[str, torch.Tensor] | None = None,
    ):
        self.num_batches, self.fails_at, self.extra = num_batches, fails_at, extra or {}
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        while self.next < self.num_batches:
            if self.next == self.fails_at:
                raise OSError("disk on fire")
            tokens = torch.full((4, 8), self.next)
            if self.documents is not None:
                self.extra["document_ids"] = self.documents(self.next)
            self.next += 1
            yield {"input": tokens, **self.extra}, tokens

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.next = state_dict["next"]
