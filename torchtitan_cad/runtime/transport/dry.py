"""Transport of a dry run, in which one process plays a rank of a larger job: nothing travels."""

from collections.abc import Sequence

from torch import Tensor

from torchtitan_cad.runtime.packing import RowFormat
from torchtitan_cad.runtime.transport.base import Pending, Routes


class _DryPending:
    def __init__(self, received: list[Tensor]) -> None:
        self._received = received

    def wait(self) -> list[Tensor]:
        return self._received

    def release(self) -> None:
        pass

    def take(self) -> list[Tensor]:
        return self._received


class DryTransport:
    """Rows of zeros come from every peer, as many as the plan says.

    (A fake process group is no help: its ``all_to_all_single`` refuses to send no rows where others come.)
    """

    name = "dry run"
    replayable = False

    def __init__(self, buffer_bytes: int) -> None:
        self.buffer_bytes = buffer_bytes

    def prepare(self, exchanges: Sequence[Routes]) -> None:
        pass

    def begin(self) -> int:
        return 0

    def start(self, messages: Sequence[Sequence[Tensor]], routes: Routes, phase: str, call: int) -> Pending:
        packed = [RowFormat(parts).pack(parts, route.rows) for parts, route in zip(messages, routes, strict=True)]
        return _DryPending(
            [sent.new_zeros(route.num_received, sent.shape[1]) for sent, route in zip(packed, routes, strict=True)]
        )
