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
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial

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
        self._threads: list[threading.Thread] = []
        """Each answers a rank."""
        self._num_tasks = 0
        self._busy_s = 0.0
        self._report_due = time.monotonic() + REPORT_S

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
            found = self._find_job()
            if found is None:
                self._leaving.wait(RETRY_S)
                continue
            try:
                self._serve_job(*found)
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

    def _find_job(self) -> tuple[Registry, JobCard] | None:
        """Return the job at the endpoint; None if there is none yet."""
        host, port = self._endpoint
        timeout = timedelta(seconds=_STORE_TIMEOUT_S)
        try:
            socket.create_connection(self._endpoint, RETRY_S).close()
            store = dist.TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=timeout
            )
            registry = Registry(store, self._token)
            job = registry.job()
        except (OSError, RuntimeError):
            return None
        return None if job is None else (registry, job)

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
            answer = partial(self._answer_rank, job.job, kernel, dtype)
            reason = self._serve_ranks(registry, job.job, card.number, answer)
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
            self._busy_s += time.monotonic() - begin
            self._num_tasks += len(request.args.cu_q_host) - 1
        return results

    # Ranks ------------------------------------------------------------------------------------------------------------

    def _serve_ranks(
        self,
        registry: Registry,
        job: int,
        number: int,
        answer: Callable[[dist.Store], None],
    ) -> str | None:
        """Answer ranks until the job ends or this server leaves; if it is struck off before, return the reason.

        Args:
            number: of this registration.
            answer: answers one rank until it has no more requests.
        """
        num_invited = 0
        while not self._leaving.wait(POLL_S):
            for store in registry.invitations(job, number, num_invited):
                num_invited += 1
                thread = threading.Thread(target=answer, args=(store,), daemon=True)
                thread.start()
                self._threads.append(thread)
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._report()
            reason = registry.reason_gone(job, number)
            if reason is not None:
                return reason
            current = registry.job()
            if current is not None and current.job != job:
                return None
        registry.strike(job, number, "it leaves")
        deadline = time.monotonic() + _LEAVE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return None

    def _report(self) -> None:
        """Log what was computed so far, once a minute."""
        if time.monotonic() < self._report_due:
            return
        self._report_due = time.monotonic() + REPORT_S
        logger.info(
            f"{self._num_tasks} tasks so far in {self._busy_s:.0f} s, now for {len(self._threads)} ranks"
        )

    def _answer_rank(
        self, job: int, kernel: AttentionKernel, dtype: torch.dtype, store: dist.Store
    ) -> None:
        """Answer a rank until it has no more requests."""
        try:
            connection = Connection(
                store,
                job,
                is_server=True,
                timeout_s=_CONNECT_S,
                pinned=self.device.type == "cuda",
            )
            while (message := connection.receive(_IDLE_S)).kind != END:
                connection.send(self._answer(kernel, dtype, message), _SEND_S)
        except WireError as error:
            logger.info(f"a connection to a rank has ended: {error}")

    def _answer(
        self, kernel: AttentionKernel, dtype: torch.dtype, message: ServerMessage
    ) -> ServerMessage:
        if message.kind == ECHO:
            return message
        try:
            if message.kind != ASK:
                raise ValueError(f"a message of kind {message.kind}: send a request")
            request = Request.of(message, dtype, self.device)
            results = self.compute(kernel, request)
        except Exception as error:  # the rank computes it itself, whatever is wrong
            reason = f"{type(error).__name__}: {first_sentence(error)}"
            logger.warning(f"refuses a request: {reason}")
            return ServerMessage(REFUSAL, message.number, {"reason": reason})
        return ServerMessage(ANSWER, message.number, {}, results)
