# SPDX-License-Identifier: BSD-3-Clause
"""An estimate of the bytes of the plan that an assignment of chunks leads to, updated while chunks move.

Every rank keeps its own work up to its limit, keys nearest the diagonal first. The work above the limit goes to ranks
with capacity: either all rows of a chunk against early keys, which the rank then need not import, or the chunk's last
rows against as many keys as make the best rectangle. A rank with capacity takes pieces of the best shape, which may
join rows of several chunks, and does not read the keys that it holds itself.

A move takes chunks out of the lists of their documents (``detach``), changes the chunks and their ranks, chooses anew
what both ranks offload (``choose``) and puts the chunks back (``attach``). Each step updates the sums of the ranks.
"""

from __future__ import annotations

import numpy as np

from torchtitan_cad.planning.jit import jit_inner
from torchtitan_cad.planning.placement.offload import offload
from torchtitan_cad.planning.placement.table import (
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
    Table,
    link,
    touch,
    unlink,
)


@jit_inner
def _read(table: Table, i: int, j: int, keys: float, strips: float) -> tuple[float, float]:
    """Count the keys of chunk ``j`` that are read for the work that chunk ``i`` offloads, and that it keeps."""
    start, end = float(table.ints[j, START]), float(table.ints[j, START] + table.ints[j, LENGTH])
    offloaded = strips * max(0.0, min(end, abs(keys)) - start)
    return offloaded, max(0.0, end - max(start, keys)) if table.ints[j, RANK] != table.ints[i, RANK] else 0.0


@jit_inner
def read_by(table: Table, i: int, sign: float, keys: float, strips: float) -> None:
    """Add ``sign`` times the bytes of the keys read for chunk ``i``, which offloads ``keys`` in ``strips``."""
    rank, into, j, end = table.ints[i, RANK], 0.0, i, len(table.ints) - 1
    key_bytes = sign * table.prices[KEY_BYTES]
    while j != end:
        home = table.ints[j, RANK]
        offloaded, kept = _read(table, i, j, keys, strips)
        touch(table, home)
        table.reals[home, KEYS_SHARED] += offloaded * key_bytes
        table.reals[home, KEYS_OUT] += (offloaded + kept) * key_bytes
        into += kept
        j = table.ints[j, BEFORE]
    touch(table, rank)
    table.reals[rank, KEYS_IN] += into * key_bytes


@jit_inner
def _read_of(table: Table, j: int, sign: float) -> None:
    """Add ``sign`` times the bytes of the keys of chunk ``j`` that are read for the chunks behind it."""
    home, k, end = table.ints[j, RANK], table.ints[j, BEHIND], len(table.ints) - 1
    shared, out, key_bytes = 0.0, 0.0, sign * table.prices[KEY_BYTES]
    while k != end:
        offloaded, kept = _read(table, k, j, table.reals[k, KEYS_OFFLOADED], table.reals[k, STRIPS])
        shared += offloaded
        out += offloaded + kept
        if kept > 0:
            touch(table, table.ints[k, RANK])
            table.reals[table.ints[k, RANK], KEYS_IN] += kept * key_bytes
        k = table.ints[k, BEHIND]
    touch(table, home)
    table.reals[home, KEYS_SHARED] += shared * key_bytes
    table.reals[home, KEYS_OUT] += out * key_bytes


@jit_inner
def detach(table: Table, i: int) -> None:
    """Take a chunk out of the list of its document, and the keys read for it and of it out of the sums."""
    read_by(table, i, -1.0, table.reals[i, KEYS_OFFLOADED], table.reals[i, STRIPS])
    _read_of(table, i, -1.0)
    unlink(table, i)


@jit_inner
def attach(table: Table, i: int) -> None:
    """Put a chunk back into the list of its document and into the sums: the inverse of ``detach``."""
    link(table, i)
    read_by(table, i, 1.0, table.reals[i, KEYS_OFFLOADED], table.reals[i, STRIPS])
    _read_of(table, i, 1.0)


