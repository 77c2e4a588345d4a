# SPDX-License-Identifier: BSD-3-Clause
"""The one search: configurations of a step, tried on the same batches for ``simulate`` and ``compare``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from torchtitan_cad.tools.simulation.baselines import (
    packed,
    packing_cp,
    perfect,
    reorder,
    row_gathers,
)
from torchtitan_cad.tools.simulation.batches import Batch, draw_batches
from torchtitan_cad.tools.simulation.costs import Costs
from torchtitan_cad.tools.simulation.disaggregated import Disaggregated, Plans, obstacle
from torchtitan_cad.tools.simulation.dynamic_cp import dynamic_cp
from torchtitan_cad.tools.simulation.inputs import (
    CHECKPOINTING,
    PLACEMENTS,
    SCHEDULES,
    Configuration,
    Inputs,
    Placement,
)
from torchtitan_cad.tools.simulation.step import Outcome, Step

MAX_PP = 8
MAX_MICROBATCHES = 8
"""microbatches per pipeline rank: most that are tried."""
TRIED = 3
FINALISTS = 3
"""batches: the first, on which a baseline's configurations are ranked; configurations: a baseline's best, compared on
all batches. CAD's are ranked on the first batch, and compared on the first TRIED, FINALISTS at a time. In large
clusters TRIED is one."""
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
    """Tries configurations of the systems of ``BASELINES``, and of CAD with the configuration's planner.

    Attributes:
        progress: is called with what is simulated next.

    Raises ValueError for inputs that do not fit each other.
    """

    inputs: Inputs
    progress: Progress = lambda text: None
    _known: dict[tuple[str, Configuration, int], Trial] = field(default_factory=dict)
    _plans: dict[Configuration, Plans] = field(default_factory=dict)

    def __post_init__(self) -> None:
        inputs = self.inputs
        self.cluster = inputs.cluster
        self.asked = inputs.configuration
        self.open = inputs.open
        self.progress("drawing documents")
        self.batches = draw_batches(inputs.documents)
        tile = self.asked.planner_config().cost_tile
        self.costs = Costs(inputs.model, self.cluster, inputs.rates, tile)
        fixed = [
            getattr(self.asked, name) for name in ("pp", "cp") if name not in self.open
        ]
        if self.cluster.ranks % (product := self.cluster.tp * math.prod(fixed)):
            raise ValueError(
                f"cluster ranks = {self.cluster.ranks}: not a multiple of tp x pp x cp = {product}; set a multiple of "
                "it"
            )

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
        memory = 0.0
        if system in BASELINES:
            outcome = BASELINES[system](step)
            if outcome is None:
                return Trial(configuration, reason="its tokens do not fit the memory")
        elif reason := obstacle(step):
            return Trial(configuration, reason=reason)
        else:
            changes = ", ".join(
                f"{key} {value}"
                for key, value in configuration.changes(self.asked).items()
            )
            self.progress(
                f"{system}: batch {number} of {len(self.batches)}, {changes or 'as asked'}"
            )
            plans = self._plans_of_first_batch(configuration) if number == 1 else {}
            cad = Disaggregated(step, plans, with_servers=system == "servers")
            memory = cad.memory().total  # without what plans take
            outcome = cad.outcome() if memory <= self.cluster.memory else None
        most = max(before.memory, memory, outcome.memory.total if outcome else 0.0)
        if outcome is None or most > self.cluster.memory:
            text = f"needs {most / 1e9:.1f} GB of a GPU's {self.cluster.memory / 1e9:.1f} GB"
            return Trial(configuration, memory=most, reason=text)
        return Trial(configuration, (*before.outcomes, outcome), most)

    def _plans_of_first_batch(self, configuration: Configuration) -> Plans:
        """Return the plans that are known. By time they depend on what servers keep, so on all of a configuration."""
        if configuration.tolerance != "auto":
            configuration = replace(
                configuration, checkpointing="none", backward="resend"
            )
        return self._plans.setdefault(configuration, {})

    def fastest(self, system: str, candidates: Sequence[Configuration]) -> Trial:
        """Return a baseline's fastest configuration that fits every batch, of the best for ``TRIED`` batches.

        What even perfect balance would leave behind the best so far is not tried.
        """
        batches = self.batches[: self.few]
        bounds = [
            (self._least_seconds(system, candidate, batches), number)
            for number, candidate in enumerate(candidates)
        ]
        waiting = sorted(bounds, reverse=True)
        tried = dict[int, Trial]()
        while True:
            fitting = sorted(
                (trial.seconds, number) for number, trial in tried.items() if trial.fits
            )
            finalists = fitting[:FINALISTS]
            least = finalists[-1][0] if len(finalists) == FINALISTS else math.inf
            if waiting and waiting[-1][0] * (1 - ROUNDING) <= least:
                number = waiting.pop()[1]
                self.progress(
                    f"{system}: {len(tried) + 1} of at most {len(candidates)} configurations"
                )
                tried[number] = self.run(system, candidates[number], len(batches))
                continue
            trials = {
                number: self.run(system, candidates[number]) for _, number in finalists
            }
            failing = {
                number: trial for number, trial in trials.items() if not trial.fits
            }
            if not failing:
                none = self.none([tried[number] for number in sorted(tried)])
                return min(
                    trials.values(), key=lambda trial: trial.seconds, default=none
                )
            tried |= failing

    def _least_seconds(
        self, system: str, configuration: Configuration, batches: Sequence[Batch]
    ) -> float:
        """Return seconds that no baseline's mean step over the batches is below: balanced, with the shortest bubble."""
        step = self.step(system, configuration)
        if step is None:
            return math.inf
        even = [replace(step, batch=batch).even("CAD1F1B") for batch in batches]
        balanced = statistics.fmean(parts.total for parts in even)
        # which may leave the first and the last microbatches empty, and few keys to gather
        if system in ("packing_cp", "dynamic_cp"):
            return balanced - even[0].bubble
        return balanced + (row_gathers(step) if system != "perfect" else 0.0)

    def fastest_cad(self, candidates: Sequence[Configuration]) -> Trial:
        """Return CAD's fastest configuration for ``TRIED`` batches that fits every batch, of the best for the first.

        What even perfect balance would leave behind the best so far is not planned, unless no faster one fits.
        """
        tried = list[Trial]()
        left = list(candidates)
        while left:
            trials, left = self._planned_first(left)
            tried += trials
            fitting = sorted(
                (trial for trial in trials if trial.fits),
                key=lambda trial: trial.seconds,
            )
            for first in range(0, len(fitting), FINALISTS):
                finalists = fitting[first : first + FINALISTS]
                few = [
                    self.run("cad", one.configuration, self.few) for one in finalists
                ]
                for trial in sorted(few, key=lambda trial: trial.seconds):
                    if (every := self.run("cad", trial.configuration)).fits:
                        return every
            if not fitting:
                break
        return self.none([self.run("cad", trial.configuration) for trial in tried])

    def _planned_first(
        self, candidates: Sequence[Configuration]
    ) -> tuple[list[Trial], list[Configuration]]:
        """Return the trials on the first batch of configurations that can be the fastest, and the configurations that
        cannot as long as the fastest of these fits every batch.
        """
        best = Trial(self.asked)
        tried = list[Trial]()
        left = list[Configuration]()
        for candidate in candidates:
            fastest = best.configuration
            places = candidate.placement != "loader"
            smaller = (
                best.fits
                and not places
                and candidate.pp == 1 == fastest.pp
                and candidate.microbatches > fastest.microbatches
            )
            # without a pipeline smaller microbatches only leave less to balance
            if smaller or self.bound(candidate) >= best.seconds:
                left.append(candidate)
                continue
            tried.append(self.run("cad", candidate, 1))
            best = min(best, tried[-1], key=lambda trial: trial.seconds)
        return tried, left

    def placed(self, candidates: Sequence[Configuration]) -> Trial:
        """Return CAD's fastest trial, maybe with documents placed, since ``packing_cp`` distributes them anew, too."""
        fastest = self.fastest_cad(candidates).configuration
        ways = product(
            self._choices("placement", PLACEMENTS[1:]),
            self._choices("nano_batches", (1, 2)),
        )
        return self.fastest_cad(
            [fastest, *(replace(fastest, placement=p, nano_batches=n) for p, n in ways)]
        )

    def bound(self, configuration: Configuration) -> float:
        """Return the seconds of a step if everything were balanced and hidden; infinite if it cannot be divided so."""
        step = self.step("cad", configuration)
        return (
            step.even(configuration.schedule).total
            if step and not obstacle(step)
            else math.inf
        )

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

    def candidates(
        self, system: str, placement: Placement = "loader"
    ) -> list[Configuration]:
        """List the configurations of a system, for CAD the most promising first; "greedy" is CAD with that planner."""
        asked = replace(self.asked, placement=placement)
        if system == "greedy":
            asked = replace(asked, planner=system)
        found = list[Configuration]()
        cp = 1 if "cp" in self.open else self.asked.cp
        rows = len(self.batches[0].rows)
        pps = [
            2**i
            for i in range(MAX_PP.bit_length())
            if self.cluster.ranks % (self.cluster.tp * 2**i * cp) == 0
        ]
        for kind in self._choices("checkpointing", CHECKPOINTING):
            for pp in self._choices("pp", pps):
                # Powers of two and divisors of the rows, less those that leave a pipeline emptier than half.
                most = MAX_MICROBATCHES * pp
                every = [
                    m
                    for m in range(1, most + 1)
                    if (m & (m - 1) == 0 or rows % m == 0) and 2 * m >= pp
                ]
                for m in self._choices("microbatches", every):
                    configuration = replace(
                        asked,
                        checkpointing=kind,
                        pp=pp,
                        microbatches=m,
                    )
                    found += self._ways(system, configuration)
        if system in BASELINES:
            return found
        bounds = {candidate: self.bound(candidate) for candidate in found}
        possible = [candidate for candidate in found if bounds[candidate] < math.inf]
        return sorted(
            possible,
            key=lambda candidate: (
                bounds[candidate],
                candidate.microbatches,
                -candidate.nano_batches,
            ),
        )

    def _choices(self, name: str, every: Sequence[Any]) -> Sequence[Any]:
        return every if name in self.open else [getattr(self.asked, name)]

    def _ways(
        self, system: str, configuration: Configuration
    ) -> Iterator[Configuration]:
        """Yield a system's configurations with these numbers of pipeline ranks and microbatches."""
        batch = self.batches[0]
        ranks = self.cluster.ranks // (self.cluster.tp * configuration.pp)
        divisors = [cp for cp in range(1, ranks + 1) if ranks % cp == 0]
        if system in ("perfect", "dynamic_cp"):
            yield replace(configuration, cp=1)
        elif system == "packing_cp":
            for cp in (
                divisors
                if configuration.packing_cp is None
                else {configuration.packing_cp}.intersection(divisors)
            ):
                if configuration.microbatches * (ranks // cp) <= len(batch.lengths):
                    yield replace(configuration, cp=cp, backward="resend")
                    if cp > 1:
                        yield replace(configuration, cp=cp, backward="keep")
        else:
            ways = dict[int, int]()
            for cp in self._choices("cp", divisors):
                # placed, documents are not bound to a row's ranks
                if step := self.step(system, replace(configuration, cp=cp)):
                    ways.setdefault(
                        cp
                        if configuration.placement == "loader"
                        else step.rows_per_rank % 2,
                        cp,
                    )
            divided = [replace(configuration, cp=cp) for cp in ways.values()]
            if system in BASELINES:
                yield from divided
                return
            if self.cluster.is_large:  # more ranks of a row take longer to plan
                divided = divided[:LOWEST_CP]
            for chosen in divided:
                yield from self._orders_of_work(chosen)

    def _orders_of_work(self, chosen: Configuration) -> Iterator[Configuration]:
        """Yield CAD's schedules and numbers of nano-batches."""
        schedules = self._choices("schedule", SCHEDULES)
        # schedules in ticks refuse to keep rows
        if chosen.pp > 1 and chosen.backward == "keep":
            schedules = ["1F1B"]
        if chosen.pp == 1:
            schedules = schedules[:1]
        for schedule, nano_batches in product(
            schedules, self._choices("nano_batches", (1, 2))
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
