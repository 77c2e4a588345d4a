"""One-sided transport: senders pack rows straight into the receivers' buffers in symmetric memory.

All ranks of a group start the same exchanges in the same order. Exchange n uses slot n mod S of every rank's buffer, as
its replays in CUDA graphs do. A slot's exchanges are its turns, counted from 1. Two words per slot and peer, of release
and acquire order, make it safe to take turns:

    arrived[slot, sender]     t: the sender's rows of turn t are there
    returned[slot, receiver]  t: the receiver has consumed its rows of turn t, so turn t + 1 may overwrite them

A sender waits for the receivers it has rows for, a receiver for the senders that have rows for it, and nobody for all.

The host counts turns and passes them to kernels. For CUDA graphs, which would repeat what was passed, they are counted
on the device (``replayable``).
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.runtime.errors import PeerError
from torchtitan_cad.runtime.packing import RowFormat, widest_rows
from torchtitan_cad.runtime.transport.base import Peers, Route
from torchtitan_cad.runtime.transport.memory import WORD_BYTES, Overdue, SymmetricMemory, Turn

NUM_SLOTS = 4
"""Exchanges in flight: queries and keys of two nano-batches. An exchange that comes back to a slot finds it free unless
a peer is three exchanges behind."""
HEADROOM = 1.25
GROWTH = 1.5
_ALIGNMENT = 512


@dataclass(frozen=True)
class Capacity:
    """Rows that the user lets a rank receive in one exchange, and the bytes that they take."""

    queries: int
    keys: int
    num_bytes: int

    @classmethod
    def of_rows(cls, queries: int, keys: int, shape: AttentionShape, *, keep: bool) -> "Capacity":
        """The capacity that the engine needs for that many rows, with or without ``keep``."""
        query_bytes, key_bytes = widest_rows(shape, keep=keep)
        return cls(queries, keys, max(queries * query_bytes, keys * key_bytes))


class _Ring:
    """The slots of one symmetric allocation, and which exchanges use them."""

    def __init__(
        self, slot_bytes: int, world_size: int, allocate: Callable[[int], SymmetricMemory], *, replayable: bool
    ) -> None:
        self.slot_bytes, self.world_size = slot_bytes, world_size
        self._header_bytes = _round_up(2 * NUM_SLOTS * world_size * WORD_BYTES)
        self.memory = allocate(self._header_bytes + NUM_SLOTS * slot_bytes)
        self.started = 0
        self._phases: deque[tuple[int, str]] = deque(maxlen=64)
        self._phases_of_slot: list[dict[str, None]] = [{} for _ in range(NUM_SLOTS)]
        self._users: list[str | None] = [None] * NUM_SLOTS
        # Counted apart, because a rank can have received a slot's rows before it has sent its own.
        self._sent = self._new_counters() if replayable else None
        self._received = self._new_counters() if replayable else None

    def _new_counters(self) -> list[Tensor]:
        device = self.memory.view(0, 0).device
        return [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(NUM_SLOTS)]

    def occupy(self, phase: str) -> int:
        """The number of a new exchange."""
        number = self.started
        if user := self._users[number % NUM_SLOTS]:
            raise RuntimeError(
                f"exchange '{phase}' would be in flight together with {NUM_SLOTS} others, the first of them '{user}': "
                "release exchanges before starting new ones"
            )
        self._users[number % NUM_SLOTS] = phase
        self._phases.append((number, phase))
        self._phases_of_slot[number % NUM_SLOTS][phase] = None
        self.started += 1
        return number

    def vacate(self, number: int) -> None:
        self._users[number % NUM_SLOTS] = None

    def turn_to_send(self, number: int) -> Turn:
        """Which turn of its slot the exchange is; to be asked once, on the stream that sends."""
        return self._turn(number, self._sent)

    def turn_to_receive(self, number: int) -> Turn:
        """Likewise, on the stream that waits for rows."""
        return self._turn(number, self._received)

    @staticmethod
    def _turn(number: int, counters: list[Tensor] | None) -> Turn:
        if counters is None:
            return Turn(number // NUM_SLOTS + 1)
        counter = counters[number % NUM_SLOTS]
        counter.add_(1)
        return Turn(0, counter)

    def phase(self, overdue: Overdue) -> str:
        """The exchange that has waited too long, or those that take turns in its slot where the device counts them."""
        slot = overdue.word // self.world_size % NUM_SLOTS
        if self._sent is not None:
            return " or ".join(self._phases_of_slot[slot])
        turn = overdue.value + (overdue.word >= self.returned(0))  # a sender waits for the turn before its own
        return dict(self._phases).get((turn - 1) * NUM_SLOTS + slot, "long ago")

    def begin(self, number: int) -> int:
        """First byte of the exchange's slot."""
        return self._header_bytes + number % NUM_SLOTS * self.slot_bytes

    def arrived(self, number: int) -> int:
        """First of the words by which senders say that their rows are there."""
        return number % NUM_SLOTS * self.world_size

    def returned(self, number: int) -> int:
        """First of the words by which receivers say that they have consumed their rows."""
        return (NUM_SLOTS + number % NUM_SLOTS) * self.world_size


