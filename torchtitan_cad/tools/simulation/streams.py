# SPDX-License-Identifier: BSD-3-Clause
"""Compute and network of every rank as two streams, on which events wait for each other.

All times only grow with the durations: every operation starts at the latest of the events it waits for, in a fixed
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray
from torchtitan_cad.tools.simulation.costs import Transfer


@dataclass(frozen=True)
class Nano:
    """Times of one part of a microbatch in one layer: seconds of attention [ranks], and of the exchanges around it.

    ``share`` [ranks] of the work between attentions: 0.5 for each of two halves, 0 for ranks without tokens.
    """

    attention: FloatArray
    share: FloatArray
    there: Transfer | None = None
    back: Transfer | None = None

    @property
    def num_bytes(self) -> float:
        """Bytes of both exchanges, of all ranks."""
        return sum(
            transfer.num_bytes for transfer in (self.there, self.back) if transfer
        )


class Streams:
    """Times [ranks] at which compute and network are free, and the next layer's parameters have been gathered."""

    def __init__(self, ranks: int) -> None:
        self.compute = np.zeros(ranks)
        self.network = np.zeros(ranks)
        self.gathered = np.zeros(ranks)

    def join(self) -> None:
        """Make all ranks wait for each other."""
        self.compute[:] = self.compute.max()

    def work(self, ready: FloatArray, seconds: FloatArray) -> FloatArray:
        """Return when every rank has done work that can begin once it is ``ready`` and the rank is free, [ranks]."""
        self.compute = np.maximum(self.compute, ready) + seconds
        return self.compute

    def send(self, ready: FloatArray, transfer: Transfer | None) -> FloatArray:
        """Return when every rank has what it is sent: by the slowest of those that send to it."""
        if transfer is None:
            return ready
        start = np.maximum(self.network, ready)
        end = start + transfer.seconds
        senders, receivers, begins = transfer.pairs
        if len(receivers):
            first, last = (
                np.maximum.reduceat(times[senders], begins) for times in (start, end)
            )
            arrived = np.maximum(first + transfer.seconds[receivers], last)
            end[receivers] = np.maximum(end[receivers], arrived)
        self.network = np.where(transfer.active, end, self.network)
        return np.where(transfer.active, end, ready)

    def run(
        self,
        segments: Sequence[float],
        latencies: Sequence[float],
        layers: Sequence[Sequence[Nano]],
        background: float = 0.0,
    ) -> None:
        """Run the layers of one pass: segment, attention, segment, ..., the parts of the microbatch in turn.

        Args:
            segments: seconds of a whole microbatch's work before, between and after the attentions.
            latencies: seconds of them that do not depend on tokens, which each part of the microbatch takes.
            layers: the parts of the microbatch in every layer.
            background: seconds for which the network gathers the next layer's parameters during every layer, whose
                first segment waits for them.
        """
        returned = [self.compute] * len(layers[0])
        both = zip(segments, latencies, strict=True)
        for number, (segment, latency) in enumerate(both):
            arrived = []
            last = number == len(layers)
            nanos = layers[number - last]
            gathered = self.gathered
            upcoming = self.gathered
            for index, nano in enumerate(nanos):
                waits = background and not last
                seconds = np.where(nano.share > 0, latency, 0.0)
                seconds += (segment - latency) * nano.share
                done = self.work(
                    np.maximum(returned[index], gathered) if waits else returned[index],
                    seconds,
                )
                if index == 0 and waits:
                    begin = done - seconds
                    self.network = upcoming = (
                        np.maximum(self.network, begin) + background
                    )
                arrived.append(done if last else self.send(done, nano.there))
            if last:
                return
            self.gathered = upcoming
            for index, nano in enumerate(nanos):
                attended = self.work(arrived[index], nano.attention)
                returned[index] = self.send(attended, nano.back)
