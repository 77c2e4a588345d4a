# SPDX-License-Identifier: BSD-3-Clause
"""A joined server: it finds a job, announces itself, and computes what ranks ask for until it is told to end.

One thread answers each rank; kernels run one at a time. The server keeps nothing between two requests.
"""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_cad.planning import TileAreaCost
from torchtitan_cad.runtime.errors import first_sentence
from torchtitan_cad.runtime.kernels.base import AttentionKernel
from torchtitan_cad.runtime.kernels.select import get_kernel
from torchtitan_cad.runtime.rates import attention_seconds
from torchtitan_cad.runtime.servers.registry import (
    JobCard,
    Registry,
    ServerCard,
    digest_of,
)
from torchtitan_cad.runtime.servers.request import Request
from torchtitan_cad.runtime.servers.wire import (
    ANSWER,
    ASK,
    ECHO,
    END,
    REFUSAL,
    Connection,
    ServerMessage,
    WireError,
)

logger = logging.getLogger(__name__)

POLL_S = 0.1
RETRY_S = 1.0
MOST_PAUSE_S = 60.0
"""A server that is struck off again and again joins after twice the pause each time, up to this many seconds."""
REPORT_S = 60.0
_STORE_TIMEOUT_S = 10.0
_CONNECT_S = 5.0
_SEND_S = 60.0
_IDLE_S = 7 * 24 * 3600.0
"""seconds that a connection may be silent; the end of its rank closes it"""
_LEAVE_S = 10.0
"""seconds in which ranks plan without a server that leaves"""


@dataclass
class ServedWork:
    """What a server has computed since the last report."""

    tasks: int = 0
    busy_s: float = 0.0
    num_bytes: int = 0

    def add(self, request: Request, seconds: float) -> None:
        """Count a request."""
        self.tasks += len(request.args.cu_q_host) - 1
        self.busy_s += seconds
        self.num_bytes += sum(x.nbytes for x in request.rows)