class SymmetricTransport:
    """See the module's docstring.

    Slots are of the same size on all ranks. It follows from ``capacity``, otherwise from the first plan, with headroom.
    A plan that needs more makes all ranks allocate anew, in step, because they know the same plan. What was allocated
    before stays until the end, as peers may still signal there: less than twice the last size.

    Args:
        ranks: global ranks of the CAD group, for errors.
        rank: this rank's index among them.
        allocate: makes symmetric memory of a number of bytes.
        timeout_s: asked for the bound on every wait.
        capacity: decides the size of the first allocation, made at once.
        fixed: there is no other; plans that need more than ``capacity`` are refused.
        replayable: exchanges may be captured in CUDA graphs, once room is reserved for them. All ranks replay the same
            graphs in the same order, while no other exchange is in flight.
    """

    name = "symm_mem"

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        allocate: Callable[[int], SymmetricMemory],
        timeout_s: Callable[[], float],
        capacity: Capacity | None = None,
        *,
        fixed: bool = False,
        replayable: bool = False,
    ) -> None:
        self._ranks, self.rank = list(ranks), rank
        self._allocate, self._limit = allocate, capacity if fixed else None
        self.timeout_s, self.replayable = timeout_s, replayable
        self.everyone = Peers([peer for peer in range(len(ranks)) if peer != rank])
        self._rings: list[_Ring] = []
        if capacity is not None:
            self._add_ring(capacity.num_bytes)

    @property
    def slot_bytes(self) -> int:
        """Bytes that a rank can receive in one exchange without a new allocation."""
        return self._rings[-1].slot_bytes if self._rings else 0

    def prepare(self, routes: Sequence[Route]) -> None:
        self._raise_overdue()
        for route in routes:
            rows = math.inf if self._limit is None else getattr(self._limit, route.kind)
            if route.most_rows > rows:
                raise ValueError(
                    f"cad.max_recv_{route.kind} = {rows}: a plan has a rank that receives {route.most_rows} rows of "
                    f"{route.kind} or of their results; set it to at least {route.most_rows}, or leave it unset"
                )
            if self._rings:
                self._rings[-1].memory.prepare(route)

    def reserve(self, num_bytes: int) -> None:
        if num_bytes <= self.slot_bytes:
            return
        if self._limit is not None:
            raise ValueError(
                f"an exchange brings some rank {num_bytes} bytes, but cad.max_recv_queries and cad.max_recv_keys were "
                f"taken to mean {self.slot_bytes}: the tensors are wider than training.mixed_precision_param says"
            )
        self._add_ring(int(max(num_bytes * HEADROOM, self.slot_bytes * GROWTH)))

    def start(self, parts: Sequence[Tensor], route: Route, phase: str) -> "SymmetricPending":
        self._raise_overdue()
        row_format = RowFormat(parts)
        self.reserve(route.most_rows * row_format.row_bytes)
        ring = self._rings[-1]
        ring.memory.prepare(route)
        number = ring.occupy(phase)
        with ring.memory.sending():
            turn = ring.turn_to_send(number)
            if turn.counter is not None or turn.count > 1:
                last = Turn(turn.count - 1, turn.counter)
                self.await_peers(ring, route.receivers, ring.returned(number), last, phase)
            ring.memory.send(parts, row_format, route, ring.begin(number), ring.arrived(number) + self.rank, turn)
            sent = ring.memory.sent()
        return SymmetricPending(self, ring, number, route, row_format.row_bytes, phase, parts, sent)

    def await_peers(self, ring: _Ring, peers: Peers, first_word: int, turn: Turn, phase: str) -> None:
        """Waits for words of ``peers``, up to the group's timeout.

        Raises:
            PeerError: on CPU, names the peers that are late; on a device the next exchange or plan finds out.
        """
        timeout_s = self.timeout_s()
        if late := ring.memory.wait(peers, first_word, turn, timeout_s):
            raise PeerError(self._describe(ring, late, first_word, phase, timeout_s))

    def _describe(self, ring: _Ring, late: Sequence[int], first_word: int, phase: str, timeout_s: float) -> str:
        names = ", ".join(f"rank {self._ranks[peer]}" for peer in late)
        what = "sent its rows" if first_word < ring.returned(0) else "freed its receive buffer"
        return (
            f"core attention exchange '{phase}' of rank {self._ranks[self.rank]} failed: "
            f"{names} has not {what} for {timeout_s:.1f} s"
        )

    def _raise_overdue(self) -> None:
        for ring in self._rings:
            overdue = ring.memory.overdue()
            if overdue is not None:
                raise PeerError(self._describe_overdue(ring, overdue))

    def _describe_overdue(self, ring: _Ring, overdue: Overdue) -> str:
        return self._describe(ring, [overdue.peer], overdue.word, ring.phase(overdue), self.timeout_s())

    def _add_ring(self, slot_bytes: int) -> None:
        try:
            ring = _Ring(_round_up(slot_bytes), len(self._ranks), self._allocate, replayable=self.replayable)
            self._rings.append(ring)
        except RuntimeError as error:
            raise PeerError(
                f"ranks {self._ranks} could not set up {NUM_SLOTS} symmetric receive buffers of {slot_bytes} bytes: "
                f"{error}; set cad.transport = 'collective' if this system has no symmetric memory"
            ) from error