@jit_inner
def choose(table: Table, rank: int, one: int, other: int) -> None:
    """Choose what the rank offloads, chunk by chunk; ``one`` and ``other`` are the detached chunks, -1 for none."""
    ints, reals, prices, end = table.ints, table.reals, table.prices, len(table.ints) - 1
    k = ints[rank, NEXT_CHUNK]
    while k != end:
        touch(table, k)
        reals[k, OLD_KEYS_OFFLOADED], reals[k, OLD_STRIPS] = reals[k, KEYS_OFFLOADED], reals[k, STRIPS]
        reals[k, KEYS_OFFLOADED], reals[k, STRIPS] = 0.0, 0.0
        k = ints[k, NEXT_CHUNK]
    load, queries, helped = reals[rank, LOAD], 0.0, 0.0
    excess = load - table.limit[rank]
    while excess > 1e-9 * load:
        chosen, least = -1, np.inf
        best = (0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
        i = ints[rank, NEXT_CHUNK]
        while i != end:
            if reals[i, STRIPS] == 0:
                offer = offload(float(ints[i, START]), float(ints[i, LENGTH]), excess, prices)
                if offer[0] > 0:
                    value = (offer[2] - offer[3] * prices[KEY_BYTES]) / offer[0] * (2 - offer[0] / excess)
                    if value < least:
                        chosen, least, best = i, value, offer
            i = ints[i, NEXT_CHUNK]
        if chosen < 0:
            break
        excess -= best[0]
        queries += best[1]
        helped += best[2]
        # A negative number of keys: the rank imports them all the same.
        reals[chosen, KEYS_OFFLOADED], reals[chosen, STRIPS] = best[4] if best[3] > 0 else -best[4], best[5]
    k = ints[rank, NEXT_CHUNK]
    while k != end:
        is_attached = k not in (one, other)
        if is_attached and (
            reals[k, KEYS_OFFLOADED] != reals[k, OLD_KEYS_OFFLOADED] or reals[k, STRIPS] != reals[k, OLD_STRIPS]
        ):
            read_by(table, k, -1.0, reals[k, OLD_KEYS_OFFLOADED], reals[k, OLD_STRIPS])
            read_by(table, k, 1.0, reals[k, KEYS_OFFLOADED], reals[k, STRIPS])
        k = ints[k, NEXT_CHUNK]
    touch(table, rank)
    reals[rank, QUERIES_OUT], reals[rank, HELPERS_IN] = queries, helped


@jit_inner
def rank_bytes(table: Table, rank: int) -> tuple[float, float, float]:
    """Return the bytes into and out of a rank, and the bytes of keys that it holds of those are offloaded with work."""
    reals = table.reals
    # A rank with capacity gets as many bytes of queries as of keys, and already holds some of the keys.
    helps = table.prices[HELP] * np.sqrt(max(0.0, table.limit[rank] - reals[rank, LOAD]))
    held = min(helps / 2, reals[rank, KEYS_SHARED])
    return reals[rank, KEYS_IN] + helps - held, reals[rank, KEYS_OUT] + reals[rank, QUERIES_OUT] - held, held


@jit_inner
def estimate(table: Table) -> float:
    """Return the objective after the move: total bytes + WORST_WEIGHT x number of ranks x worst rank's bytes.

    A power mean of order 8 over the bytes in and out of all ranks stands for the worst rank's bytes.
    """
    reals, prices, end = table.reals, table.prices, len(table.ints) - 1
    touch(table, end)
    for at in range(table.counters[NUM_TOUCHED]):
        rank = table.touched[at]
        if rank < len(table.limit):
            into, out, held = rank_bytes(table, rank)
            reals[rank, BYTES] = reals[rank, KEYS_IN] + reals[rank, HELPERS_IN] - held
            reals[rank, POWER] = _power(into) + _power(out)
            reals[end, BYTES] += reals[rank, BYTES] - table.reals_before[at, BYTES]
            reals[end, POWER] += reals[rank, POWER] - table.reals_before[at, POWER]
    worst = np.sqrt(np.sqrt(np.sqrt(max(0.0, reals[end, POWER]) / (2 * len(table.limit)))))
    return reals[end, BYTES] + prices[WORST_WEIGHT] * len(table.limit) * worst


@jit_inner
def _power(value: float) -> float:
    square = value * value
    return square * square * (square * square)


@jit_inner
def worst_rank(table: Table) -> int:
    """Return the rank with the largest POWER."""
    found = 0
    for rank in range(1, len(table.limit)):
        if table.reals[rank, POWER] > table.reals[found, POWER]:
            found = rank
    return found
