"""Transport of a dry run, in which one process plays a rank of a larger job: nothing travels."""

from collections.abc import Sequence

from torch import Tensor

from torchtitan_cad.runtime.packing import RowFormat
from torchtitan_cad.runtime.transport.base import Pending, Route


class _DryPending:
    def __init__(self, received: Tensor) -> None:
        self._received = received

    def wait(self) -> Tensor:
        return self._received

    def release(self) -> None:
        pass

    def take(self) -> Tensor:
        return self._received


class DryTransport:
    """Rows of zeros come from every peer, as many as the plan says.

    (A fake process group is no help: its ``all_to_all_single`` refuses to send no rows where others come.)
    """

    name = "dry run"
    replayable = False

    def prepare(self, routes: Sequence[Route]) -> None:
        pass

    def begin(self, *num_bytes: int) -> int:
        return 0

    def start(self, parts: Sequence[Tensor], route: Route, phase: str, call: int) -> Pending:
        message = RowFormat(parts).pack(parts, route.rows)
        return _DryPending(message.new_zeros(route.num_received, message.shape[1]))
