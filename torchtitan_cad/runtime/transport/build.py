# SPDX-License-Identifier: BSD-3-Clause
"""Choose and build the transport of a CAD group: the one that the user names, or the best that works."""

import contextlib
import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from torchtitan_cad.planning.exchange import messages
from torchtitan_cad.planning.exchange.messages import BUFFERS_PER_CALL
from torchtitan_cad.runtime.transport.base import (
    NearRanks,
    Transport,
    all_to_all,
    gather,
)
from torchtitan_cad.runtime.transport.collective import CollectiveTransport
from torchtitan_cad.runtime.transport.far import FarRanks, transfer_over
from torchtitan_cad.runtime.transport.symmetric import SymmetricTransport
from torchtitan_cad.runtime.triton.nvshmem_library import find_device_library

if TYPE_CHECKING:
    from torchtitan_cad.runtime.transport.cuda_memory import DeviceMemory

TRANSPORTS = ("auto", "symm_mem", "collective", "nvshmem")
_PROBE_TIMEOUT_S = 20.0
_START_TIMEOUT_S = 120.0
"""seconds: NVSHMEM's own start waits for all ranks of the job without a bound"""
_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


class _Unavailable(Exception):
    """The reason why there is no symmetric memory, the same on all ranks of the group."""


@dataclass(frozen=True)
class _Request:
    """Arguments of ``build_transport``."""

    group: dist.ProcessGroup
    agreement: dist.ProcessGroup
    device: torch.device
    buffer_bytes: int
    hosts: Sequence[int]
    calls_in_flight: int


def build_transport(
    name: str,
    group: dist.ProcessGroup,
    device: torch.device,
    buffer_bytes: int | None = None,
    *,
    agreement: dist.ProcessGroup | None = None,
    hosts: Sequence[int] | None = None,
    calls_in_flight: int = 2,
) -> Transport:
    """Build the transport called ``name`` over ``group``; all ranks of the group must call it together.

    ``auto`` is symmetric memory on CUDA if a small exchange with it succeeds on all ranks, otherwise the collective
    transport. The choice and its reason are logged.

    Args:
        buffer_bytes: size of a receive buffer, by default that of ``messages.buffer_bytes``.
        agreement: gloo group of the same ranks, over which they agree. By default ``group``, for which NCCL then
            creates a communicator.
        hosts: number of every rank's host; by default they share one.
        calls_in_flight: maximum number of core attentions in flight, each with its own receive buffers.

    Raises:
        ValueError: the transport is unknown or unavailable; names the key ``cad.transport``.
    """
    if buffer_bytes is None:
        buffer_bytes = messages.buffer_bytes(nano_batches=calls_in_flight)
    request = _Request(
        group,
        agreement or group,
        device,
        buffer_bytes,
        hosts=hosts or [0] * group.size(),
        calls_in_flight=calls_in_flight,
    )
    build = _over_nvshmem if name == "nvshmem" else _symmetric
    transport, reason = _choose(name, device, lambda: build(request))
    if name == "auto":
        passed = "symm_mem, which passed its trial on all ranks of the group"
        choice = f"collective; {reason}" if reason else passed
        _logger.info(f"cad.transport = 'auto': {choice}")
    return transport or CollectiveTransport(group, buffer_bytes)


def expected_transport(
    name: str, device: torch.device, num_hosts: int
) -> tuple[str, str]:
    """Predict, in one process, the choice of ``build_transport`` over ``num_hosts`` hosts, and return its reason, too.

    Raises:
        ValueError: the transport is unknown or unavailable; names the key ``cad.transport``.
    """
    _, reason = _choose(name, device, lambda: _agree(lambda: _check(name, device)))
    if reason:
        return "collective", reason
    if name == "nvshmem":
        return name, "as set; where NVSHMEM cannot start, it ends the process"
    chosen = "symm_mem"
    if num_hosts > 1:
        chosen += f" inside {num_hosts} hosts, send and receive between them"
    return chosen, "decided at start by a trial on all ranks of the group"


