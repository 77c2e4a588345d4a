"""One-sided transport: senders pack rows straight into the receivers' buffers in symmetric memory.

All ranks of a group begin the same calls and start the same exchanges in the same order. Call c uses the slots of place
c mod P in every rank's buffer, P being the calls in flight; which of them an exchange uses, its route says. (Replays of
CUDA graphs use those of the capture.) A slot's exchanges are numbered from 1, its epochs. Two words per slot and peer,
of release and acquire order, make it safe to use a slot again:

    arrived[slot, sender]     e: the sender's rows of epoch e are there
    returned[slot, receiver]  e: the receiver has consumed its rows of epoch e, so epoch e + 1 may overwrite them

A sender waits for the receivers it has rows for, a receiver for the senders that have rows for it, and nobody for all.

The host counts epochs and passes them to kernels. For CUDA graphs, which would repeat what was passed, they are counted
on the device (``replayable``).
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest

import torch
from torch import Tensor

from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.planning.exchange.messages import EXCHANGES_PER_CALL, RowBytes, with_headroom
from torchtitan_cad.runtime.errors import PeerError
from torchtitan_cad.runtime.packing import RowFormat
from torchtitan_cad.runtime.transport.base import Peers, Route
from torchtitan_cad.runtime.transport.memory import WORD_BYTES, Epoch, Overdue, SymmetricMemory

GROWTH = 1.25
"""Of a slot over its last size, at least. Over 80 plans each of Llama 3 8B on 64 ranks in two nano-batches, the layouts
of bench/memory.py in random order, buffers grew 0.9 to 3.8 times; by half of the last size they ended 5 to 11% larger.
"""
_ALIGNMENT = 512


@dataclass(frozen=True)
class Capacity:
    """Rows that the user lets a rank receive as a server in one exchange, and the bytes of its receive buffers."""

    queries: int
    keys: int
    slot_bytes: tuple[int, int]

    @classmethod
    def of_rows(cls, queries: int, keys: int, shape: AttentionShape, *, keep: bool) -> "Capacity":
        """Return the capacity that the engine needs for that many rows, with or without ``keep``.

        What returns to a home takes as many trips as such buffers need.
        """
        return cls(queries, keys, RowBytes.of(shape, keep=keep).slot_bytes(queries, keys))


@dataclass(frozen=True)
class Slots:
    """Receive buffers of a rank.

    Attributes:
        calls_in_flight: most calls that are begun before the first of them has released its last exchange.
        buffer_bytes: of a slot, beyond which it only grows as far as it must.
    """

    calls_in_flight: int = 2
    buffer_bytes: int | None = None


TWO_CALLS = Slots()


@dataclass(frozen=True)
class _Use:
    """One exchange's use of a slot of a ring."""

    slot: int
    epoch: int
    phase: str


