# SPDX-License-Identifier: BSD-3-Clause
"""Choose and build the transport of a CAD group: the one that the user names, or the best that works."""

import importlib.util
import logging
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from torchtitan_cad.planning.exchange import messages
from torchtitan_cad.planning.exchange.messages import BUFFERS_PER_CALL
from torchtitan_cad.runtime.transport.base import Transport, all_to_all, gather
from torchtitan_cad.runtime.transport.collective import CollectiveTransport
from torchtitan_cad.runtime.transport.memory import CpuMemory
from torchtitan_cad.runtime.transport.symmetric import SymmetricTransport
from torchtitan_cad.runtime.triton.nvshmem_library import find_device_library

TRANSPORTS = ("auto", "symm_mem", "collective")
_PROBE_TIMEOUT_S = 20.0
_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


class _Unavailable(Exception):
    """The reason why there is no symmetric memory, the same on all ranks of the group."""


def build_transport(
    name: str,
    group: dist.ProcessGroup,
    device: torch.device,
    buffer_bytes: int | None = None,
    *,
    agreement: dist.ProcessGroup | None = None,
    calls_in_flight: int = 2,
    replayable: bool = False,
    sole_user: bool = True,
) -> Transport:
    """Build the transport called ``name`` over ``group``; all ranks of the group must call it together.

    ``auto`` is symmetric memory on CUDA if a small exchange with it succeeds on all ranks, otherwise the collective
    transport. The choice and its reason are logged.

    Args:
        buffer_bytes: size of a receive buffer, by default that of ``messages.buffer_bytes``.
        agreement: gloo group of the same ranks, over which they agree. By default ``group``, for which NCCL then
            creates a communicator.
        calls_in_flight: maximum number of core attentions in flight, each with its own receive buffers.
        replayable: True if CUDA graphs may capture exchanges, which works with symmetric memory inside one node.
        sole_user: True if nothing else in this process uses torch's symmetric memory. Its backend may then be changed
            to NVSHMEM, which a group over several nodes needs.

    Raises:
        ValueError: the transport is unknown or unavailable; names the key ``cad.transport``.
    """
    if replayable and name != "symm_mem":
        raise ValueError(f"cad.transport = {name!r} cannot be captured in CUDA graphs: build 'symm_mem'")
    num_bytes = messages.buffer_bytes(nano_batches=calls_in_flight) if buffer_bytes is None else buffer_bytes
    options = {"buffer_bytes": num_bytes, "calls_in_flight": calls_in_flight, "replayable": replayable}
    transport, reason = _choose(
        name, device, lambda: _symmetric(group, agreement or group, device, sole_user, **options)
    )
    if name == "auto":
        choice = f"collective; {reason}" if reason else "symm_mem, which passed its trial on all ranks of the group"
        _logger.info(f"cad.transport = 'auto': {choice}")
    return transport or CollectiveTransport(group, num_bytes)


def expected_transport(name: str, device: torch.device, num_hosts: int, *, sole_user: bool = True) -> tuple[str, str]:
    """Predict, in one process, the choice of ``build_transport`` over ``num_hosts`` hosts, and return its reason, too.

    Raises:
        ValueError: the transport is unknown or unavailable; names the key ``cad.transport``.
    """
    _, reason = _choose(name, device, lambda: _agree(lambda: _check(device, num_hosts, False, sole_user)))
    return ("collective", reason) if reason else ("symm_mem", "decided at start by a trial on all ranks of the group")


def _choose(name: str, device: torch.device, attempt: Callable[[], _T]) -> tuple[_T | None, str]:
    """Return the result of ``attempt`` at symmetric memory; or None and the reason for the collective transport."""
    if name not in TRANSPORTS:
        raise ValueError(f"cad.transport = {name!r}: set cad.transport to one of {', '.join(TRANSPORTS)}")
    if name == "collective":
        return None, "as set"
    if name == "auto" and device.type == "cpu":
        return None, "not symm_mem: for ranks on CPU it serves tests"
    try:
        return attempt(), ""
    except _Unavailable as error:
        if name == "auto":
            return None, f"not symm_mem: {error}"
        raise ValueError(
            f"cad.transport = 'symm_mem' does not work here: {error}; set cad.transport to 'auto' or 'collective'"
        ) from error


