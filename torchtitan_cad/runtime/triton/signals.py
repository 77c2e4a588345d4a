# SPDX-License-Identifier: BSD-3-Clause
"""Signals between ranks: words in symmetric memory that are set and awaited on the device.

A word is set with release order, after all earlier writes of the stream, and awaited with acquire order.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from torchtitan_cad.runtime.triton.rows import Kernel, divided

LANES = tl.constexpr(32)
"""threads of a program, each with a word of its own"""
PEER_BITS = 20
"""record of a wait that takes too long = (value << PEER_BITS | word) + 1"""
_PEER_BITS = tl.constexpr(PEER_BITS)
_NO_WORD = tl.constexpr(1 << PEER_BITS)
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_INTERPRETED_POLL_NS = tl.constexpr(300_000)
"""nanoseconds: what a poll of the interpreter, which has no clock, counts for"""
_STORE_RELEASE = tl.constexpr(
    """
    {
        .reg .pred is_peer;
        setp.ge.s32 is_peer, $3, 0;
        @is_peer st.release.sys.global.b64 [$1], $2;
        mov.u32 $0, $3;
    }
    """
)
"""stores $2 at address $1 unless the peer $3 is negative; not every pair of devices on PCIe can do it atomically"""


def post(
    peers: Tensor,
    addresses: Tensor,
    word: int,
    value: int,
    failed: Tensor,
) -> None:
    """Set the int64 ``word`` of every peer's memory to ``value``.

    Args:
        peers: int32 [n]; -1 stands for none.
        addresses: int64 [num_ranks] addresses of the ranks' memory.
        failed: as in ``wait``.
    """
    if num_peers := peers.shape[0]:
        grid = divided(num_peers, LANES.value), 1, 1
        _post.launch(
            grid,
            (peers, addresses, failed),
            (word, value, num_peers),
            (),
            num_warps=1,
        )


def wait(
    peers: Tensor,
    words: Tensor,
    first_word: int,
    value: int,
    timeout_s: float,
    failed: Tensor,
    record: Tensor,
) -> None:
    """Wait until every word ``first_word`` + peer of this rank's memory (int64) is at least ``value``.

    One program polls the words of 32 peers at a time, so waiting takes one warp of one SM. Every lane has a word of its
    own, masked without a peer, because Triton up to 3.3 gave some lanes of a shared word the value 0
    (triton-lang/triton#7402).

    Args:
        peers: as in ``post``.
        timeout_s: seconds before giving up, by the device's clock.
        failed: int64 [1] on the device, set when a wait gives up; unless 0, there is no waiting.
        record: int64 [1] in host memory, set when a wait gives up.
    """
    if num_peers := peers.shape[0]:
        tensors = peers, words, failed, record
        numbers = first_word, value, int(1e9 * timeout_s), num_peers
        _wait.launch((1, 1, 1), tensors, numbers, (), num_warps=1)


@Kernel
@triton.jit(do_not_specialize=["word", "value", "num_peers"])
def _post(
    peers,
    addresses,
    failed,
    word: tl.int64,
    value: tl.int64,
    num_peers: tl.int32,
):
    i = tl.program_id(0) * LANES + tl.arange(0, LANES)
    peer = tl.load(peers + i, mask=i < num_peers, other=-1)
    # After a failure no signal is sent, as its meaning would be false.
    if tl.load(failed) == 0:
        address = tl.load(addresses + peer, mask=peer >= 0, other=0)
        place = address.to(tl.pointer_type(tl.int64)) + word
        values = tl.zeros([LANES], tl.int64) + value
        if _IS_INTERPRETED:
            tl.atomic_xchg(place, values, mask=peer >= 0, sem="release", scope="sys")
        else:
            tl.inline_asm_elementwise(
                _STORE_RELEASE,
                "=r,l,l,r",
                [place, values, peer],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def _nanoseconds(polls):
    """Return the time of a clock."""
    if _IS_INTERPRETED:
        return polls * _INTERPRETED_POLL_NS
    else:
        return globaltimer()


@Kernel
@triton.jit(do_not_specialize=["first_word", "value", "timeout_ns", "num_peers"])
def _wait(
    peers,
    words,
    failed,
    record,
    first_word: tl.int64,
    value: tl.int64,
    timeout_ns: tl.int64,
    num_peers: tl.int32,
):
    zero = tl.full([], 0, tl.int64)
    zeros = tl.zeros([LANES], tl.int64)
    awaited = value
    polls = zero
    begin = 0
    is_over = tl.load(failed) != 0
    deadline = _nanoseconds(polls) + timeout_ns
    while (begin < num_peers) & (is_over == 0):
        index = begin + tl.arange(0, LANES)
        peer = tl.load(peers + index, mask=index < num_peers, other=-1)
        word = first_word + peer
        late = peer >= 0
        late = late & (
            tl.atomic_add(words + word, zeros, mask=late, sem="acquire", scope="sys")
            < awaited
        )
        while (tl.max(late.to(tl.int32), axis=0) > 0) & (
            _nanoseconds(polls) < deadline
        ):
            late = late & (
                tl.atomic_add(
                    words + word, zeros, mask=late, sem="acquire", scope="sys"
                )
                < awaited
            )
            polls += 1
        if tl.max(late.to(tl.int32), axis=0) > 0:
            is_over = is_over | (awaited == awaited)
            first_late = tl.min(tl.where(late, word, _NO_WORD), axis=0).to(tl.int64)
            overdue = (awaited << _PEER_BITS | first_late) + 1
            if tl.atomic_cas(failed, zero, overdue, sem="release", scope="gpu") == 0:
                tl.store(record, overdue)
        begin += LANES
