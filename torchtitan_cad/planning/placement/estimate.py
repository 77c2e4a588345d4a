# SPDX-License-Identifier: BSD-3-Clause
"""An estimate of the bytes of the plan that an assignment of chunks leads to, updated while chunks move.

Every rank keeps its own work up to its limit, keys nearest the diagonal first. The work above the limit goes to ranks
with capacity: either all rows of a chunk against early keys, which the rank then need not import, or the chunk's last
rows against as many keys as make the best rectangle. A rank with capacity takes blocks of the best shape, which may
join rows of several chunks, and does not read the keys that it holds itself.

A move takes chunks out of the lists of their documents (``detach``), changes the chunks and their ranks, chooses anew
what both ranks offload (``choose``) and puts the chunks back (``attach``). Each step updates the sums of the ranks.
"""

from __future__ import annotations

import numpy as np

from torchtitan_cad.planning.jit import jit_inner
from torchtitan_cad.planning.placement.offload import offload
from torchtitan_cad.planning.placement.state import (
    BEFORE,
    BEHIND,
    BYTES,
    HELP,
    HELPERS_IN,
    KEY_BYTES,
    KEYS_IN,
    KEYS_OFFLOADED,
    KEYS_OUT,
    KEYS_SHARED,
    LENGTH,
    LOAD,
    NEXT_CHUNK,
    NUM_TOUCHED,
    OLD_KEYS_OFFLOADED,
    OLD_STRIPS,
    POWER,
    QUERIES_OUT,
    RANK,
    START,
    STRIPS,
    WORST_WEIGHT,
    State,
    link,
    touch,
    unlink,
)


@jit_inner
def _read(
    state: State, i: int, j: int, keys: float, strips: float
) -> tuple[float, float]:
    """Count the keys of chunk ``j`` that are read for the work that chunk ``i`` offloads, and that it keeps."""
    start = float(state.ints[j, START])
    end = float(state.ints[j, START] + state.ints[j, LENGTH])
    offloaded = strips * max(0.0, min(end, abs(keys)) - start)
    return offloaded, max(0.0, end - max(start, keys)) if state.ints[
        j, RANK
    ] != state.ints[i, RANK] else 0.0


@jit_inner
def read_by(state: State, i: int, sign: float, keys: float, strips: float) -> None:
    """Add ``sign`` times the bytes of the keys read for chunk ``i``, which offloads ``keys`` in ``strips``."""
    rank = state.ints[i, RANK]
    into = 0.0
    j = i
    end = len(state.ints) - 1
    key_bytes = sign * state.prices[KEY_BYTES]
    while j != end:
        home = state.ints[j, RANK]
        offloaded, kept = _read(state, i, j, keys, strips)
        touch(state, home)
        state.reals[home, KEYS_SHARED] += offloaded * key_bytes
        state.reals[home, KEYS_OUT] += (offloaded + kept) * key_bytes
        into += kept
        j = state.ints[j, BEFORE]
    touch(state, rank)
    state.reals[rank, KEYS_IN] += into * key_bytes


@jit_inner
def _read_of(state: State, j: int, sign: float) -> None:
    """Add ``sign`` times the bytes of the keys of chunk ``j`` that are read for the chunks behind it."""
    home = state.ints[j, RANK]
    k = state.ints[j, BEHIND]
    end = len(state.ints) - 1
    shared = 0.0
    out = 0.0
    key_bytes = sign * state.prices[KEY_BYTES]
    while k != end:
        offloaded, kept = _read(
            state, k, j, state.reals[k, KEYS_OFFLOADED], state.reals[k, STRIPS]
        )
        shared += offloaded
        out += offloaded + kept
        if kept > 0:
            touch(state, state.ints[k, RANK])
            state.reals[state.ints[k, RANK], KEYS_IN] += kept * key_bytes
        k = state.ints[k, BEHIND]
    touch(state, home)
    state.reals[home, KEYS_SHARED] += shared * key_bytes
    state.reals[home, KEYS_OUT] += out * key_bytes


@jit_inner
def detach(state: State, i: int) -> None:
    """Take a chunk out of the list of its document, and the keys read for it and of it out of the sums."""
    read_by(state, i, -1.0, state.reals[i, KEYS_OFFLOADED], state.reals[i, STRIPS])
    _read_of(state, i, -1.0)
    unlink(state, i)


@jit_inner
def attach(state: State, i: int) -> None:
    """Put a chunk back into the list of its document and into the sums: the inverse of ``detach``."""
    link(state, i)
    read_by(state, i, 1.0, state.reals[i, KEYS_OFFLOADED], state.reals[i, STRIPS])
    _read_of(state, i, 1.0)


