"""The one search: configurations of a step, tried on the same batches for ``simulate`` and ``advise``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from torchtitan_cad.simulation.baselines import packed, packing_cp, perfect
from torchtitan_cad.simulation.batches import Batch, Split
from torchtitan_cad.simulation.costs import Costs
from torchtitan_cad.simulation.disaggregated import Disaggregated, Plans, halves_allowed
from torchtitan_cad.simulation.inputs import (
    Checkpointing,
    Cluster,
    Model,
    Placement,
    Rates,
    Schedule,
    Settings,
    with_tolerance,
)
from torchtitan_cad.simulation.step import Outcome, Step

MAX_PP = 8
MAX_MICROBATCHES = 8
"""microbatches per pipeline rank: most that are tried."""
TRIED, FINALISTS = 2, 3
"""batches: those that rank the baselines' configurations; configurations: the best of them, compared on all batches."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Configuration:
    """How a system divides and runs a step, whose tokens stay as they are."""

    pp: int = 1
    cp: int = 1
    microbatches: int = 1
    checkpointing: Checkpointing = "none"
    nano_batches: int = 1
    schedule: Schedule = "1F1B"
    tolerance: float | Literal["auto"] = 0.02
    backward: Literal["resend", "keep"] = "resend"
    ranks_per_node: int | None = None
    """None: plans do not know the nodes."""
    placement: Placement = "loader"

    def changes(self, other: Configuration) -> dict[str, Any]:
        """Return the fields that differ from the other's, with the values here."""
        return {key: value for key, value in vars(self).items() if value != getattr(other, key)}


@dataclass(frozen=True)
class Trial:
    """A system with one configuration: one outcome per batch; none if it cannot be, for ``reason``.

    Attributes:
        memory: bytes of the fullest GPU; 0 if they are not known.
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
        return statistics.fmean(o.seconds for o in self.outcomes) if self.fits else math.inf

    def part(self, name: str) -> float:
        """Return the seconds of one of ``PARTS``, the mean over the batches."""
        return statistics.fmean(getattr(o.parts, name) for o in self.outcomes)

    def gain_over(self, other: Trial) -> float | None:
        """Return the gain in speed, 0.1 for 10 %; None if one does not fit."""
        return other.seconds / self.seconds - 1 if self.fits and other.fits else None

    def over(self, other: Trial) -> dict[str, float] | None:
        """Compare the speed with another's: least, mean and most over the batches. None if one does not fit."""
        if not (self.fits and other.fits):
            return None
        ratios = [theirs.seconds / mine.seconds for mine, theirs in zip(self.outcomes, other.outcomes, strict=True)]
        return {"min": min(ratios), "mean": statistics.fmean(ratios), "max": max(ratios)}


