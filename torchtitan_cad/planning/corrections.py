# SPDX-License-Identifier: BSD-3-Clause
"""Correct ``LayerTimes`` by the times that steps really took."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray
from torchtitan_cad.planning.plan import Plan
from torchtitan_cad.planning.timed import LayerTimes

STEPS = 24
"""steps: the most recent ones, by which rates are corrected"""
FEWEST, EVERY = 6, 4
"""steps: fewest by which rates are corrected, and from one correction to the next"""
STARTING = 2
"""steps: the first ones, in which things compile, do not count"""
OUTLIER = 0.1
"""share of a step: maximum of its difference from the prediction"""
OCTAVE = 0.01
"""share of a step: a factor of 2 must bring predictions closer by this much"""
LEAST_CHANGE = 0.002
"""share of a step: other factors must bring predictions closer by this much than those in use"""
COMPUTE, EXCHANGE = np.arange(-4, 9) / 4, np.arange(-8, 17) / 4
"""base-2 logarithms of the factors that are tried"""


class Corrections:
    """Fits two factors, of compute and of exchanges, to the seconds of steps.

    A step takes a constant, the attention of the slowest rank and the exposed exchange. The constant, which holds all
    that plans do not change, is the median of what is left. The factors are those with the least mean difference.

    Args:
        times: measured when the job starts.
        layers: attention layers that a rank runs one after the other.
    """

    def __init__(self, times: LayerTimes, layers: int) -> None:
        self.times = times
        """Rates to plan with."""
        self._measured, self._layers = times, layers
        self._steps: deque[tuple[float, FloatArray]] = deque(maxlen=STEPS)
        self._count = 0
        self._factors = 0.0, 0.0

    def add(self, seconds: float, plans: Sequence[Plan], shares: Sequence[float] | None = None) -> None:
        """Add a step that took ``seconds`` with these plans, and correct ``times`` once there are enough.

        Each plan is that of all layers, or of the ``shares`` [plans] of them.
        """
        self._count += 1
        if self._count <= STARTING:
            return
        measured = self._measured
        predict = measured.attention_seconds, measured.exchange_seconds, measured.hidden_seconds
        parts = [[each(plan) for plan in plans] for each in predict]
        self._steps.append((seconds, self._layers * np.array(parts) * (1.0 if shares is None else shares)))
        if len(self._steps) >= FEWEST and self._count % EVERY == 0:
            self._correct()

    def _correct(self) -> None:
        seconds = np.array([each for each, _ in self._steps])
        first = np.cumsum([0, *(parts.shape[1] for _, parts in self._steps)])[:-1]
        attention, exchange, hidden = np.concatenate([parts for _, parts in self._steps], axis=1)
        compute, factor = 2.0 ** COMPUTE[:, None, None], 2.0 ** EXCHANGE[:, None]
        busy = compute * attention + np.maximum(factor * exchange - compute * hidden, 0)
        rest = seconds - np.add.reduceat(busy, first, axis=2)
        rest -= np.median(rest, axis=2, keepdims=True)
        off = np.minimum(np.abs(rest) / np.median(seconds), OUTLIER).mean(axis=2)
        off += OCTAVE * (np.abs(COMPUTE)[:, None] + np.abs(EXCHANGE))
        best = np.unravel_index(off.argmin(), off.shape)
        now = np.searchsorted(COMPUTE, self._factors[0]), np.searchsorted(EXCHANGE, self._factors[1])
        if off[best] < off[now] - LEAST_CHANGE:
            self._factors = float(COMPUTE[best[0]]), float(EXCHANGE[best[1]])
            self.times = self._measured.scaled(2.0 ** self._factors[0], 2.0 ** self._factors[1])