class SymmetricPending:
    """A ``Pending`` whose rows lie in the rank's symmetric buffer.

    Owns what the sending stream still reads, the parts and the route's tables, until ``release`` has made the current
    stream wait for that. What is freed then can be used again at once, in the order of that stream; ``record_stream``
    would keep memory until the host sees that the device is done, several layers later.

    Args:
        sent: mark of the sending stream after the exchange's work.
    """

    def __init__(
        self,
        transport: SymmetricTransport,
        ring: _Ring,
        number: int,
        route: Route,
        row_bytes: int,
        phase: str,
        parts: Sequence[Tensor],
        sent: "torch.cuda.Event | None",
    ) -> None:
        self._transport, self._ring, self._number = transport, ring, number
        self._route, self._row_bytes, self._phase = route, row_bytes, phase
        self._state, self._parts, self._sent = "started", parts, sent

    def wait(self) -> Tensor:
        self._expect("started", "waited for")
        ring, route = self._ring, self._route
        self._turn = ring.turn_to_receive(self._number)
        self._transport.await_peers(ring, route.senders, ring.arrived(self._number), self._turn, self._phase)
        self._state = "waited for"  # not before: rows that never came must not be given back
        rows = ring.memory.view(ring.begin(self._number), route.num_received * self._row_bytes)
        return rows.view(route.num_received, self._row_bytes)

    def release(self) -> None:
        self._expect("waited for", "released")
        self._state = "released"
        ring, transport = self._ring, self._transport
        ring.memory.post(transport.everyone, ring.returned(self._number) + transport.rank, self._turn)
        # Last, as senders wait for the word. In a CUDA graph it leads the sending stream back to where it forked off.
        ring.memory.join(self._sent)
        self._parts = ()
        ring.vacate(self._number)

    def take(self) -> Tensor:
        rows = self.wait().clone()
        self.release()
        return rows

    def _expect(self, state: str, action: str) -> None:
        if self._state != state:
            raise RuntimeError(f"exchange '{self._phase}' is {self._state}: it cannot be {action} now")


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