class _Ring:
    """The slots of one symmetric allocation, and which exchanges use them: of every place one of each size."""

    def __init__(
        self,
        slot_bytes: tuple[int, ...],
        num_slots: int,
        world_size: int,
        allocate: Callable[[int], SymmetricMemory],
        *,
        replayable: bool,
    ) -> None:
        self.slot_bytes, self.num_slots, self.world_size = slot_bytes, num_slots, world_size
        self._header_bytes = _round_up((2 * num_slots + 1) * world_size * WORD_BYTES)
        self._begins = list(accumulate(slot_bytes * (num_slots // len(slot_bytes)), initial=self._header_bytes))
        self.memory = allocate(self._begins[-1])
        self.last_call = -1
        self._meetings = 0
        self._epochs = [0] * num_slots
        self._uses: deque[_Use] = deque(maxlen=64)
        self._phases_of_slot: list[dict[str, None]] = [{} for _ in range(num_slots)]
        # Counted apart, because a rank can have received a slot's rows before it has sent its own.
        self._sent = self._new_counters() if replayable else None
        self._received = self._new_counters() if replayable else None

    def _new_counters(self) -> list[Tensor]:
        device = self.memory.view(0, 0).device
        return [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self.num_slots)]

    def new_use(self, slot: int, call: int, phase: str) -> _Use:
        """Begin the next epoch of a slot, for an exchange of the call."""
        self._epochs[slot] += 1
        use = _Use(slot, self._epochs[slot], phase)
        self._uses.append(use)
        self._phases_of_slot[slot][phase] = None
        self.last_call = max(call, self.last_call)
        return use

    def epoch_to_send(self, use: _Use) -> Epoch:
        """Return the exchange's epoch in its slot, counted from 1; call once per exchange, on the stream that sends."""
        return self._epoch(use, self._sent)

    def epoch_to_receive(self, use: _Use) -> Epoch:
        """Return the exchange's epoch in its slot; call once per exchange, on the stream that waits for rows."""
        return self._epoch(use, self._received)

    @staticmethod
    def _epoch(use: _Use, counters: list[Tensor] | None) -> Epoch:
        if counters is None:
            return Epoch(use.epoch)
        counter = counters[use.slot]
        counter.add_(1)
        return Epoch(0, counter)

    def phase(self, overdue: Overdue) -> str:
        """Return the exchange that has waited too long, or those that share its slot where the device counts them."""
        if overdue.word >= self.meeting():
            return "change of buffers"
        slot = overdue.word // self.world_size % self.num_slots
        if self._sent is not None:
            return " or ".join(self._phases_of_slot[slot])
        epoch = overdue.value + (overdue.word >= self.returned(0))  # a sender waits for the epoch before its own
        return next((use.phase for use in self._uses if (use.slot, use.epoch) == (slot, epoch)), "long ago")

    def begin(self, slot: int) -> int:
        """First byte of the slot."""
        return self._begins[slot]

    def arrived(self, slot: int) -> int:
        """First of the words by which senders say that their rows are there."""
        return slot * self.world_size

    def returned(self, slot: int) -> int:
        """First of the words by which receivers say that they have consumed their rows."""
        return (self.num_slots + slot) * self.world_size

    def new_meeting(self) -> Epoch:
        """Count one more meeting of all ranks; returns how many there are."""
        self._meetings += 1
        return Epoch(self._meetings)

    def meeting(self) -> int:
        """First of the words by which ranks say how often they have met."""
        return 2 * self.num_slots * self.world_size


class SymmetricTransport:
    """See the module's docstring.

    Slots have the same sizes on all ranks, those of queries and those of keys each their own. They follow from
    ``capacity``, otherwise from the first plan, with headroom. A plan that needs more makes all ranks allocate anew, in
    step, because they know the same plan. What was allocated before is freed by all ranks together once no call that
    has used it is in flight on any of them: a rank never holds more than the last two sizes. (Where CUDA graphs may
    refer to it, it stays.)

    Args:
        ranks: global ranks of the CAD group, for errors.
        rank: this rank's index among them.
        allocate: makes symmetric memory of a number of bytes.
        timeout_s: asked for the bound on every wait.
        capacity: decides the size of the first allocation, made at once.
        slots: how many there are, and how they grow.
        fixed: there is no other allocation; plans that need more than ``capacity`` are refused.
        replayable: exchanges may be captured in CUDA graphs, once room is made for them. All ranks replay the same
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
        slots: Slots = TWO_CALLS,
        fixed: bool = False,
        replayable: bool = False,
    ) -> None:
        self._ranks, self.rank = list(ranks), rank
        self._allocate, self._limit = allocate, capacity if fixed else None
        self.timeout_s, self.replayable = timeout_s, replayable
        self.everyone = Peers([peer for peer in range(len(ranks)) if peer != rank])
        self._calls_in_flight, self._buffer_bytes, self._calls = slots.calls_in_flight, slots.buffer_bytes, 0
        self._users: list[str | None] = [None] * self.num_slots
        self._rings: list[_Ring] = []
        self._largest: tuple[int, ...] = (0,) * EXCHANGES_PER_CALL
        if capacity is not None:
            self._add_ring(capacity.slot_bytes)

    @property
    def num_slots(self) -> int:
        """Slots of a ring: one for every exchange that may be under way."""
        return self._calls_in_flight * EXCHANGES_PER_CALL

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Bytes that a rank can receive in one exchange without a new allocation, by the exchange's slot."""
        return self._rings[-1].slot_bytes if self._rings else (0,) * EXCHANGES_PER_CALL

    def prepare(self, routes: Sequence[Route]) -> None:
        self._raise_overdue()
        rings = self._rings  # once: another thread may replace them
        for route in routes:
            rows = math.inf if self._limit is None or route.kind == "results" else getattr(self._limit, route.kind)
            if route.most_rows > rows:
                raise ValueError(
                    f"cad.max_recv_{route.kind} = {rows}: a plan has a rank that receives {route.most_rows} rows of "
                    f"{route.kind}; set it to at least {route.most_rows}, or leave it unset"
                )
            if rings:
                rings[-1].memory.prepare(route)

    def begin(self, *num_bytes: int) -> int:
        self._raise_overdue()
        call, self._calls = self._calls, self._calls + 1
        for slot in self._slots(call):
            self._require_free(slot, "another core attention")
        growing = self._must_grow(num_bytes)
        self._leave_rings(call, growing=growing)
        if growing:
            self._grow(num_bytes)
        return call

    def _slots(self, call: int) -> range:
        place = call % self._calls_in_flight
        return range(place * EXCHANGES_PER_CALL, (place + 1) * EXCHANGES_PER_CALL)

    def _require_free(self, slot: int, user: str) -> None:
        if (phase := self._users[slot]) is not None:
            raise RuntimeError(
                f"{user} would use the buffer of exchange '{phase}', which is in flight: at most "
                f"{self._calls_in_flight} core attentions, with {EXCHANGES_PER_CALL} exchanges each in slots of "
                "their own, may be"
            )

    def start(self, parts: Sequence[Tensor], route: Route, phase: str, call: int) -> "SymmetricPending":
        self._raise_overdue()
        row_format = RowFormat(parts)
        num_bytes = (*(0,) * route.slot, route.most_rows * row_format.row_bytes)
        if self._must_grow(num_bytes):
            self._grow(num_bytes)
        ring = self._rings[-1]
        ring.memory.prepare(route)
        use = self._occupy(ring, call, route.slot, phase)
        with ring.memory.sending():
            epoch = ring.epoch_to_send(use)
            if epoch.counter is not None or epoch.count > 1:
                last = Epoch(epoch.count - 1, epoch.counter)
                self.await_peers(ring, route.receivers, ring.returned(use.slot), last, phase)
            begin, word = ring.begin(use.slot), ring.arrived(use.slot) + self.rank
            ring.memory.send(parts, row_format, route, begin, word, epoch)
            sent = ring.memory.sent()
        return SymmetricPending(self, ring, use, route, row_format.row_bytes, parts, sent)

    def _occupy(self, ring: _Ring, call: int, slot_of_call: int, phase: str) -> _Use:
        slot = self._slots(call)[slot_of_call]
        self._require_free(slot, f"exchange '{phase}'")
        self._users[slot] = phase
        return ring.new_use(slot, call, phase)

    def vacate(self, slot: int) -> None:
        """Say that this rank has released the exchange that used the slot."""
        self._users[slot] = None

    def await_peers(self, ring: _Ring, peers: Peers, first_word: int, epoch: Epoch, phase: str) -> None:
        """Wait for words of ``peers``, up to the group's timeout.

        Raises:
            PeerError: on CPU, names the peers that are late; on a device the next exchange or plan finds out.
        """
        timeout_s = self.timeout_s()
        if late := ring.memory.wait(peers, first_word, epoch, timeout_s):
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

    # Buffers ----------------------------------------------------------------------------------------------------------

    def _must_grow(self, num_bytes: Sequence[int]) -> bool:
        over = [(most, slot) for most, slot in zip(num_bytes, self.slot_bytes, strict=False) if most > slot]
        if over and self._limit is not None:
            raise ValueError(
                f"an exchange brings some rank {over[0][0]} bytes, but cad.max_recv_queries and cad.max_recv_keys were "
                f"taken to mean {over[0][1]}: the tensors are wider than training.mixed_precision_param says"
            )
        return bool(over)

    def _grow(self, num_bytes: Sequence[int]) -> None:
        pairs = zip_longest(num_bytes, self._largest, fillvalue=0)
        bound = self._buffer_bytes
        self._add_ring(
            [with_headroom(most, bound, int(slot * GROWTH)) if most > slot else slot for most, slot in pairs]
        )

    def _leave_rings(self, call: int, *, growing: bool) -> None:
        """Free the memory of rings whose calls are over, but for the one in use.

        When ``call`` begins, calls that could be in flight together with it have begun, and earlier ones have released
        everything, on every rank once it comes here. So ranks meet here: each tells all others, and waits for all.
        Then nobody writes to or signals in the memory any more.
        """
        leaving = [
            ring for ring in self._rings[: None if growing else -1] if ring.last_call <= call - self._calls_in_flight
        ]
        if not leaving or self.replayable:
            return
        ring = self._rings[-1]
        epoch = ring.new_meeting()
        ring.memory.post(self.everyone, ring.meeting() + self.rank, epoch)
        self.await_peers(ring, self.everyone, ring.meeting(), epoch, "change of buffers")
        ring.memory.settle()
        self._raise_overdue()
        self._rings = [ring for ring in self._rings if ring not in leaving]

    def _add_ring(self, slot_bytes: Sequence[int]) -> None:
        self._largest = sizes = tuple(_round_up(num_bytes) for num_bytes in slot_bytes)
        try:
            ring = _Ring(sizes, self.num_slots, len(self._ranks), self._allocate, replayable=self.replayable)
        except RuntimeError as error:
            raise PeerError(
                f"ranks {self._ranks} could not set up {self.num_slots} symmetric receive buffers of "
                f"{' and '.join(map(str, sizes))} bytes: {error}; set cad.transport = 'collective' if this system has "
                "no symmetric memory"
            ) from error
        self._rings = [*self._rings, ring]


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
        use: _Use,
        route: Route,
        row_bytes: int,
        parts: Sequence[Tensor],
        sent: "torch.cuda.Event | None",
    ) -> None:
        self._transport, self._ring, self._use = transport, ring, use
        self._route, self._row_bytes = route, row_bytes
        self._state, self._parts, self._sent = "started", parts, sent

    def wait(self) -> Tensor:
        self._expect("started", "waited for")
        ring, route, slot = self._ring, self._route, self._use.slot
        self._epoch = ring.epoch_to_receive(self._use)
        self._transport.await_peers(ring, route.senders, ring.arrived(slot), self._epoch, self._use.phase)
        self._state = "waited for"  # not before: rows that never came must not be given back
        rows = ring.memory.view(ring.begin(slot), route.num_received * self._row_bytes)
        return rows.view(route.num_received, self._row_bytes)

    def release(self) -> None:
        self._expect("waited for", "released")
        self._state = "released"
        ring, transport, slot = self._ring, self._transport, self._use.slot
        ring.memory.post(transport.everyone, ring.returned(slot) + transport.rank, self._epoch)
        # Last, as senders wait for the word. In a CUDA graph it leads the sending stream back to where it forked off.
        ring.memory.join(self._sent)
        self._parts = ()
        transport.vacate(slot)

    def take(self) -> Tensor:
        rows = self.wait().clone()
        self.release()
        return rows

    def _expect(self, state: str, action: str) -> None:
        if self._state != state:
            raise RuntimeError(f"exchange '{self._use.phase}' is {self._state}: it cannot be {action} now")


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
