"""Chooses and builds the transport of a CAD group: what the user names, or the best that works."""

import importlib.util
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from torchtitan_cad.planning.exchange import messages
from torchtitan_cad.planning.exchange.messages import BUFFERS_PER_CALL
from torchtitan_cad.runtime import symm_cpu
from torchtitan_cad.runtime.transport.base import Route, Routes, Transport
from torchtitan_cad.runtime.transport.collective import CollectiveTransport
from torchtitan_cad.runtime.transport.memory import CpuMemory, SymmetricMemory
from torchtitan_cad.runtime.transport.symmetric import SymmetricTransport
from torchtitan_cad.runtime.triton.nvshmem_library import find_device_library

TRANSPORTS = ("auto", "symm_mem", "collective")
_PROBE_TIMEOUT_S = 20.0
_NOT_ON_CPU = "for ranks on CPU it serves tests"
_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


class _Unavailable(Exception):
    """Why there is no symmetric memory; the same on all ranks of the group."""


@dataclass(frozen=True)
class _Wish:
    """Symmetric memory that is asked for; see ``build_transport``."""

    group: dist.ProcessGroup
    agreement: dist.ProcessGroup
    device: torch.device
    buffer_bytes: int
    calls_in_flight: int
    replayable: bool
    sole_user: bool


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

    ``auto`` is symmetric memory on CUDA if a small exchange with it succeeds on all ranks, else the collective one; the
    log says which and why.

    Args:
        buffer_bytes: of a receive buffer; by default what ``messages.buffer_bytes`` returns.
        agreement: gloo group of the same ranks, over which they agree; by default ``group``, of which NCCL then makes
            a communicator that symmetric memory has no use for.
        calls_in_flight: most core attentions at a time, each of which has receive buffers of its own.
        replayable: exchanges may be captured in CUDA graphs, which symmetric memory inside one node allows.
        sole_user: nothing else in this process uses torch's symmetric memory, so its backend may be changed to NVSHMEM,
            which a group over several nodes needs.

    Raises:
        ValueError: unknown or unavailable transport; names the key ``cad.transport``.
    """
    num_bytes = messages.buffer_bytes(nano_batches=calls_in_flight) if buffer_bytes is None else buffer_bytes
    wish = _Wish(group, agreement or group, device, num_bytes, calls_in_flight, replayable, sole_user)
    match name:
        case "collective" if not replayable:
            return CollectiveTransport(group, num_bytes)
        case "symm_mem":
            try:
                return _symmetric(wish)
            except _Unavailable as error:
                raise _unavailable(error) from error
        case "auto" if not replayable:
            return _best(wish)
        case "collective" | "auto":
            raise ValueError(f"cad.transport = {name!r} cannot be captured in CUDA graphs: build 'symm_mem'")
        case _:
            raise ValueError(f"cad.transport = {name!r}: set cad.transport to one of {', '.join(TRANSPORTS)}")


def expected_transport(name: str, device: torch.device, num_hosts: int, *, sole_user: bool = True) -> tuple[str, str]:
    """Predict the choice of ``build_transport`` over that many hosts, as far as one process can know, and why.

    Raises:
        ValueError: unknown or unavailable transport; names the key ``cad.transport``.
    """
    if name not in TRANSPORTS:
        raise ValueError(f"cad.transport = {name!r}: set cad.transport to one of {', '.join(TRANSPORTS)}")
    if name == "collective":
        return name, "as set"
    if name == "auto" and device.type == "cpu":
        return "collective", f"not symm_mem: {_NOT_ON_CPU}"
    try:
        _check(device, num_hosts, replayable=False, sole_user=sole_user)
    except (RuntimeError, ImportError) as error:
        if name == "auto":
            return "collective", f"not symm_mem: {error}"
        raise _unavailable(error) from error
    return "symm_mem", "decided at start by a trial on all ranks of the group"


def _unavailable(reason: Exception) -> ValueError:
    return ValueError(
        f"cad.transport = 'symm_mem' does not work here: {reason}; set cad.transport to 'auto' or 'collective'"
    )


def _best(wish: _Wish) -> Transport:
    reason = _NOT_ON_CPU
    if wish.device.type != "cpu":
        try:
            transport = _symmetric(wish)
        except _Unavailable as error:
            reason = str(error)
        else:
            _logger.info("cad.transport = 'auto': symm_mem, which passed its trial on all ranks of the group")
            return transport
    _logger.info(f"cad.transport = 'auto': collective; not symm_mem: {reason}")
    return CollectiveTransport(wish.group, wish.buffer_bytes)


def _symmetric(wish: _Wish) -> SymmetricTransport:
    """Raise _Unavailable on all ranks of the group unless it works on all of them."""
    group, device = wish.group, wish.device
    num_hosts = len(set(_gather(wish.agreement, _host())))
    _agree(wish.agreement, lambda: _check(device, num_hosts, wish.replayable, wish.sole_user))

    def build() -> SymmetricTransport:
        passed = False
        transport = SymmetricTransport(
            dist.get_process_group_ranks(group),
            group.rank(),
            _allocator(wish, num_hosts),
            lambda: group._get_backend(device).options._timeout.total_seconds() if passed else _PROBE_TIMEOUT_S,
            wish.buffer_bytes,
            calls_in_flight=wish.calls_in_flight,
            replayable=wish.replayable,
        )
        _try_out(transport, device)
        passed = True
        return transport

    return _agree(wish.agreement, build)


def _host() -> str:
    """Return a name of this host that no other has. Host names of containers may be equal on two nodes."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return boot_id.read_text() if boot_id.exists() else socket.gethostname()