def _choose(
    name: str, device: torch.device, attempt: Callable[[], _T]
) -> tuple[_T | None, str]:
    """Return the result of ``attempt`` at symmetric memory; or None and the reason for the collective transport."""
    if name not in TRANSPORTS:
        raise ValueError(
            f"cad.transport = {name!r}: set cad.transport to one of {', '.join(TRANSPORTS)}"
        )
    if name == "collective":
        return None, "as set"
    if name == "auto" and device.type == "cpu":
        return None, "not symm_mem: it needs CUDA devices"
    try:
        return attempt(), ""
    except _Unavailable as error:
        if name == "auto":
            return None, f"not symm_mem: {error}"
        raise ValueError(
            f"cad.transport = {name!r} does not work here: {error}; set cad.transport to 'auto' or 'collective'"
        ) from error


def _symmetric(request: _Request) -> SymmetricTransport:
    """Build the transport over memory of near ranks, and messages to far ones; raises _Unavailable on all ranks."""
    group = request.group
    agreement = request.agreement
    device = request.device
    _agree(lambda: None, agreement)  # ranks that start late have more time for it
    near = _agree(lambda: _near_ranks(request), agreement)
    _agree(lambda: _check("symm_mem", device), agreement)
    far = None
    description = "symm_mem"
    num_hosts = len(set(request.hosts))
    if num_hosts > 1:
        ranks = dist.get_process_group_ranks(group)
        far = FarRanks(group.rank(), near.ranks, ranks, transfer_over(group), device)
        backend = group._get_backend(device).name()
        description += f" inside {num_hosts} hosts, {backend} between them"

    def allocate(num_bytes: int) -> "DeviceMemory":
        memory = _memory_class()
        own = _agree(lambda: memory.reserve(num_bytes, device), agreement)
        return _agree(lambda: memory.share(own, near), agreement)

    return _tried_out(request, allocate, far, description)


def _memory_class() -> "type[DeviceMemory]":
    """Return the class of symmetric memory, whose module needs triton. (Tests have another, of CPU ranks.)"""
    from torchtitan_cad.runtime.transport.cuda_memory import DeviceMemory

    return DeviceMemory


def _near_ranks(request: _Request) -> NearRanks:
    """Return the ranks of this host, with a process group of their own.

    They have one whatever the hosts and whatever follows, and for good: torch names groups by how many a rank has made
    (2.15) or has (before), and other CAD groups of the job may have other hosts.
    """
    group = request.group
    hosts = request.hosts
    near = [rank for rank, host in enumerate(hosts) if host == hosts[group.rank()]]
    ranks = dist.get_process_group_ranks(group)
    of_host = dist.new_group(
        [ranks[rank] for rank in near],
        timedelta(seconds=_START_TIMEOUT_S),
        backend="gloo",
        use_local_synchronization=True,
    )
    return NearRanks(of_host, near, len(hosts))


def _over_nvshmem(request: _Request) -> SymmetricTransport:
    """Build the transport over NVSHMEM's memory; raises _Unavailable on all ranks of the job, which allocate together.

    Every wait on the way has a bound; where NVSHMEM cannot start, it ends the process.
    """
    device = request.device
    buffer_bytes = request.buffer_bytes
    world = dist.group.WORLD
    _agree(lambda: _check("nvshmem", device), world)
    from torchtitan_cad.runtime.transport.nvshmem import NodesMemory

    def allocate(num_bytes: int) -> "DeviceMemory":
        with _ends_unless_started_in(_START_TIMEOUT_S):
            own = _agree(
                lambda: NodesMemory.reserve_for(num_bytes, buffer_bytes, device), world
            )
        return _agree(
            lambda: NodesMemory.share_with(own, request.group, buffer_bytes), world
        )

    num_hosts = len(set(request.hosts))
    return _tried_out(request, allocate, None, f"NVSHMEM between {num_hosts} hosts")


