# SPDX-License-Identifier: BSD-3-Clause
"""The one search: configurations of a step, tried on the same batches for ``simulate`` and ``compare``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from torchtitan_cad.planning.keeping import CHECKPOINTING
from torchtitan_cad.tools.simulation.baselines import (
    packed,
    packing_cp,
    perfect,
    reorder,
    row_gathers,
)
from torchtitan_cad.tools.simulation.batches import Batch, draw_batches
from torchtitan_cad.tools.simulation.costs import Costs
from torchtitan_cad.tools.simulation.disaggregated import Disaggregated, obstacle
from torchtitan_cad.tools.simulation.dynamic_cp import dynamic_cp
from torchtitan_cad.tools.simulation.inputs import (
    PLACEMENTS,
    SCHEDULES,
    Configuration,
    Inputs,
)
from torchtitan_cad.tools.simulation.step import Outcome, Step

MAX_PP = 8
MAX_MICROBATCHES = 8
"""microbatches per pipeline rank: most that are tried."""
TRIED = 3
"""batches: the first, on which baselines are ranked, and CAD's best configurations compared; in large clusters one"""
FINALISTS = 3
"""configurations: a system's best, compared on more batches"""
LOWEST_CP = 2
"""numbers of context-parallel ranks: the lowest that rows allow, which CAD tries in large clusters"""
ROUNDING = 1e-9
"""share of a time by which two ways to add it up may differ"""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Trial:
    """A system with one configuration: an outcome per batch, none if it cannot be, for ``reason``; ``memory`` is the
    bytes of the fullest GPU, 0 if they are not known.
    """

    configuration: Configuration
    outcomes: tuple[Outcome, ...] = ()
    memory: float = 0.0
    reason: str = ""

    @property
    def fits(self) -> bool:
        """Tell whether there are outcomes."""
        return bool(self.outcomes)

    @property
    def seconds(self) -> float:
        """Per step, the mean over the batches; infinite if it does not fit."""
        return (
            statistics.fmean(o.seconds for o in self.outcomes)
            if self.fits
            else math.inf
        )

    def part(self, name: str) -> float:
        """Return the seconds of one of ``PARTS``, the mean over the batches."""
        return statistics.fmean(getattr(o.parts, name) for o in self.outcomes)

    @property
    def max_over_mean(self) -> float:
        """Attention of the slowest rank over the mean rank's, the mean over the batches."""
        return statistics.fmean(o.max_over_mean for o in self.outcomes)

    def over(self, other: Trial) -> dict[str, float] | None:
        """Compare the speed with another's: least, mean and most over the batches. None if one does not fit."""
        if not (self.fits and other.fits):
            return None
        ratios = [
            reference.seconds / outcome.seconds
            for outcome, reference in zip(self.outcomes, other.outcomes, strict=True)
        ]
        return {
            "min": min(ratios),
            "mean": statistics.fmean(ratios),
            "max": max(ratios),
        }


