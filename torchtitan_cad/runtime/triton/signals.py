"""Signals between ranks: words in symmetric memory that are set and awaited on the device. Imports torch and triton.

A word is set with release order, after all that the stream wrote before, and awaited with acquire order.
"""

import triton
import triton.language as tl
from torch import Tensor

PEER_BITS = 20
"""A wait that takes too long is recorded as (value << PEER_BITS | word) + 1."""


def post(peers: Tensor, addresses: Tensor, word: int, value: int, failed: Tensor) -> None:
    """Sets the int64 ``word`` of every peer's memory (peers int32 [n], addresses int64 [num_ranks])."""
    if len(peers):
        _post[(len(peers),)](peers, addresses, word, value, failed, num_warps=1)


def wait(
    peers: Tensor, words: Tensor, first_word: int, value: int, max_polls: int, failed: Tensor, record: Tensor
) -> None:
    """Waits until every word ``first_word`` + peer of this rank's memory (int64) is at least ``value``.

    Args:
        max_polls: looks at a word before giving up.
        failed: int64 [1] on the device; unless 0, there is no waiting. record: int64 [1] that the host can read.
            Both are set when a wait gives up.
    """
    if len(peers):
        _wait[(len(peers),)](peers, words, first_word, value, max_polls, failed, record, PEER_BITS, num_warps=1)


@triton.jit(do_not_specialize=["word", "value"])
def _post(peers, addresses, word, value, failed):
    # After a failure nothing is true any more that a signal could say.
    if tl.load(failed) == 0:
        address = tl.load(addresses + tl.load(peers + tl.program_id(0)))
        target = address.to(tl.pointer_type(tl.int64)) + word
        tl.atomic_xchg(target, tl.full([], value, tl.int64), sem="release", scope="sys")


@triton.jit(do_not_specialize=["first_word", "value", "max_polls"])
def _wait(peers, words, first_word, value, max_polls, failed, record, PEER_BITS: tl.constexpr):
    zero = tl.full([], 0, tl.int64)
    if tl.load(failed) == 0:
        word = first_word + tl.load(peers + tl.program_id(0))
        seen = tl.atomic_add(words + word, zero, sem="acquire", scope="sys")
        polls = zero
        while (seen < value) & (polls < max_polls):
            seen = tl.atomic_add(words + word, zero, sem="acquire", scope="sys")
            polls += 1
        if seen < value:
            overdue = (tl.full([], value, tl.int64) << PEER_BITS | word) + 1
            if tl.atomic_cas(failed, zero, overdue, sem="release", scope="gpu") == 0:
                tl.store(record, overdue)
