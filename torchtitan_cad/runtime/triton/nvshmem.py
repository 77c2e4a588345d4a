# SPDX-License-Identifier: BSD-3-Clause
"""Messages and signals to other nodes by NVSHMEM, through torch's wrappers for Triton.

Importing this module needs NVSHMEM's device library, which ``nvshmem_library`` finds. Addresses are those of this rank;
NVSHMEM maps them to the memory of a peer, given its global rank. Torch initialises kernels for NVSHMEM by their bare
names, so no other kernel may have the same name.
"""

import torch
import torch.distributed._symmetric_memory._nvshmem_triton as nvshmem
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_cad.runtime.triton.nvshmem_library import CMP_GE, SIGNAL_SET
from torchtitan_cad.runtime.triton.rows import FUSION
from torchtitan_cad.runtime.triton.signals import LANES

_SET = tl.constexpr(SIGNAL_SET)
_AT_LEAST = tl.constexpr(CMP_GE)


def put_messages(
    messages: Tensor,
    ranks: Tensor,
    staging: int,
    target: int,
    row_bytes: int,
    failed: Tensor,
) -> None:
    """Write one message to every peer of ``messages`` and wait until all have arrived.

    Args:
        messages: int32 [n, 4]: peer, first row in ``staging``, first row at the peer, number of rows.
        ranks: int32 [num_ranks] global ranks of the group.
        staging, target: addresses on this rank.
    """
    if len(messages):
        _nvshmem_put_messages[(len(messages),)](
            messages, ranks, staging, target, row_bytes, failed, num_warps=1, **FUSION
        )


def post(
    peers: Tensor, ranks: Tensor, address: int, spare: int, value: int, failed: Tensor
) -> None:
    """Set the int64 at ``address`` in the memory of every peer of ``peers`` (int32 [n]), by one remote operation each.

    Args:
        spare: address of an int64 that nobody reads, for threads without a peer.
    """
    if len(peers):
        grid = (triton.cdiv(len(peers), LANES.value),)
        _nvshmem_post[grid](
            peers,
            ranks,
            address,
            spare,
            value,
            failed,
            len(peers),
            num_warps=1,
            **FUSION,
        )


def confirm(peers: Tensor, address: int, value: int, failed: Tensor) -> None:
    """Make visible all writes before the words at ``address`` + 8 * peer, which are known to be ``value``."""
    if len(peers):
        _nvshmem_confirm[(len(peers),)](
            peers, address, value, failed, num_warps=1, **FUSION
        )


def warm_up(device: torch.device) -> None:
    """Compile the kernels, by launches that do nothing because ``failed`` is set."""
    table = torch.zeros(1, 4, dtype=torch.int32, device=device)
    failed = torch.ones(1, dtype=torch.int64, device=device)
    put_messages(table, table, 0, 0, 0, failed)
    post(table, table, 0, 0, 0, failed)
    confirm(table, 0, 0, failed)


@nvshmem.requires_nvshmem
@triton.jit(do_not_specialize=["staging", "target", "row_bytes"])
def _nvshmem_put_messages(
    messages, ranks, staging: tl.int64, target: tl.int64, row_bytes: tl.int64, failed
):
    if tl.load(failed) == 0:
        message = messages + tl.program_id(0) * 4
        rank = tl.load(ranks + tl.load(message))
        first = tl.load(message + 1).to(tl.int64) * row_bytes
        place = tl.load(message + 2).to(tl.int64) * row_bytes
        size = tl.load(message + 3).to(tl.int64) * row_bytes
        nvshmem.putmem_block_extern_wrapper(target + place, staging + first, size, rank)
        nvshmem.quiet()


@nvshmem.requires_nvshmem
@triton.jit(do_not_specialize=["address", "spare", "value", "num_peers"])
def _nvshmem_post(
    peers, ranks, address: tl.int64, spare: tl.int64, value: tl.int64, failed, num_peers
):
    if tl.load(failed) == 0:
        i = tl.program_id(0) * LANES + tl.arange(0, LANES)
        is_peer = i < num_peers
        rank = tl.load(ranks + tl.load(peers + i, mask=is_peer, other=0))
        word = tl.where(is_peer, address, spare)
        # Waiting for completion ensures that no signal overtakes a later value of the same word.
        nvshmem.signal_op(
            word,
            tl.full([LANES], value, tl.int64),
            tl.full([LANES], _SET, tl.int32),
            rank,
        )
        nvshmem.quiet()


@nvshmem.requires_nvshmem
@triton.jit(do_not_specialize=["address", "value"])
def _nvshmem_confirm(peers, address: tl.int64, value: tl.int64, failed):
    if tl.load(failed) == 0:
        word = address + tl.load(peers + tl.program_id(0)).to(tl.int64) * 8
        nvshmem.signal_wait_until_extern_wrapper(
            word, tl.full([], _AT_LEAST, tl.int32), value.to(tl.uint64)
        )
