"""A data loader to plan for in tests."""

from collections.abc import Iterator
from typing import Any

import torch

from torchtitan_cad.integration.titan022.cpu import enable_cpu

enable_cpu()

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402

EOS = 9
CPU = torch.device("cpu")


class CountingLoader(BaseDataLoader):
    """Batches whose tokens all equal their number; optionally fails at one."""

    def __init__(self, num_batches: int, fails_at: int | None = None, extra: dict[str, torch.Tensor] | None = None):
        self.num_batches, self.fails_at, self.extra = num_batches, fails_at, extra or {}
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        while self.next < self.num_batches:
            if self.next == self.fails_at:
                raise OSError("disk on fire")
            tokens = torch.full((4, 8), self.next)
            self.next += 1
            yield {"input": tokens, **self.extra}, tokens

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.next = state_dict["next"]