def _check(device: torch.device, num_hosts: int, replayable: bool, sole_user: bool) -> None:
    """Raise RuntimeError saying what is missing; takes no other rank."""
    if device.type == "cpu":
        if replayable:
            raise RuntimeError("CUDA graphs need CUDA devices")
        if num_hosts > 1:
            raise RuntimeError("ranks on CPU share memory on one host only")
        symm_cpu.load()
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


def _allocator(wish: _Wish, num_hosts: int) -> Callable[[int], SymmetricMemory]:
    if wish.device.type == "cpu":
        return partial(CpuMemory.allocate, group=wish.group)
    if num_hosts == 1:
        from torchtitan_cad.runtime.transport.cuda_memory import DeviceMemory

        return partial(DeviceMemory.allocate, group=wish.group, device=wish.device)
    from torchtitan_cad.runtime.transport.nvshmem import NodesMemory

    return partial(
        NodesMemory.allocate,
        group=wish.group,
        device=wish.device,
        buffer_bytes=wish.buffer_bytes,
        agreement=wish.agreement,
    )


def _try_out(transport: SymmetricTransport, device: torch.device) -> None:
    """Exchange one row between all ranks until every buffer was used twice; raises RuntimeError if a row is wrong."""
    num_ranks, rank = transport.num_ranks, transport.rank
    others = [peer for peer in range(num_ranks) if peer != rank]
    counts = [int(peer != rank) for peer in range(num_ranks)]
    offsets = [rank - (peer < rank) for peer in range(num_ranks)]
    wrong = ""
    for number in range(1, 2 * transport.num_buffers + 1):
        buffer = number * BUFFERS_PER_CALL // transport.num_buffers % BUFFERS_PER_CALL
        routes = Routes([Route("queries", None, counts, counts, offsets, num_ranks - 1, buffer)])
        part = torch.full((num_ranks - 1, 4), 1000 * number + rank, dtype=torch.int32, device=device)
        (message,) = transport.start([[part]], routes, "trial", transport.begin()).take()
        received = message.view(torch.int32)[:, 0].tolist()
        wanted = [1000 * number + peer for peer in others]
        if received != wanted and not wrong:
            wrong = f"a trial brought {received} instead of {wanted}"  # goes on, so that no peer waits
    transport.prepare(())  # says so if a peer was late
    if wrong:
        raise RuntimeError(wrong)


def _agree(group: dist.ProcessGroup, act: Callable[[], _T]) -> _T:
    """Return the result of ``act`` if it succeeds on all ranks of the group; else _Unavailable on all of them."""
    results, failure = [], ""
    try:
        results.append(act())
    except Exception as error:  # compilers and drivers have exceptions of their own; peers wait in the gather below
        failure = f"{type(error).__name__}: {error}" if not isinstance(error, RuntimeError) else str(error)
        failure = " ".join(failure.split())[:300] or type(error).__name__
    for rank, reason in zip(dist.get_process_group_ranks(group), _gather(group, failure), strict=True):
        if reason:
            raise _Unavailable(f"{reason} (rank {rank})")
    return results[0]


def _gather(group: dist.ProcessGroup, value: str) -> list[str]:
    values = [""] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values