@jit_inner
def choose(state: State, rank: int, one: int, other: int) -> None:
    """Choose what the rank offloads, chunk by chunk; ``one`` and ``other`` are the detached chunks, -1 for none."""
    reals = state.reals
    _begin_choice(state, rank)
    queries = 0.0
    helped = 0.0
    excess = reals[rank, LOAD] - state.limit[rank]
    while excess > 1e-9 * reals[rank, LOAD]:
        chosen, best = _best_offer(state, rank, excess)
        if chosen < 0:
            break
        work, queries_out, bytes_in, spared, keys, strips = best
        excess -= work
        queries += queries_out
        helped += bytes_in
        # A negative number of keys: the rank imports them all the same.
        reals[chosen, KEYS_OFFLOADED] = keys if spared > 0 else -keys
        reals[chosen, STRIPS] = strips
    _read_anew(state, rank, one, other)
    touch(state, rank)
    reals[rank, QUERIES_OUT] = queries
    reals[rank, HELPERS_IN] = helped


@jit_inner
def _begin_choice(state: State, rank: int) -> None:
    """Let the chunks of a rank offload nothing, and keep what they have offloaded before."""
    reals = state.reals
    k = state.ints[rank, NEXT_CHUNK]
    while k != len(state.ints) - 1:
        touch(state, k)
        reals[k, OLD_KEYS_OFFLOADED] = reals[k, KEYS_OFFLOADED]
        reals[k, OLD_STRIPS] = reals[k, STRIPS]
        reals[k, KEYS_OFFLOADED] = 0.0
        reals[k, STRIPS] = 0.0
        k = state.ints[k, NEXT_CHUNK]


@jit_inner
def _best_offer(
    state: State, rank: int, excess: float
) -> tuple[int, tuple[float, ...]]:
    """Return the chunk, of those that offload nothing yet, whose block costs the fewest bytes for its work, and the
    block; -1 if there is none."""
    ints = state.ints
    key_bytes = state.prices[KEY_BYTES]
    chosen = -1
    least = np.inf
    best = (0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
    i = ints[rank, NEXT_CHUNK]
    while i != len(ints) - 1:
        if state.reals[i, STRIPS] == 0:
            block = offload(
                float(ints[i, START]), float(ints[i, LENGTH]), excess, state.prices
            )
            if block[0] > 0:
                value = (
                    (block[2] - block[3] * key_bytes)
                    / block[0]
                    * (2 - block[0] / excess)
                )
                if value < least:
                    chosen = i
                    least = value
                    best = block
        i = ints[i, NEXT_CHUNK]
    return chosen, best


@jit_inner
def _read_anew(state: State, rank: int, one: int, other: int) -> None:
    """Update the sums for attached chunks of a rank that offload other keys than before."""
    reals = state.reals
    k = state.ints[rank, NEXT_CHUNK]
    while k != len(state.ints) - 1:
        changes = (
            reals[k, KEYS_OFFLOADED] != reals[k, OLD_KEYS_OFFLOADED]
            or reals[k, STRIPS] != reals[k, OLD_STRIPS]
        )
        if changes and k not in (one, other):
            read_by(state, k, -1.0, reals[k, OLD_KEYS_OFFLOADED], reals[k, OLD_STRIPS])
            read_by(state, k, 1.0, reals[k, KEYS_OFFLOADED], reals[k, STRIPS])
        k = state.ints[k, NEXT_CHUNK]


@jit_inner
def rank_bytes(state: State, rank: int) -> tuple[float, float, float]:
    """Return the bytes into and out of a rank, and the bytes of keys that it holds of those are offloaded with work."""
    reals = state.reals
    # A rank with capacity gets as many bytes of queries as of keys, and already holds some of the keys.
    helps = state.prices[HELP] * np.sqrt(
        max(0.0, state.limit[rank] - reals[rank, LOAD])
    )
    held = min(helps / 2, reals[rank, KEYS_SHARED])
    return (
        reals[rank, KEYS_IN] + helps - held,
        reals[rank, KEYS_OUT] + reals[rank, QUERIES_OUT] - held,
        held,
    )


@jit_inner
def estimate(state: State) -> float:
    """Return the objective after the move: total bytes + WORST_WEIGHT x number of ranks x worst rank's bytes.

    A power mean of order 8 over the bytes in and out of all ranks stands for the worst rank's bytes.
    """
    reals = state.reals
    prices = state.prices
    end = len(state.ints) - 1
    touch(state, end)
    for at in range(state.counters[NUM_TOUCHED]):
        rank = state.touched[at]
        if rank < len(state.limit):
            into, out, held = rank_bytes(state, rank)
            reals[rank, BYTES] = reals[rank, KEYS_IN] + reals[rank, HELPERS_IN] - held
            reals[rank, POWER] = _power(into) + _power(out)
            reals[end, BYTES] += reals[rank, BYTES] - state.reals_before[at, BYTES]
            reals[end, POWER] += reals[rank, POWER] - state.reals_before[at, POWER]
    worst = np.sqrt(
        np.sqrt(np.sqrt(max(0.0, reals[end, POWER]) / (2 * len(state.limit))))
    )
    return reals[end, BYTES] + prices[WORST_WEIGHT] * len(state.limit) * worst


@jit_inner
def _power(value: float) -> float:
    square = value * value
    return square * square * (square * square)


@jit_inner
def worst_rank(state: State) -> int:
    """Return the rank with the largest POWER."""
    found = 0
    for rank in range(1, len(state.limit)):
        if state.reals[rank, POWER] > state.reals[found, POWER]:
            found = rank
    return found