class AttentionServer:
    """Serves the job at an endpoint, and the next one there when it ends.

    Args:
        host, port: of the key-value store that the job's rank 0 hosts.
        token: that the job has logged.
        device: on which tasks are computed.
        kernel: value of ``cad.kernel``.
        version: of torchtitan_cad.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        device: torch.device,
        kernel: str,
        *,
        version: str,
    ) -> None:
        self._endpoint = (host, port)
        self._token = token
        self._version = version
        self.device = device
        self._kernel_name = kernel
        self._leaving = threading.Event()
        self._compute_lock = threading.Lock()
        self._work_lock = threading.Lock()
        self._work = ServedWork()
        self._reported = time.monotonic()

    def leave(self) -> None:
        """End when the tasks under way are done; may be called by a signal handler."""
        self._leaving.set()

    def run_in_thread(self) -> None:
        """Do as ``run``, but end soon after ``leave`` even if a store that does not answer holds the thread."""
        end = Future[None]()

        def run() -> None:
            try:
                self.run()
                end.set_result(None)
            except Exception as error:
                end.set_exception(error)
            self.leave()

        threading.Thread(target=run, daemon=True).start()
        self._leaving.wait()
        with contextlib.suppress(TimeoutError):
            end.result(_LEAVE_S + RETRY_S)

    def run(self) -> None:
        """Serve until ``leave`` is called.

        Raises:
            ValueError: the job has another token, or runs another version; names what to do.
        """
        waiting = f"waiting for a job at {self._name_of_endpoint}"
        logger.info(waiting)
        while not self._leaving.wait(POLL_S):
            registry = self._find_registry()
            card = None if registry is None else self._find_job(registry)
            if registry is None or card is None:
                self._leaving.wait(RETRY_S)
                continue
            try:
                self._serve_job(registry, card)
            except RuntimeError as error:
                logger.info(
                    f"the job or the link to it has ended: {first_sentence(error)}"
                )
                self._leaving.wait(RETRY_S)
            logger.info(waiting)

    @property
    def _name_of_endpoint(self) -> str:
        host, port = self._endpoint
        return f"{host}:{port}"

    def _find_registry(self) -> Registry | None:
        try:
            socket.create_connection(self._endpoint, RETRY_S).close()
            timeout = timedelta(seconds=_STORE_TIMEOUT_S)
            host, port = self._endpoint
            store = dist.TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=timeout
            )
        except (OSError, RuntimeError):
            return None
        return Registry(store, self._token)

    def _find_job(self, registry: Registry) -> JobCard | None:
        try:
            return registry.job()
        except RuntimeError:  # the store has just ended
            return None

    # A job ------------------------------------------------------------------------------------------------------------

    def _serve_job(self, registry: Registry, job: JobCard) -> None:
        self._check(job)
        shape = job.attention_shape
        dtype = getattr(torch, job.dtype)
        kernel = get_kernel(self._kernel_name, self.device, shape, None)
        if kernel.squares_only and self._kernel_name == "auto":
            kernel = get_kernel("varlen", self.device, shape, None)
        kernel.check(dtype, shape.head_dim, shape.out_dim, shape.window)
        if kernel.squares_only:
            raise ValueError(
                f"--kernel {kernel.name}: it takes causal tasks of as many keys as queries only, and servers get "
                "others; set --kernel varlen"
            )
        seconds = attention_seconds(kernel, shape, dtype, self.device, TileAreaCost())
        place = f"{socket.gethostname()}, pid {os.getpid()}"
        pause_s = 0.0
        while not self._leaving.wait(pause_s):
            card = registry.announce(job.job, place, kernel.name, seconds)
            logger.info(
                f"joined a job of {job.ranks} ranks as {card.name}: kernel {kernel.name} on {self.device}, "
                f"{1e6 * seconds:.3g} us a tile of 128 x 128 forward and backward"
            )
            registration = _Registration(self, registry, job, card, kernel, dtype)
            reason = registration.serve(self._leaving)
            if reason is None:
                return
            pause_s = min(MOST_PAUSE_S, max(RETRY_S, 2 * pause_s))
            logger.warning(f"{reason}; joining again in {pause_s:.0f} s")

    def _check(self, job: JobCard) -> None:
        if job.version != self._version:
            raise ValueError(
                f"the job at {self._name_of_endpoint} runs torchtitan_cad {job.version}, this server {self._version}: "
                "install the same version"
            )
        if job.digest != digest_of(self._token, job.job):
            raise ValueError(
                f"--token is not that of the job at {self._name_of_endpoint}: give the one in the job's first log lines"
            )

    def compute(self, kernel: AttentionKernel, request: Request) -> list[Tensor]:
        """Return the results of a request on the host."""
        with self._compute_lock:
            begin = time.monotonic()
            with torch.no_grad():
                results = [x.cpu() for x in request.compute(kernel)]
            seconds = time.monotonic() - begin
        with self._work_lock:
            self._work.add(request, seconds)
        return results

    def report(self, *, ranks: int) -> None:
        """Log what was computed, once a minute."""
        elapsed = time.monotonic() - self._reported
        if elapsed < REPORT_S:
            return
        with self._work_lock:
            work = self._work
            self._work = ServedWork()
        self._reported = time.monotonic()
        logger.info(
            f"{work.tasks} tasks for {ranks} ranks in {elapsed:.0f} s, {1e-6 * work.num_bytes:.0f} MB received, "
            f"busy {100 * work.busy_s / elapsed:.0f} % of the time"
        )


class _Registration:
    """One registration of a server in a job, until it ends or is struck off."""

    def __init__(
        self,
        server: AttentionServer,
        registry: Registry,
        job: JobCard,
        card: ServerCard,
        kernel: AttentionKernel,
        dtype: torch.dtype,
    ) -> None:
        self._server = server
        self._registry = registry
        self._job = job
        self._card = card
        self._kernel = kernel
        self._dtype = dtype
        self._threads: list[threading.Thread] = []

    def serve(self, leaving: threading.Event) -> str | None:
        """Answer ranks until the server leaves, or is struck off: then return the reason."""
        number = self._card.number
        job = self._job.job
        num_invited = 0
        while not leaving.wait(POLL_S):
            for store in self._registry.invitations(job, number, num_invited):
                num_invited += 1
                self._start(store)
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._server.report(ranks=len(self._threads))
            reason = self._registry.reason_gone(job, number)
            if reason is not None:
                return reason
            current = self._registry.job()
            if current is not None and current.job != job:
                return None
        self._registry.strike(job, number, "it leaves")
        self._wait_for_ranks()
        return None

    def _wait_for_ranks(self) -> None:
        deadline = time.monotonic() + _LEAVE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start(self, store: dist.Store) -> None:
        name = "answers a rank"
        thread = threading.Thread(
            target=self._answer_rank, args=(store,), name=name, daemon=True
        )
        thread.start()
        self._threads.append(thread)

    def _answer_rank(self, store: dist.Store) -> None:
        try:
            connection = Connection(
                store,
                self._job.job,
                is_server=True,
                timeout_s=_CONNECT_S,
                pinned=self._server.device.type == "cuda",
            )
            for message in _requests(connection):
                connection.send(self._answer(message), _SEND_S)
        except WireError as error:
            logger.info(f"a connection to a rank has ended: {error}")

    def _answer(self, message: ServerMessage) -> ServerMessage:
        if message.kind == ECHO:
            return message
        try:
            if message.kind != ASK:
                raise ValueError(f"a message of kind {message.kind}: send a request")
            request = Request.of(message, self._dtype, self._server.device)
            results = self._server.compute(self._kernel, request)
        except Exception as error:  # the rank computes it itself, whatever is wrong
            reason = f"{type(error).__name__}: {first_sentence(error)}"
            logger.warning(f"refuses a request: {reason}")
            return ServerMessage(REFUSAL, message.number, {"reason": reason})
        return ServerMessage(ANSWER, message.number, {}, results)


def _requests(connection: Connection) -> Iterator[ServerMessage]:
    """Yield messages until the rank has no more."""
    while (message := connection.receive(_IDLE_S)).kind != END:
        yield message