def _symmetric(
    group: dist.ProcessGroup, agreement: dist.ProcessGroup, device: torch.device, sole_user: bool, **options: Any
) -> SymmetricTransport:
    """Build the transport; raises _Unavailable on all ranks unless it works on all. Arguments: ``build_transport``."""
    num_hosts = len({*gather(_host(), agreement).values()})
    _agree(lambda: _check(device, num_hosts, options["replayable"], sole_user), agreement)

    def build() -> SymmetricTransport:
        of_memory = {"group": group, "agreement": agreement, "device": device, "buffer_bytes": options["buffer_bytes"]}
        allocate = partial(_memory_of(device, num_hosts).allocate, **of_memory)
        ranks = dist.get_process_group_ranks(group)
        transport = SymmetricTransport(ranks, group.rank(), allocate, lambda: _PROBE_TIMEOUT_S, **options)
        _try_out(transport, group, options["calls_in_flight"], device)
        return transport

    transport = _agree(build, agreement)
    transport.timeout_s = lambda: group._get_backend(device).options._timeout.total_seconds()
    return transport


def _host() -> str:
    """Return a unique name of this host. Host names of containers may be equal on two nodes."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return boot_id.read_text() if boot_id.exists() else socket.gethostname()


def _check(device: torch.device, num_hosts: int, replayable: bool, sole_user: bool) -> None:
    """Raise RuntimeError naming what is missing, as far as this rank alone can tell."""
    if device.type == "cpu":
        if replayable:
            raise RuntimeError("CUDA graphs need CUDA devices")
        if num_hosts > 1:
            raise RuntimeError("ranks on CPU share memory on one host only")
        if sys.platform != "linux":
            raise RuntimeError(f"symmetric memory of CPU ranks needs Linux, this is {sys.platform}")
        return
    if device.type != "cuda":
        raise RuntimeError(f"it needs CUDA devices, these are {device.type}")
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError("its kernels need the package triton")
    if num_hosts == 1:
        if (backend := symm_mem.get_backend(device)) not in (None, "CUDA"):
            raise RuntimeError(
                f"torch's symmetric memory is set to the backend {backend}, and inside one node CUDA is needed: "
                "unset the environment variable TORCH_SYMMMEM"
            )
        return
    if not sole_user:
        raise RuntimeError(
            "the group spans nodes, and NVSHMEM would become the symmetric memory of all of torch, which "
            "parallelism.enable_async_tensor_parallel uses too: set that to false"
        )
    if replayable:
        raise RuntimeError("the group spans nodes, and exchanges over NVSHMEM cannot be captured in CUDA graphs")
    if not symm_mem.is_nvshmem_available():
        raise RuntimeError("the group spans nodes, and this build of torch has no NVSHMEM")
    find_device_library(torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None)


def _memory_of(device: torch.device, num_hosts: int) -> Any:
    """Return the class of ``SymmetricMemory`` for the device and number of hosts."""
    if device.type == "cpu":
        return CpuMemory
    if num_hosts == 1:
        from torchtitan_cad.runtime.transport.cuda_memory import DeviceMemory

        return DeviceMemory
    from torchtitan_cad.runtime.transport.nvshmem import NodesMemory

    return NodesMemory


def _try_out(transport: Transport, group: dist.ProcessGroup, calls_in_flight: int, device: torch.device) -> None:
    """Exchange rows between all ranks until every buffer was used twice; raises RuntimeError if a row is wrong."""
    num_ranks, rank = group.size(), group.rank()
    others = [peer for peer in range(num_ranks) if peer != rank]
    wrong = ""
    for number in range(1, 2 * calls_in_flight * BUFFERS_PER_CALL + 1):
        routes = all_to_all(
            rank, ~np.eye(num_ranks, dtype=bool), 1, buffer=number // calls_in_flight % BUFFERS_PER_CALL
        )
        rows = torch.full((num_ranks - 1, 4), 1000 * number + rank, dtype=torch.int32, device=device)
        pending = transport.start([[rows]], routes, "trial", transport.begin())
        received = pending.wait()[0].view(torch.int32)[:, 0].tolist()
        pending.release()
        wanted = [1000 * number + peer for peer in others]
        if received != wanted and not wrong:
            wrong = f"a trial brought {received} instead of {wanted}"  # goes on, so that no peer waits
    transport.prepare(())  # raises PeerError if a peer was late
    if wrong:
        raise RuntimeError(wrong)


def _agree(act: Callable[[], _T], group: dist.ProcessGroup | None = None) -> _T:
    """Return the result of ``act`` if it succeeds on all ranks of a group; otherwise all ranks raise _Unavailable."""
    results, failure = [], ""
    try:
        results.append(act())
    except Exception as error:  # compilers and drivers have exceptions of their own; peers wait in the gather below
        failure = f"{type(error).__name__}: {error}" if not isinstance(error, RuntimeError) else str(error)
        failure = " ".join(failure.split())[:300] or type(error).__name__
    if group is not None:
        failures = [f"{reason} (rank {rank})" for rank, reason in gather(failure, group).items() if reason]
        failure = next(iter(failures), "")
    if failure:
        raise _Unavailable(failure)
    return results[0]