@dataclass(eq=False)
class Search:
    """Tries configurations of the systems of ``BASELINES``, and of CAD.

    Attributes:
        progress: is called with what is simulated next.

    Raises ValueError for inputs that do not fit each other.
    """

    inputs: Inputs
    progress: Progress = lambda text: None
    _known: dict[tuple[str, Configuration, int], Trial] = field(default_factory=dict)

    def __post_init__(self) -> None:
        inputs = self.inputs
        self.cluster = inputs.cluster
        self.asked = inputs.configuration
        self.open = inputs.open
        fixed = [getattr(self.asked, name) for name in {"pp", "cp"} - self.open]
        divisor = self.cluster.tp * math.prod(fixed)
        if self.cluster.ranks % divisor:
            raise ValueError(
                f"--ranks {self.cluster.ranks}: not a multiple of tp x pp x cp = {divisor}; set a multiple of it"
            )
        self.progress("drawing documents")
        self.batches = draw_batches(inputs.documents)
        tile = self.asked.planner_config().cost_tile
        self.costs = Costs(inputs.model, self.cluster, inputs.rates, tile)

    @property
    def few(self) -> int:
        """Count the first batches on which configurations are ranked."""
        return min(1 if self.cluster.is_large else TRIED, len(self.batches))

    def step(
        self, system: str, configuration: Configuration, batch: Batch | None = None
    ) -> Step | None:
        """Divide a batch, by default the first; None if it cannot be. Rows bind none of ``WITHOUT_ROWS``."""
        ranks, rest = divmod(self.cluster.ranks, self.cluster.tp * configuration.pp)
        if rest or ranks % configuration.cp:
            return None
        step = Step(self.costs, batch or self.batches[0], configuration)
        return step if system in WITHOUT_ROWS or step.has_whole_rows else None

    def run(
        self, system: str, configuration: Configuration, batches: int | None = None
    ) -> Trial:
        """Simulate a configuration, once, on the first ``batches``, by default on all."""
        trial = Trial(configuration)
        for number in range(1, (batches or len(self.batches)) + 1):
            if (key := (system, configuration, number)) not in self._known:
                self._known[key] = self._with_batch(number, system, trial)
            trial = self._known[key]
            if not trial.fits:
                break
        return trial

    def _with_batch(self, number: int, system: str, before: Trial) -> Trial:
        """Simulate one batch more than were simulated ``before``."""
        configuration = before.configuration
        step = self.step(system, configuration, self.batches[number - 1])
        if step is None:
            return Trial(
                configuration, reason="the step's rows do not divide into these parts"
            )
        reason = "" if system in BASELINES else obstacle(step)
        if reason:
            return Trial(configuration, reason=reason)
        changes = [
            f"{key} {value}" for key, value in configuration.changes(self.asked).items()
        ]
        text = ", ".join(changes) or "as asked"
        self.progress(f"{system}: batch {number} of {len(self.batches)}, {text}")
        memory = 0.0
        if system in BASELINES:
            outcome = BASELINES[system](step)
            if outcome is None:
                return Trial(configuration, reason="its tokens do not fit the memory")
        else:
            cad = Disaggregated(step, with_servers=system == "servers")
            memory = cad.memory().total  # without what plans take
            outcome = cad.outcome() if memory <= self.cluster.memory else None
        most = max(before.memory, memory, outcome.memory.total if outcome else 0.0)
        if outcome is None or most > self.cluster.memory:
            text = f"needs {most / 1e9:.1f} GB of a GPU's {self.cluster.memory / 1e9:.1f} GB"
            return Trial(configuration, memory=most, reason=text)
        return Trial(configuration, (*before.outcomes, outcome), most)

    def fastest(self, system: str, candidates: Sequence[Configuration]) -> Trial:
        """Return a system's fastest configuration that fits every batch, of the best for its first batches.

        These are the first ``TRIED``, of CAD, whose plans take long, the first, by which ``FINALISTS`` at a time are
        compared on ``TRIED``; of ``perfect`` all, so that nothing is below it.
        """
        every = len(self.batches)
        ranked_on, compared_on = {
            "cad": (1, self.few),
            "perfect": (every, every),
        }.get(system, (self.few, every))
        bounds = {
            candidate: self.bound(system, candidate, ranked_on)
            for candidate in candidates
        }
        possible = [candidate for candidate in bounds if bounds[candidate] < math.inf]
        left = sorted(possible, key=bounds.__getitem__)
        tried = list[Trial]()
        while left:
            trials, left = self._ranked(system, left, bounds, batches=ranked_on)
            tried += trials
            fitting = _by_seconds(trial for trial in trials if trial.fits)
            for first in range(0, len(fitting), FINALISTS):
                finalists = fitting[first : first + FINALISTS]
                compared = [
                    self.run(system, trial.configuration, compared_on)
                    for trial in finalists
                ]
                for trial in _by_seconds(compared):
                    on_all = self.run(system, trial.configuration)
                    if on_all.fits:
                        return on_all
        return self.none([self.run(system, trial.configuration) for trial in tried])

    def _ranked(
        self,
        system: str,
        candidates: Sequence[Configuration],
        bounds: dict[Configuration, float],
        batches: int,
    ) -> tuple[list[Trial], list[Configuration]]:
        """Return the trials of configurations that can be the fastest, and the configurations that cannot: even perfect
        balance would leave them behind the best so far.
        """
        best = Trial(self.asked)
        tried = list[Trial]()
        left = list[Configuration]()
        for candidate in candidates:
            if bounds[candidate] * (1 - ROUNDING) > best.seconds or (
                system == "cad" and _is_smaller(candidate, best)
            ):
                left.append(candidate)
                continue
            tried.append(self.run(system, candidate, batches))
            best = min(best, tried[-1], key=lambda trial: trial.seconds)
        return tried, left

    def bound(self, system: str, configuration: Configuration, batches: int) -> float:
        """Return seconds that no mean step over the first batches is below: balanced, with the shortest bubble.

        Infinite if the step cannot be divided so.
        """
        step = self.step(system, configuration)
        if step is None or (system == "cad" and obstacle(step)):
            return math.inf
        schedule = configuration.schedule if system == "cad" else "CAD1F1B"
        even = [
            replace(step, batch=batch).even(schedule)
            for batch in self.batches[:batches]
        ]
        balanced = statistics.fmean(parts.total for parts in even)
        if system in ("packed", "reorder"):
            return balanced + row_gathers(step)
        # which may leave the first and the last microbatches empty, and few keys to gather
        if system in ("packing_cp", "dynamic_cp"):
            return balanced - even[0].bubble
        return balanced

    def placed(self, candidates: Sequence[Configuration]) -> Trial:
        """Return CAD's fastest trial, maybe with documents placed, since ``packing_cp`` distributes them anew, too."""
        fastest = self.fastest("cad", candidates).configuration
        ways = product(
            self._choices("placement", PLACEMENTS[1:]),
            self._choices("nano_batches", (1, 2)),
        )
        others = [
            replace(fastest, placement=placement, nano_batches=nano_batches)
            for placement, nano_batches in ways
        ]
        return self.fastest("cad", [fastest, *others])

    def none(self, tried: list[Trial]) -> Trial:
        """Return the trial that is nearest to fitting, of some that do not."""
        if known := [trial for trial in tried if trial.memory and not trial.fits]:
            return min(known, key=lambda trial: trial.memory)
        return Trial(
            self.asked,
            reason="no configuration fits the memory"
            if tried
            else "these settings cannot run",
        )

    def candidates(self, system: str, placement: str = "loader") -> list[Configuration]:
        """List the configurations of a system."""
        asked = replace(self.asked, placement=placement)
        cp = 1 if "cp" in self.open else self.asked.cp
        powers = [2**i for i in range(MAX_PP.bit_length())]
        pps = [
            pp for pp in powers if self.cluster.ranks % (self.cluster.tp * pp * cp) == 0
        ]
        found = list[Configuration]()
        for kind in self._choices("checkpointing", CHECKPOINTING):
            for pp in self._choices("pp", pps):
                for microbatches in self._choices("microbatches", self._divisions(pp)):
                    configuration = replace(
                        asked, checkpointing=kind, pp=pp, microbatches=microbatches
                    )
                    found += self._ways(system, configuration)
        return found

    def _divisions(self, pp: int) -> list[int]:
        """Powers of two and divisors of the rows, less those that leave a pipeline emptier than half."""
        rows = len(self.batches[0].rows)
        return [
            number
            for number in range(1, MAX_MICROBATCHES * pp + 1)
            if (number & (number - 1) == 0 or rows % number == 0) and 2 * number >= pp
        ]

    def _choices(self, name: str, every: Sequence[Any]) -> Sequence[Any]:
        return every if name in self.open else [getattr(self.asked, name)]

    def _ways(
        self, system: str, configuration: Configuration
    ) -> Iterator[Configuration]:
        """Yield a system's configurations with these numbers of pipeline ranks and microbatches."""
        ranks = self.cluster.ranks // (self.cluster.tp * configuration.pp)
        divisors = [cp for cp in range(1, ranks + 1) if ranks % cp == 0]
        if system in ("perfect", "dynamic_cp"):
            yield replace(configuration, cp=1)
        elif system == "packing_cp":
            for cp in divisors:
                bins = configuration.microbatches * (ranks // cp)
                if bins <= len(self.batches[0].lengths):
                    yield replace(configuration, cp=cp, backward="resend")
                    if cp > 1:
                        yield replace(configuration, cp=cp, backward="keep")
        else:
            divided = self._row_divisions(system, configuration, divisors)
            if system in BASELINES:
                yield from divided
                return
            if self.cluster.is_large:  # more ranks of a row take longer to plan
                divided = divided[:LOWEST_CP]
            for chosen in divided:
                yield from self._orders_of_work(chosen)

    def _row_divisions(
        self, system: str, configuration: Configuration, divisors: list[int]
    ) -> list[Configuration]:
        """Return the numbers of ranks that may share a row; placed, documents are not bound to a row's ranks."""
        ways = dict[int, Configuration]()
        for cp in self._choices("cp", divisors):
            divided = replace(configuration, cp=cp)
            step = self.step(system, divided)
            if step is not None:
                is_placed = configuration.placement != "loader"
                ways.setdefault(step.rows_per_rank % 2 if is_placed else cp, divided)
        return list(ways.values())

    def _orders_of_work(self, chosen: Configuration) -> Iterator[Configuration]:
        """Yield CAD's schedules and numbers of nano-batches."""
        schedules = self._choices("schedule", SCHEDULES)
        # schedules in ticks refuse to keep rows
        if chosen.pp > 1 and chosen.backward == "keep":
            schedules = ["1F1B"]
        if chosen.pp == 1:
            schedules = schedules[:1]
        for schedule, nano_batches in product(
            schedules, self._choices("nano_batches", (2, 1))
        ):
            yield replace(chosen, schedule=schedule, nano_batches=nano_batches)


BASELINES: dict[str, Callable[[Step], Outcome | None]] = {
    "packed": packed,
    "reorder": reorder,
    "packing_cp": packing_cp,
    "dynamic_cp": dynamic_cp,
    "perfect": perfect,
}
WITHOUT_ROWS = ("packing_cp", "dynamic_cp", "perfect")
"""Systems that rows do not bind."""


def _by_seconds(trials: Iterable[Trial]) -> list[Trial]:
    return sorted(trials, key=lambda trial: trial.seconds)


def _is_smaller(candidate: Configuration, best: Trial) -> bool:
    """Tell whether microbatches are smaller than the best's: without a pipeline they only leave less to balance."""
    fastest = best.configuration
    return (
        best.fits
        and candidate.placement == "loader"
        and candidate.pp == 1 == fastest.pp
        and candidate.microbatches > fastest.microbatches
    )
