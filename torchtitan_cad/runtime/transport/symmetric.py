"""One-sided transport: senders pack rows straight into the receivers' buffers in symmetric memory.

All ranks of a group begin the same calls and start the same exchanges in the same order. Call c uses the slots of place
c mod P in every rank's buffer, P being the calls in flight; which of them the rows of an exchange use, its routes say.
The exchanges of a place are numbered from 1. Two words per place and peer, of release and acquire order, make it safe
to use a slot again:

    ready[place, receiver]    n: the slots that exchange n uses are free at the receiver
    arrived[place, sender]    n: the sender's rows of exchange n are there

A rank says that it is ready when it starts an exchange itself, and to those alone that have rows for it. A sender waits
for the receivers it has rows for, a receiver for the senders that have rows for it, and nobody for all: two signals a
pair of ranks that rows move between.

The host counts exchanges and passes their numbers to kernels. For CUDA graphs, which would repeat what was passed, they
are counted on the device (``replayable``), where a call then has one exchange in flight at a time.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest

import torch
from torch import Tensor

from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.planning.exchange.messages import SLOTS_PER_CALL, RowBytes, with_headroom
from torchtitan_cad.runtime.errors import PeerError
from torchtitan_cad.runtime.packing import RowFormat
from torchtitan_cad.runtime.transport.base import Peers, Routes
from torchtitan_cad.runtime.transport.memory import WORD_BYTES, Epoch, Message, Overdue, SymmetricMemory

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
    """One exchange's use of slots of a ring."""

    place: int
    slots: tuple[int, ...]
    number: int
    epoch: Epoch
    phase: str


class _Ring:
    """The slots of one symmetric allocation, and which exchanges use them: of every place one of each size."""

    def __init__(
        self,
        slot_bytes: tuple[int, ...],
        num_places: int,
        world_size: int,
        allocate: Callable[[int], SymmetricMemory],
        *,
        replayable: bool,
    ) -> None:
        self.slot_bytes, self.num_places, self.world_size = slot_bytes, num_places, world_size
        header_bytes = _round_up((2 * num_places + 1) * world_size * WORD_BYTES)
        self._begins = list(accumulate(slot_bytes * num_places, initial=header_bytes))
        self.memory = allocate(self._begins[-1])
        self.last_call = -1
        self._meetings = 0
        self._numbers = [0] * num_places
        self._uses: deque[_Use] = deque(maxlen=64)
        self._phases: list[dict[str, None]] = [{} for _ in range(num_places)]
        device = self.memory.view(0, 0).device
        zeros = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(num_places if replayable else 0)]
        self._counters = zeros

    def new_use(self, place: int, slots: tuple[int, ...], call: int, phase: str) -> _Use:
        """Count one more exchange of a place, for the call, on the current stream."""
        self._numbers[place] += 1
        epoch = Epoch(self._numbers[place])
        if self._counters:
            epoch = Epoch(0, self._counters[place].add_(1))
        use = _Use(place, slots, self._numbers[place], epoch, phase)
        self._uses.append(use)
        self._phases[place][phase] = None
        self.last_call = max(call, self.last_call)
        return use

    def phase(self, overdue: Overdue) -> str:
        """Return the exchange that has waited too long, or those of its place where the device counts them."""
        if overdue.word >= self.meeting():
            return "change of buffers"
        place = overdue.word // self.world_size % self.num_places
        if self._counters:
            return " or ".join(self._phases[place])
        own = (use.phase for use in self._uses if (use.place, use.number) == (place, overdue.value))
        return next(own, "long ago")

    def begin(self, slot: int) -> int:
        """First byte of the slot."""
        return self._begins[slot]

    def arrived(self, place: int) -> int:
        """First of the words by which senders say that their rows are there."""
        return place * self.world_size

    def ready(self, place: int) -> int:
        """First of the words by which receivers say that their slots are free."""
        return (self.num_places + place) * self.world_size

    def new_meeting(self) -> Epoch:
        """Count one more meeting of all ranks; returns how many there are."""
        self._meetings += 1
        return Epoch(self._meetings)

    def meeting(self) -> int:
        """First of the words by which ranks say how often they have met."""
        return 2 * self.num_places * self.world_size


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
        self._freed: list[torch.cuda.Event | None] = [None] * self.num_slots
        self._rings: list[_Ring] = []
        self._largest: tuple[int, ...] = (0,) * SLOTS_PER_CALL
        if capacity is not None:
            self._add_ring(capacity.slot_bytes)

    @property
    def num_slots(self) -> int:
        """Slots of a ring: one for every exchange that may be under way."""
        return self._calls_in_flight * SLOTS_PER_CALL

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Bytes that a rank can receive in one exchange without a new allocation, by the exchange's slot."""
        return self._rings[-1].slot_bytes if self._rings else (0,) * SLOTS_PER_CALL

    def prepare(self, exchanges: Sequence[Routes]) -> None:
        self._raise_overdue()
        rings = self._rings  # once: another thread may replace them
        for routes in exchanges:
            for route in routes:
                rows = math.inf if self._limit is None or route.kind == "results" else getattr(self._limit, route.kind)
                if route.most_rows > rows:
                    raise ValueError(
                        f"cad.max_recv_{route.kind} = {rows}: a plan has a rank that receives {route.most_rows} rows "
                        f"of {route.kind}; set it to at least {route.most_rows}, or leave it unset"
                    )
            if rings:
                rings[-1].memory.prepare(routes)

    def begin(self, *num_bytes: int) -> int:
        self._raise_overdue()
        call, self._calls = self._calls, self._calls + 1
        self._require_free(self._slots(call % self._calls_in_flight), "another core attention")
        growing = self._must_grow(num_bytes)
        self._leave_rings(call, growing=growing)
        if growing:
            self._grow(num_bytes)
        return call

    def _slots(self, place: int) -> range:
        return range(place * SLOTS_PER_CALL, (place + 1) * SLOTS_PER_CALL)

    def _require_free(self, slots: Sequence[int], user: str) -> None:
        for phase in (self._users[slot] for slot in slots):
            if phase is not None:
                raise RuntimeError(
                    f"{user} would use the buffer of exchange '{phase}', which is in flight: at most "
                    f"{self._calls_in_flight} core attentions, with {SLOTS_PER_CALL} buffers each, may be"
                )

    def start(self, messages: Sequence[Sequence[Tensor]], routes: Routes, phase: str, call: int) -> "SymmetricPending":
        self._raise_overdue()
        packed = [(parts, RowFormat(parts)) for parts in messages]
        num_bytes = [0] * SLOTS_PER_CALL
        for (_, row_format), route in zip(packed, routes, strict=True):
            num_bytes[route.slot] = route.most_rows * row_format.row_bytes
        if self._must_grow(num_bytes):
            self._grow(num_bytes)
        ring = self._rings[-1]
        ring.memory.prepare(routes)
        use = self._occupy(ring, call, routes, phase)
        ready = ring.ready(use.place)
        ring.memory.post(routes.senders, ready + self.rank, use.epoch)
        with ring.memory.sending():
            self.await_peers(ring, routes.receivers, ready, use.epoch, phase)
            begins = [ring.begin(slot) for slot in use.slots]
            ring.memory.send(packed, routes, begins, ring.arrived(use.place) + self.rank, use.epoch)
            sent = ring.memory.mark()
        return SymmetricPending(self, ring, use, routes, packed, sent)

    def _occupy(self, ring: _Ring, call: int, routes: Routes, phase: str) -> _Use:
        place = call % self._calls_in_flight
        slots = tuple(self._slots(place)[route.slot] for route in routes)
        self._require_free(self._slots(place) if self.replayable else slots, f"exchange '{phase}'")
        for slot in slots:
            self._users[slot] = phase
            if self._freed[slot] is not None:
                ring.memory.join(self._freed[slot])
        return ring.new_use(place, slots, call, phase)

    def vacate(self, use: _Use, freed: "torch.cuda.Event | None") -> None:
        """Say that this rank has released the exchange; the mark ``freed`` comes after all that reads its rows."""
        for slot in use.slots:
            self._users[slot], self._freed[slot] = None, None if self.replayable else freed

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
        what = "sent its rows" if first_word < ring.ready(0) else "begun to receive"
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
            ring = _Ring(sizes, self._calls_in_flight, len(self._ranks), self._allocate, replayable=self.replayable)
        except RuntimeError as error:
            raise PeerError(
                f"ranks {self._ranks} could not set up {self.num_slots} symmetric receive buffers of "
                f"{' and '.join(map(str, sizes))} bytes: {error}; set cad.transport = 'collective' if this system has "
                "no symmetric memory"
            ) from error
        self._rings = [*self._rings, ring]


