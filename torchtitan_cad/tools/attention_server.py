# SPDX-License-Identifier: BSD-3-Clause
"""A joined server: it finds a job, announces itself, and computes what ranks ask for until it is told to end.

One thread answers each rank; kernels run one at a time. The server keeps nothing between two requests.
"""

import logging
import os
import socket
import threading
import time
from multiprocessing.pool import ThreadPool

import torch
import torch.distributed as dist

from torchtitan_cad import __version__
from torchtitan_cad.planning import TileAreaCost
from torchtitan_cad.runtime.errors import first_sentence
from torchtitan_cad.runtime.kernels.base import AttentionKernel
from torchtitan_cad.runtime.kernels.select import get_kernel
from torchtitan_cad.runtime.rates import attention_seconds
from torchtitan_cad.runtime.servers.registry import Registry, find_job, open_store
from torchtitan_cad.runtime.servers.request import Request
from torchtitan_cad.runtime.servers.wire import (
    SERVER,
    Connection,
    ServerMessage,
)

logger = logging.getLogger(__name__)

POLL_S = 0.1
RETRY_S = 1.0
REJOIN_S = 10.0
"""seconds after which a server that is struck off joins again"""
REPORT_S = 60.0
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
    """

    def __init__(self, host: str, port: int, token: str, device: torch.device) -> None:
        self._endpoint = (host, port)
        self._place = f"{host}:{port}"
        self._token = token
        self.device = device
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

    def run(self) -> None:
        """Serve until ``leave`` is called, and end soon after it even if a store does not answer.

        Raises:
            ValueError: the job has another token, or runs another version; names what to do.
        """
        # its thread is a daemon, which is not waited for
        with ThreadPool(1) as pool:
            running = pool.apply_async(self._run)
            while not running.ready() and not self._leaving.wait(POLL_S):
                pass
            running.wait(_LEAVE_S + RETRY_S)
            if running.ready():
                running.get()
        logger.info("ended")

    def _run(self) -> None:
        waiting = f"waiting for a job at {self._place}"
        logger.info(waiting)
        while not self._leaving.wait(RETRY_S):
            try:
                socket.create_connection(self._endpoint, RETRY_S).close()
                store = open_store(*self._endpoint, hosts=False)
                found = find_job(store)
            except (OSError, RuntimeError):  # nobody listens, answers or has a job
                continue
            try:
                self._serve_job(store, *found)
            except RuntimeError as error:
                logger.info(
                    f"the job or the link to it has ended: {first_sentence(error)}"
                )
            logger.info(waiting)

    # A job ------------------------------------------------------------------------------------------------------------

    def _serve_job(self, store: dist.TCPStore, job: int, version: str) -> None:
        if version != __version__:
            raise ValueError(
                f"the job at {self._place} runs torchtitan_cad {version}, this server {__version__}: install the "
                "same version"
            )
        registry = Registry(store, job, self._token)
        card = registry.card()
        if card is None:
            raise ValueError(
                f"--token is not that of the job at {self._place}: give the one in the job's first log lines"
            )
        shape = card.shape
        dtype = getattr(torch, card.dtype)
        kernel = get_kernel("auto", self.device, shape)
        if kernel.squares_only:  # tails of causal tasks have more keys than queries
            kernel = get_kernel("varlen", self.device, shape)
        kernel.check(dtype, shape)
        seconds = attention_seconds(
            kernel, shape, dtype, device=self.device, cost=TileAreaCost(card.cost_tile)
        )
        while not self._leaving.is_set():
            own = registry.announce(
                f"{socket.gethostname()}, pid {os.getpid()}", kernel.name, seconds
            )
            logger.info(
                f"joined the job as {own.name}: kernel {kernel.name} on {self.device}, {1e6 * seconds:.3g} us a tile, "
                "forward and backward"
            )
            reason = self._serve_ranks(registry, own.number, kernel)
            if reason:
                logger.warning(f"{reason}; joining again in {REJOIN_S:.0f} s")
                self._leaving.wait(REJOIN_S)

    def compute(self, kernel: AttentionKernel, request: Request) -> list[torch.Tensor]:
        """Return the results of a request on the host."""
        with self._compute_lock:
            begin = time.monotonic()
            results = [x.cpu() for x in request.compute(kernel)]
            self._busy_s += time.monotonic() - begin
            self._num_tasks += len(request.args.cu_q_host) - 1
        return results

    # Ranks ------------------------------------------------------------------------------------------------------------

    def _serve_ranks(
        self, registry: Registry, number: int, kernel: AttentionKernel
    ) -> str:
        """Answer ranks until this server leaves; if it is struck off before, return the reason.

        Args:
            number: of this registration.
        """
        num_invited = 0
        while not self._leaving.wait(POLL_S):
            for store in registry.invitations(number, num_invited):
                num_invited += 1
                thread = threading.Thread(
                    target=self._answer_rank,
                    args=(registry.job, kernel, store),
                    daemon=True,
                )
                thread.start()
                self._threads.append(thread)
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            if time.monotonic() >= self._report_due:
                self._report_due = time.monotonic() + REPORT_S
                logger.info(
                    f"{self._num_tasks} tasks so far in {self._busy_s:.0f} s, now for {len(self._threads)} ranks"
                )
            reason = registry.reason_gone(number)
            if reason:
                return reason
        registry.strike(number, "it leaves")
        deadline = time.monotonic() + _LEAVE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return ""

    def _answer_rank(
        self, job: int, kernel: AttentionKernel, store: dist.Store
    ) -> None:
        """Answer a rank until it hangs up."""
        try:
            connection = Connection(store, job, SERVER, timeout_s=_CONNECT_S)
            while True:
                message = connection.receive(_IDLE_S)
                if message.kind == "request":
                    message = self._answer(kernel, message)
                connection.send(message, _SEND_S)
        except RuntimeError as error:
            logger.info(f"a connection to a rank has ended: {first_sentence(error)}")

    def _answer(self, kernel: AttentionKernel, message: ServerMessage) -> ServerMessage:
        try:
            results = self.compute(kernel, Request.of(message, self.device))
        except Exception as error:  # the rank computes it itself, whatever is wrong
            reason = f"{type(error).__name__}: {first_sentence(error)}"
            logger.warning(f"refuses a request: {reason}")
            return ServerMessage("refusal", {"reason": reason})
        return ServerMessage("results", {}, results)
