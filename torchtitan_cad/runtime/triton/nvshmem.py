"""Messages and signals to other nodes by NVSHMEM, through torch's wrappers for Triton.

Importing this module needs NVSHMEM's device library. Addresses are this rank's own: NVSHMEM finds the same place in the
memory of a peer, which it knows by its global rank.
"""

import torch.distributed._symmetric_memory._nvshmem_triton as nvshmem
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_cad.runtime.triton.nvshmem_constants import CMP_GE, SIGNAL_SET


def put_messages(messages: Tensor, ranks: Tensor, staging: int, target: int, row_bytes: int, failed: Tensor) -> None:
    """Write one message to every peer of ``messages`` and wait until all have arrived.

    Args:
        messages: int32 [n, 4]: peer, first row in ``staging``, first row at the peer, number of rows.
        ranks: int32 [num_ranks] global ranks of the group. staging, target: addresses on this rank.
    """
    if len(messages):
        _put_messages[(len(messages),)](messages, ranks, staging, target, row_bytes, failed, num_warps=1)


def post(peers: Tensor, ranks: Tensor, address: int, value: int, failed: Tensor) -> None:
    """Set the int64 at ``address`` in the memory of every peer (int32 [n])."""
    if len(peers):
        _post[(len(peers),)](peers, ranks, address, value, failed, SIGNAL_SET, num_warps=1)


def confirm(peers: Tensor, address: int, value: int, failed: Tensor) -> None:
    """Make visible what came before the words at ``address`` + 8 * peer, which were seen to be ``value``."""
    if len(peers):
        _confirm[(len(peers),)](peers, address, value, failed, CMP_GE, num_warps=1)


@nvshmem.requires_nvshmem
@triton.jit(do_not_specialize=["staging", "target", "row_bytes"])
def _put_messages(messages, ranks, staging, target, row_bytes, failed):
    if tl.load(failed) == 0:
        message = messages + tl.program_id(0) * 4
        rank = tl.load(ranks + tl.load(message))
        first = tl.load(message + 1).to(tl.int64) * row_bytes
        place = tl.load(message + 2).to(tl.int64) * row_bytes
        size = tl.load(message + 3).to(tl.int64) * row_bytes
        nvshmem.putmem_block_extern_wrapper(target + place, staging + first, size, rank)
        nvshmem.quiet()


@nvshmem.requires_nvshmem
@triton.jit(do_not_specialize=["address", "value"])
def _post(peers, ranks, address, value, failed, OPERATION: tl.constexpr):
    if tl.load(failed) == 0:
        rank = tl.load(ranks + tl.load(peers + tl.program_id(0)))
        # Every thread of the program does this. Completed here, none of them can overtake a later value of the word.
        nvshmem.signal_op(address.to(tl.int64), tl.full([], value, tl.int64), tl.full([], OPERATION, tl.int32), rank)
        nvshmem.quiet()


@nvshmem.requires_nvshmem
@triton.jit(do_not_specialize=["address", "value"])
def _confirm(peers, address, value, failed, COMPARISON: tl.constexpr):
    if tl.load(failed) == 0:
        word = address.to(tl.int64) + tl.load(peers + tl.program_id(0)).to(tl.int64) * 8
        nvshmem.signal_wait_until_extern_wrapper(
            word, tl.full([], COMPARISON, tl.int32), tl.full([], value, tl.int64).to(tl.uint64)
        )