class SymmetricPending:
    """A ``Pending`` whose rows lie in the rank's symmetric buffer.

    Owns what the sending stream still reads, the parts and the routes' tables, until ``release`` has made the current
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
        routes: Routes,
        messages: Sequence[Message],
        sent: "torch.cuda.Event | None",
    ) -> None:
        self._transport, self._ring, self._use = transport, ring, use
        self._routes, self._messages = routes, messages
        self._state, self._sent = "started", sent

    def wait(self) -> list[Tensor]:
        self._expect("started", "waited for")
        ring, use = self._ring, self._use
        self._transport.await_peers(ring, self._routes.senders, ring.arrived(use.place), use.epoch, use.phase)
        self._state = "waited for"  # not before: rows that never came must not be given back
        received = []
        for slot, route, (_, row_format) in zip(use.slots, self._routes, self._messages, strict=True):
            rows = ring.memory.view(ring.begin(slot), route.num_received * row_format.row_bytes)
            received.append(rows.view(route.num_received, row_format.row_bytes))
        return received

    def release(self) -> None:
        self._expect("waited for", "released")
        self._state = "released"
        self._transport.vacate(self._use, self._ring.memory.mark())
        # In a CUDA graph this leads the sending stream back to where it forked off.
        self._ring.memory.join(self._sent)
        self._messages = ()

    def take(self) -> list[Tensor]:
        rows = [x.clone() for x in self.wait()]
        self.release()
        return rows

    def _expect(self, state: str, action: str) -> None:
        if self._state != state:
            raise RuntimeError(f"exchange '{self._use.phase}' is {self._state}: it cannot be {action} now")


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