@dataclass(eq=False)
class Search:
    """Tries configurations of the systems "packed", "packing_cp" and "perfect", and of CAD by its planner's name.

    Attributes:
        refused: why the job could not start with a configuration; empty if it could.
        progress: is called with what is simulated next.
    """

    model: Model
    cluster: Cluster
    batches: list[Batch]
    settings: Settings
    rates: Rates
    refused: Callable[[Configuration], str] = lambda configuration: ""
    progress: Progress = lambda text: None
    _known: dict[tuple[str, Configuration, int], Trial] = field(default_factory=dict)
    _plans: dict[tuple[str, Configuration], Plans] = field(default_factory=dict)
    _costs: dict[tuple, Costs] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.costs(self.settled())  # heads and profiles that do not fit are errors before anything is simulated

    def costs(self, configuration: Configuration) -> Costs:
        """Return the costs of a configuration."""
        names = ("tolerance", "ranks_per_node", "backward", "placement", "checkpointing")
        key = tuple(getattr(configuration, name) for name in names)
        if key not in self._costs:
            self._costs[key] = self._make_costs(configuration)
        return self._costs[key]

    def _make_costs(self, configuration: Configuration) -> Costs:
        settings = replace(
            with_tolerance(self.settings, configuration.tolerance),
            node_aware=configuration.ranks_per_node is not None,
            backward=configuration.backward,
            placement=configuration.placement,
        )
        model = replace(self.model, checkpointing=configuration.checkpointing)
        return Costs(model, self.cluster, self.rates, settings)

    def step(self, system: str, configuration: Configuration, batch: Batch | None = None) -> Step | None:
        """Divide a batch, by default the first; None if it cannot be. Rows bind neither packing nor ``perfect``."""
        batch, pp, cp = batch or self.batches[0], configuration.pp, configuration.cp
        ranks, rest = divmod(self.cluster.ranks, self.cluster.tp * pp)
        if rest or ranks % cp:
            return None
        if system in ("packing_cp", "perfect"):
            split: Split | None = Split(configuration.microbatches, ranks, cp, 1)
        else:
            split = Split.of(batch, ranks, configuration.microbatches, cp)
        return None if split is None else Step(self.costs(configuration), batch, pp, split)

    def run(self, system: str, configuration: Configuration, batches: int | None = None) -> Trial:
        """Simulate a configuration, once, on the first ``batches``, by default on all."""
        count = batches or len(self.batches)
        key = (system, configuration, count)
        if key not in self._known:
            self._known[key] = self._run(system, configuration, self.batches[:count])
        return self._known[key]

    def _run(self, system: str, configuration: Configuration, batches: list[Batch]) -> Trial:
        is_cad = system not in BASELINES
        if is_cad and (reason := self.refused(configuration)):
            return Trial(configuration, reason=reason)
        outcomes, most = [], 0.0
        for number, batch in enumerate(batches, start=1):
            step = self.step(system, configuration, batch)
            if step is None:
                return Trial(configuration, reason="the step's rows cannot be divided so")
            if not is_cad:
                outcome = BASELINES[system](step)
                if outcome is None:
                    return Trial(configuration, reason="no memory for so many tokens")
            elif not halves_allowed(step, configuration.nano_batches):
                return Trial(configuration, reason="TP halves microbatches by whole rows")
            else:
                self.progress(f"{system}: batch {number} of {len(batches)}, {_named(configuration)}")
                cad = self._cad(system, configuration, step)
                if cad.memory().total > self.cluster.memory:  # even without what plans take
                    return self._too_large(configuration, cad.memory().total)
                outcome = cad.outcome()
            most = max(most, outcome.memory.total)
            if most > self.cluster.memory:
                return self._too_large(configuration, most)
            outcomes.append(outcome)
        return Trial(configuration, tuple(outcomes), most)

    def _too_large(self, configuration: Configuration, memory: float) -> Trial:
        text = f"needs {memory / 1e9:.1f} GB of a GPU's {self.cluster.memory / 1e9:.1f} GB"
        return Trial(configuration, memory=memory, reason=text)

    def _cad(self, planner: str, configuration: Configuration, step: Step) -> Disaggregated:
        """Of the first batch plans are kept: activation checkpointing changes them with automatic tolerances alone."""
        plans: Plans = {}
        if step.batch is self.batches[0]:
            kept = configuration if configuration.tolerance == "auto" else replace(configuration, checkpointing="none")
            plans = self._plans.setdefault((planner, kept), {})
        return Disaggregated(step, planner, configuration.nano_batches, configuration.schedule, plans)

    def fastest(self, system: str, candidates: Iterable[Configuration]) -> Trial:
        """Return the configuration that fits every batch and takes the least time.

        Baselines are ranked by the first ``TRIED`` batches, and the ``FINALISTS`` best compared on all.
        """
        tried = [self.run(system, each, min(TRIED, len(self.batches))) for each in candidates]
        fitting = (self.run(system, each.configuration) for each in sorted(tried, key=lambda t: t.seconds) if each.fits)
        finalists = [trial for trial, _ in zip((t for t in fitting if t.fits), range(FINALISTS), strict=False)]
        return min(finalists, key=lambda trial: trial.seconds) if finalists else self.none(tried)

    def fastest_cad(self, planner: str, candidates: Iterable[Configuration]) -> Trial:
        """Return the fastest of CAD's configurations by the first batch.

        What even perfect balance would leave behind the best so far is not planned.
        """
        best, fastest, large = None, math.inf, []
        for candidate in candidates:
            step = self.step(planner, candidate)
            if step is None or self.bound(step, candidate) >= fastest:
                continue
            if best is not None and candidate.pp == 1 == best.pp and candidate.microbatches > best.microbatches:
                continue  # without a pipeline smaller microbatches only leave less to balance
            self.progress(f"{planner}: {_named(candidate)}")
            cad = self._cad(planner, candidate, step)
            needed = cad.memory().total
            if needed <= self.cluster.memory and (seconds := cad.total()) < fastest:
                needed = cad.memory().total
                if needed <= self.cluster.memory:
                    best, fastest = candidate, seconds
            if needed > self.cluster.memory:
                large.append(self._too_large(candidate, needed))
        return self.none(large) if best is None else self.run(planner, best, 1)

    def bound(self, step: Step, configuration: Configuration) -> float:
        """Return the seconds of a step if everything were balanced and hidden."""
        return step.even(configuration.schedule, step.tp_share(configuration.nano_batches)).total

    def none(self, tried: list[Trial]) -> Trial:
        """Return the trial that is nearest to fitting, of some that do not."""
        known = [trial for trial in tried if trial.memory]
        if known:
            return min(known, key=lambda trial: trial.memory)
        return Trial(Configuration(), reason="no configuration fits the memory")

    def candidates(self, system: str) -> list[Configuration]:
        """List the configurations of a system that the settings leave open, for CAD the most promising first."""
        settings, found = self.settings, []
        kinds = settings.checkpointing or (self.model.checkpointing,)
        for base in (replace(self.settled(), checkpointing=kind) for kind in kinds):
            for pp in pipelines(self.cluster):
                for microbatches in _microbatches(pp, self.batches[0]):
                    now = replace(base, pp=pp, microbatches=microbatches)
                    found += [each for each in self._ways(system, now)]
        if system in BASELINES:
            return found
        steps = [(self.step(system, each), each) for each in found]
        bounds = {
            each: self.bound(step, each) for step, each in steps if step and halves_allowed(step, each.nano_batches)
        }
        return sorted(bounds, key=lambda each: (bounds[each], each.microbatches, -each.nano_batches))

    def settled(self) -> Configuration:
        """Return a configuration with what the settings say of plans, and the loader's homes."""
        settings = self.settings
        return Configuration(
            tolerance="auto" if settings.auto_tolerance else settings.planner.tolerance,
            backward=settings.backward,
            ranks_per_node=self.cluster.ranks_per_node if settings.node_aware else None,
        )

    def _ways(self, system: str, now: Configuration) -> Iterator[Configuration]:
        """Yield a system's configurations of so many pipeline ranks and microbatches."""
        batch, ranks = self.batches[0], self.cluster.ranks // (self.cluster.tp * now.pp)
        if system == "perfect":
            yield now
        elif system == "packing_cp":
            divisors = range(1, ranks + 1) if self.settings.packing_cp is None else [self.settings.packing_cp]
            for cp in (each for each in divisors if ranks % each == 0):
                if now.microbatches * (ranks // cp) <= len(batch.lengths):
                    yield replace(now, cp=cp, backward="resend")
                    if cp > 1:
                        yield replace(now, cp=cp, backward="keep")
        elif split := Split.of(batch, ranks, now.microbatches, self.cluster.cp):
            cps = [split.cp]
            if split.rows_per_rank % 2 and Split.of(batch, ranks, now.microbatches, 2 * split.cp):
                cps.append(2 * split.cp)  # halves of whole rows are more even, and under TP there are no others
            for each in (replace(now, cp=cp) for cp in cps):
                if system != "packed":
                    yield from self._cads(each)
                elif self.cluster.cp in (None, each.cp):
                    yield each

    def _cads(self, now: Configuration) -> Iterator[Configuration]:
        settings = self.settings  # schedules in ticks refuse to keep rows
        schedules = [each for each in settings.schedules if each == "1F1B" or settings.backward == "resend"]
        for schedule in schedules if now.pp > 1 else settings.schedules[:1]:
            for nano_batches in (1, 2) if settings.nano_batches is None else (settings.nano_batches,):
                yield replace(now, schedule=schedule, nano_batches=nano_batches)


BASELINES: dict[str, Callable[[Step], Outcome | None]] = {
    "packed": packed,
    "packing_cp": packing_cp,
    "perfect": perfect,
}


def pipelines(cluster: Cluster) -> list[int]:
    """List the numbers of pipeline ranks to try."""
    if cluster.pp is not None:
        return [cluster.pp]
    pps = [2**i for i in range(MAX_PP.bit_length())]
    return [pp for pp in pps if cluster.ranks % (cluster.tp * pp * (cluster.cp or 1)) == 0]


def _microbatches(pp: int, batch: Batch) -> list[int]:
    """Powers of two, and divisors of the rows; those that leave a pipeline emptier than half are left out."""
    most = MAX_MICROBATCHES * pp
    every = {2**i for i in range(most.bit_length())} | {m for m in range(1, most + 1) if len(batch.rows) % m == 0}
    return sorted(m for m in every if m <= most and 2 * m >= pp)


def _named(configuration: Configuration) -> str:
    return ", ".join(f"{key} {value}" for key, value in asdict(configuration).items())
