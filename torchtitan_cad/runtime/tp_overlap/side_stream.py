# SPDX-License-Identifier: BSD-3-Clause
"""A side stream: work runs in order beside the compute, on a stream of its own or, on CPU, in a thread."""

import atexit
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from torchtitan_cad.runtime import streams

Work = Callable[[], tuple[Tensor, ...]]
_CLOSE_S = 2.0
_Done = Future[tuple[Tensor, ...]]
_Queue = queue.SimpleQueue[tuple[_Done, Work] | None]


class SideStream:
    """Runs pieces of work one after another, each after the work that the caller has enqueued before ``start``.

    On a device all calls must come from one stream. Because the next piece of work waits for that stream, memory that
    the work has allocated is not reused before that stream has finished with it.
    """

    def __init__(self, device: torch.device) -> None:
        # Above the default priority, as the compute waits for it.
        self._module = streams.module_of(device)
        self.stream = (
            None if self._module is None else self._module.Stream(device, priority=-1)
        )
        self._queue: _Queue = queue.SimpleQueue()
        # A daemon: a collective that never ends must not keep a failed process alive.
        self._thread = threading.Thread(
            target=_run_all, args=(self._queue,), name="cad-side-stream", daemon=True
        )
        if self.stream is None:
            self._thread.start()
            # a thread at work while the interpreter ends would abort the process
            atexit.register(self.close)

    def start(self, work: Work, inputs: Sequence[Tensor]) -> "PendingWork":
        """Start ``work``, which reads ``inputs`` and builds no autograd graph."""
        for tensor in inputs:
            # as DTensor hands out; threads must not share its first use
            if isinstance(tensor, AsyncCollectiveTensor):
                tensor.trigger_wait()
        module = self._module
        if module is None or self.stream is None:
            return PendingWork(self._submit(work))
        self.stream.wait_stream(module.current_stream())
        with module.stream(self.stream):
            done = _run(Future(), work)
            event = self.stream.record_event()
        return PendingWork(
            done, lambda: module.current_stream().wait_event(event), inputs
        )

    def close(self) -> None:
        """End the thread after the started work, and wait for its end for at most ``_CLOSE_S``."""
        if self.stream is None:
            atexit.unregister(self.close)
            self._queue.put(None)
            self._thread.join(_CLOSE_S)

    def _submit(self, work: Work) -> _Done:
        done: _Done = Future()
        self._queue.put((done, work))
        return done


class PendingWork:
    """Started work. It keeps its inputs alive, so that their memory is not reused before ``wait``."""

    def __init__(
        self,
        done: _Done,
        wait: Callable[[], None] | None = None,
        inputs: Sequence[Tensor] = (),
    ) -> None:
        self._done = done
        self._wait = wait
        self._inputs = inputs

    def wait(self) -> tuple[Tensor, ...]:
        """Wait, once, for the results, which the caller's stream may then use; raises the errors of the work.

        The wait is bounded, as collectives in the work end by the timeout of their group.
        """
        results = self._done.result()
        if self._wait is not None:
            self._wait()
        self._inputs = ()
        return results


def _run_all(works: _Queue) -> None:
    while item := works.get():
        _run(*item)
        del item  # so that no tensor stays alive while the thread waits for more


def _run(done: _Done, work: Work) -> _Done:
    try:
        with torch.no_grad():
            done.set_result(work())
    except BaseException as error:
        done.set_exception(error)
    return done
