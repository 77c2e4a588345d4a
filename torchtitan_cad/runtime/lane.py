"""A lane: work that runs in order beside the compute, a CUDA stream of its own or, on CPU, a thread."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

Work = Callable[[], tuple[Tensor, ...]]


class Lane:
    """Runs pieces of work one after another, each after what the caller had enqueued before ``start``."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = None if self.stream else ThreadPoolExecutor(1, "cad-lane")

    def start(self, work: Work, inputs: Sequence[Tensor]) -> "Pending":
        """Starts ``work``, which reads ``inputs`` and builds no autograd graph."""
        for tensor in inputs:
            if isinstance(tensor, AsyncCollectiveTensor):  # as DTensor hands out; threads must not share its first use
                tensor.trigger_wait()
        if self._thread is not None:
            return Pending(self._thread.submit(_without_graph, work))
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            done: Future[tuple[Tensor, ...]] = Future()
            done.set_result(_without_graph(work))
            event = self.stream.record_event()
        for tensor in inputs:
            tensor.record_stream(self.stream)
        return Pending(done, event)


class Pending:
    """Work under way."""

    def __init__(self, done: "Future[tuple[Tensor, ...]]", event: torch.cuda.Event | None = None) -> None:
        self._done, self._event = done, event

    def wait(self) -> tuple[Tensor, ...]:
        """The work's results, which the caller's stream may use from now on; raises what the work raised.

        Collectives in the work end by the timeout of their group, hence so does this.
        """
        results = self._done.result()
        if self._event is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self._event)
            for tensor in results:
                tensor.record_stream(stream)
        return results


def _without_graph(work: Work) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return work()