@contextlib.contextmanager
def _ends_unless_started_in(seconds: float) -> Iterator[None]:
    """End the process, with a line in the log, unless this context ends in time: NVSHMEM's start has no bound."""

    def end() -> None:
        _logger.error(
            f"cad.transport = 'nvshmem': NVSHMEM has not started for {seconds:.0f} s; set cad.transport to 'auto'"
        )
        logging.shutdown()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _tried_out(
    request: _Request,
    allocate: "Callable[[int], DeviceMemory]",
    far: FarRanks | None,
    description: str,
) -> SymmetricTransport:
    """Build a transport, and try it out on all ranks of the group; raises _Unavailable on all of them if it fails."""
    group = request.group
    device = request.device

    def build() -> SymmetricTransport:
        return SymmetricTransport(
            dist.get_process_group_ranks(group),
            group.rank(),
            allocate,
            lambda: _PROBE_TIMEOUT_S,
            request.buffer_bytes,
            far=far,
            calls_in_flight=request.calls_in_flight,
        )

    transport = _agree(build, request.agreement)
    host = np.array(request.hosts)
    is_near = host[:, None] == host
    is_other = ~np.eye(len(host), dtype=bool)
    trials = [is_other]
    if not is_near.all():
        # Inside hosts first: a rank that fails there leaves no other waiting for messages, which have no such bound.
        trials.insert(0, is_near & is_other)
    for sends in trials:
        _agree(partial(_try_out, transport, request, sends), request.agreement)
    transport.description = description
    backend = group._get_backend(device)
    transport.timeout_s = lambda: backend.options._timeout.total_seconds()
    return transport


def _check(name: str, device: torch.device) -> None:
    """Raise RuntimeError naming what a transport lacks here, as far as this rank alone can tell."""
    if device.type != "cuda":
        raise RuntimeError(f"it needs CUDA devices, these are {device.type}")
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError("its kernels need the package triton")
    if name == "nvshmem":
        if not symm_mem.is_nvshmem_available():
            raise RuntimeError("this build of torch has no NVSHMEM")
        has_device = torch.cuda.is_available()
        capability = torch.cuda.get_device_capability(device) if has_device else None
        find_device_library(capability)
    elif (backend := symm_mem.get_backend(device)) not in (None, "CUDA"):
        raise RuntimeError(
            f"torch's symmetric memory has the backend {backend}, and a process has one; inside a host CUDA is "
            "needed: unset the environment variable TORCH_SYMMMEM, or do without what else sets that backend, such "
            "as set_symm_mem_for_comm of FSDP2"
        )


def _try_out(transport: Transport, request: _Request, sends: np.ndarray) -> None:
    """Exchange rows until every buffer was used twice; raises RuntimeError if a row is wrong.

    Args:
        sends: bool [ranks, ranks] whether the first sends a row to the second; symmetric.
    """
    rank = request.group.rank()
    calls_in_flight = request.calls_in_flight
    peers = np.flatnonzero(sends[rank]).tolist()
    wrong = ""
    for number in range(1, 2 * calls_in_flight * BUFFERS_PER_CALL + 1):
        buffer = number // calls_in_flight % BUFFERS_PER_CALL
        routes = all_to_all(rank, sends, 1, buffer)
        rows = torch.full(
            (len(peers), 4),
            1000 * number + rank,
            dtype=torch.int32,
            device=request.device,
        )
        pending = transport.start([[rows]], routes, "trial", transport.begin())
        received = pending.wait()[0].view(torch.int32)[:, 0].tolist()
        pending.release()
        wanted = [1000 * number + peer for peer in peers]
        if received != wanted and not wrong:
            wrong = f"a trial brought {received} instead of {wanted}"  # goes on, so that no peer waits
    transport.prepare(())  # raises PeerError if a peer was late
    if wrong:
        raise RuntimeError(wrong)


def _agree(act: Callable[[], _T], group: dist.ProcessGroup | None = None) -> _T:
    """Return the result of ``act`` if it succeeds on all ranks of a group; otherwise all ranks raise _Unavailable."""
    results = []
    failure = ""
    try:
        results.append(act())
    except _Unavailable:  # on all ranks, from an agreement inside
        raise
    except Exception as error:  # compilers and drivers have exceptions of their own; peers wait in the gather below
        kind = type(error).__name__
        said = str(error) or kind
        failure = said if isinstance(error, RuntimeError) else f"{kind}: {said}"
        failure = " ".join(failure.split())[:300]
    if group is not None:
        for rank, reason in gather(failure, group).items():
            if reason:
                raise _Unavailable(f"{reason} (rank {rank})")
    if failure:
        raise _Unavailable(failure)
    return results[0]
