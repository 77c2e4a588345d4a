"""Recommends settings of a job by simulation: one changed at a time, then those that gain together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from torchtitan_cad.simulation.baselines import packed
from torchtitan_cad.simulation.batches import Batch, Split, draw_batches
from torchtitan_cad.simulation.costs import Costs
from torchtitan_cad.simulation.disaggregated import Disaggregated, halves_allowed
from torchtitan_cad.simulation.inputs import (
    CHECKPOINTING,
    PLACEMENTS,
    SCHEDULES,
    Checkpointing,
    Cluster,
    Documents,
    Model,
    Placement,
    Rates,
    Schedule,
    Settings,
    with_tolerance,
)
from torchtitan_cad.simulation.step import Step

LEAST_GAIN = 0.01
"""Least gain of a setting to be recommended, and of CAD to be worth it."""
TOLERANCES: tuple[float | Literal["auto"], ...] = (0.0, 0.02, 0.05, 0.1, 0.2, "auto")
MICROBATCHES = (1, 2, 4, 8)
"""Per pipeline rank, where the number of pipeline ranks changes."""
MOST_CHANGES = 6
"""Changes taken together, at most."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Choice:
    """Settings that advice may change. The tokens of a step stay as they are."""

    nano_batches: int
    tolerance: float | Literal["auto"]
    backward: Literal["resend", "keep"]
    ranks_per_node: int | None
    """None: plans do not know the nodes."""
    placement: Placement
    checkpointing: Checkpointing
    cp: int
    pp: int
    microbatches: int
    schedule: Schedule

    def changes(self, other: Choice) -> dict[str, Any]:
        """Return the fields that differ from the other, with the values here."""
        mine = asdict(self)
        return {
            field.name: mine[field.name] for field in fields(self) if mine[field.name] != getattr(other, field.name)
        }


@dataclass(frozen=True)
class Trial:
    """One simulated choice.

    Attributes:
        seconds: per step, the mean; None if it cannot be, for ``reason``.
        memory: bytes of the fullest GPU.
    """

    choice: Choice
    seconds: float | None = None
    memory: float = 0.0
    reason: str = ""

    def gain_over(self, other: Trial) -> float | None:
        """Return the gain in speed, 0.1 for 10 %."""
        return None if self.seconds is None or other.seconds is None else other.seconds / self.seconds - 1


@dataclass(frozen=True)
class Advice:
    """Findings of ``advise``.

    Attributes:
        written: the job as it is, with CAD.
        base: the same with as much activation checkpointing as it needs to fit; gains are over it.
        without_written: the job as it is, without CAD.
        without: without CAD at the best of the degrees and kinds of checkpointing that were tried for it.
        best: with CAD and what is recommended.
        trials: by setting, every value tried on ``base``.
        worth: by setting that ``best`` changes, how much longer a step takes without that change alone; None if it then
            does not fit.
        beside: by choice of a trial that gains alone but is not taken, ``best`` with its change as well.
    """

    written: Trial
    base: Trial
    without_written: Trial
    without: Trial
    best: Trial
    trials: dict[str, list[Trial]]
    worth: dict[str, float | None]
    beside: dict[Choice, Trial]

    @property
    def speedup(self) -> float | None:
        """Speed with CAD over that without; None if either way does not fit."""
        gain = self.best.gain_over(self.without)
        return None if gain is None else 1 + gain

    @property
    def worth_it(self) -> bool:
        """Tell whether the job should use CAD: it fits, and gains ``LEAST_GAIN`` or does not fit otherwise."""
        if self.best.seconds is None:
            return False
        return self.speedup is None or self.speedup >= 1 + LEAST_GAIN


def advise(
    model: Model,
    cluster: Cluster,
    documents: Documents,
    settings: Settings,
    rates: Rates,
    job: Choice,
    refused: Callable[[Choice], str] = lambda choice: "",
    progress: Progress = lambda text: None,
) -> Advice:
    """Return the settings by which a step of the job takes the least time, of those that gain at least ``LEAST_GAIN``.

    Args:
        settings: of the job; ``job`` replaces what both have.
        refused: why the job could not start with a choice; empty if it could.
        progress: is called with what is simulated next.

    Raises:
        ValueError: inputs that do not fit each other.
    """
    progress("drawing documents")
    jobs = _Simulated(model, cluster, draw_batches(documents), settings, rates, refused, progress)
    if jobs.split(job) is None:
        raise ValueError(
            f"documents step_tokens = {documents.step_tokens} in rows of {documents.row_tokens} cannot be divided over "
            f"{cluster.ranks} ranks with tp = {cluster.tp}, pp = {job.pp}, cp = {job.cp} in {job.microbatches} "
            "microbatches: set a global_batch_size that divides so"
        )
    written = jobs.run(job)
    base = _made_to_fit(jobs, written)
    trials = {name: [jobs.run(c) for c in choices] for name, choices in _alternatives(jobs, base.choice).items()}
    best = _improve(jobs, base, [trial for every in trials.values() for trial in every])
    for _ in range(MOST_CHANGES):
        best, worth = _only_what_is_needed(jobs, base, best)
        beside = _beside(jobs, base, best, [trial for every in trials.values() for trial in every])
        better = max(beside.values(), key=lambda trial: trial.gain_over(best) or 0.0, default=best)
        if (better.gain_over(best) or 0.0) < LEAST_GAIN:
            break
        best = better
    tried = [trial.choice for every in trials.values() for trial in every] + [base.choice, best.choice]
    without = [jobs.without(choice) for choice in _degrees(jobs, job, tried)]
    fitting = [trial for trial in without if trial.seconds is not None]
    least = min(fitting, key=lambda t: t.seconds or 0.0) if fitting else min(without, key=lambda t: t.memory)
    alone = jobs.without(job, own=True)
    return Advice(written, base, alone, least, best, trials, worth, beside)


class _Simulated:
    """Choices of one job on the same batches; each is simulated once."""

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        batches: list[Batch],
        settings: Settings,
        rates: Rates,
        refused: Callable[[Choice], str],
        progress: Progress,
    ) -> None:
        self.model, self.cluster, self.batches, self.settings, self.rates = model, cluster, batches, settings, rates
        self._refused, self._progress = refused, progress
        self._known: dict[tuple[Choice, int], Trial] = {}

    def split(self, choice: Choice) -> Split | None:
        """Divide the batch as the choice says; None if it cannot be."""
        shares = self.cluster.tp * choice.pp * choice.cp
        if self.cluster.ranks % shares:
            return None
        return Split.of(
            self.batches[0], self.cluster.ranks // (self.cluster.tp * choice.pp), choice.microbatches, choice.cp
        )

    def run(self, choice: Choice, batches: int | None = None) -> Trial:
        """Simulate the choice with CAD on so many batches, by default on all."""
        count = batches or len(self.batches)
        key = (choice, count)
        if key not in self._known:
            self._known[key] = self._run(choice, self.batches[:count])
        return self._known[key]

    def without(self, choice: Choice, own: bool = False) -> Trial:
        """Simulate the choice without CAD, with the kind of checkpointing that is best, or with its own.

        torchtitan alone has no kind that keeps core attention's output. The best may be that all the same, so that no
        gain counts for CAD that comes without its exchanges.
        """
        trials: list[Trial] = []
        written: Checkpointing = "full" if choice.checkpointing == "linear" else choice.checkpointing
        for kind in (written,) if own else CHECKPOINTING:
            split, costs = self.split(choice), self._costs(replace(choice, checkpointing=kind))
            assert split is not None
            outcomes = [packed(Step(costs, batch, choice.pp, split)) for batch in self.batches]
            memory = max(outcome.memory.total for outcome in outcomes)
            mine = replace(choice, checkpointing=kind)
            if memory > self.cluster.memory:
                trials.append(Trial(mine, memory=memory, reason=self._too_large(memory)))
            else:
                trials.append(Trial(mine, sum(o.seconds for o in outcomes) / len(outcomes), memory))
        return min(trials, key=lambda t: (t.seconds is None, t.seconds or t.memory))

    def _run(self, choice: Choice, batches: list[Batch]) -> Trial:
        reason = self._refused(choice)
        split = self.split(choice)
        if reason or split is None:
            return Trial(choice, reason=reason or "the step's rows cannot be divided so")
        self._progress(", ".join(f"{key} {value}" for key, value in asdict(choice).items()))
        costs, seconds, memory = self._costs(choice), 0.0, 0.0
        for batch in batches:
            step = Step(costs, batch, choice.pp, split)
            if not halves_allowed(step, choice.nano_batches):
                return Trial(choice, reason="TP halves microbatches by whole rows")
            system = Disaggregated(step, costs.settings.planner.planner, choice.nano_batches, choice.schedule)
            if (memory := max(memory, system.memory().total)) <= self.cluster.memory:
                seconds += system.total() / len(batches)
                memory = max(memory, system.memory().total)
            if memory > self.cluster.memory:
                return Trial(choice, memory=memory, reason=self._too_large(memory))
        return Trial(choice, seconds, memory)

    def _costs(self, choice: Choice) -> Costs:
        settings = replace(
            with_tolerance(self.settings, choice.tolerance),
            node_aware=choice.ranks_per_node is not None,
            backward=choice.backward,
            placement=choice.placement,
        )
        return Costs(replace(self.model, checkpointing=choice.checkpointing), self.cluster, self.rates, settings)

    def _too_large(self, memory: float) -> str:
        return f"needs {memory / 1e9:.1f} GB of a GPU's {self.cluster.memory / 1e9:.1f} GB"


def _made_to_fit(jobs: _Simulated, written: Trial) -> Trial:
    """Return the job, with as much activation checkpointing as it needs; if that is not enough, with other degrees as
    well.
    """
    if written.seconds is not None:
        return written
    more = CHECKPOINTING[CHECKPOINTING.index(written.choice.checkpointing) + 1 :]
    for kind in more:
        trial = jobs.run(replace(written.choice, checkpointing=kind))
        if trial.seconds is not None:
            return trial
    full = replace(written.choice, checkpointing="full")
    others = [jobs.run(c) for choices in _alternatives(jobs, full).values() for c in choices]
    return min((t for t in others if t.seconds is not None), key=lambda t: t.seconds or 0.0, default=written)


def _alternatives(jobs: _Simulated, now: Choice) -> dict[str, list[Choice]]:
    """By setting, the other values to try. Degrees come with halves, and with both schedules, that they may allow."""
    cluster = jobs.cluster
    found: dict[str, list[Choice]] = {
        "nano_batches": [replace(now, nano_batches=3 - now.nano_batches)],
        "tolerance": [replace(now, tolerance=value) for value in TOLERANCES if value != now.tolerance],
        "backward": [replace(now, backward="keep" if now.backward == "resend" else "resend")],
        "ranks_per_node": [],
        "placement": [replace(now, placement=other) for other in PLACEMENTS if other != now.placement],
        "checkpointing": [
            replace(now, checkpointing=kind) for kind in CHECKPOINTING[: CHECKPOINTING.index(now.checkpointing)]
        ],
        "cp": list(_other_cp(jobs, now)),
        "pp": list(_other_pp(jobs, now)),
        "schedule": [replace(now, schedule=other) for other in SCHEDULES if other != now.schedule and now.pp > 1],
    }
    if now.ranks_per_node is not None:
        found["ranks_per_node"] = [replace(now, ranks_per_node=None)]
    elif cluster.ranks > cluster.ranks_per_node and cluster.group_per_node > 1:
        found["ranks_per_node"] = [replace(now, ranks_per_node=cluster.ranks_per_node)]
    return {name: choices for name, choices in found.items() if choices}


def _degrees(jobs: _Simulated, job: Choice, tried: list[Choice]) -> list[Choice]:
    """Return the job's degrees without CAD, those tried with it, and every power of two of context-parallel ranks."""
    found: dict[Choice, None] = {}
    for choice in tried:
        for cp in {choice.cp, *(2**i for i in range(jobs.cluster.ranks.bit_length()))}:
            other = replace(job, pp=choice.pp, microbatches=choice.microbatches, cp=cp, schedule="1F1B")
            if jobs.split(other) is not None:
                found[other] = None
    return list(found)


def _other_cp(jobs: _Simulated, now: Choice) -> Iterator[Choice]:
    for cp in (2 * now.cp, now.cp // 2):
        if cp and jobs.split(replace(now, cp=cp)) is not None:
            for nano_batches in sorted({now.nano_batches, 2}):
                yield replace(now, cp=cp, nano_batches=nano_batches)


def _other_pp(jobs: _Simulated, now: Choice) -> Iterator[Choice]:
    for pp in (2 * now.pp, now.pp // 2):
        if not pp or pp > jobs.model.layers:
            continue
        for per_rank in MICROBATCHES:
            choice = replace(now, pp=pp, microbatches=per_rank * pp)
            if jobs.split(choice) is None:
                continue
            for schedule in SCHEDULES if pp > 1 else (now.schedule,):
                for nano_batches in sorted({now.nano_batches, 2}):
                    yield replace(choice, schedule=schedule, nano_batches=nano_batches)


def _improve(jobs: _Simulated, base: Trial, trials: list[Trial]) -> Trial:
    """Take the best change as long as one gains; later ones are ranked by the first batch."""
    best = base
    for _ in range(MOST_CHANGES):
        fitting = [trial for trial in trials if trial.seconds is not None]
        if best.seconds is None or not fitting:
            return best
        candidate = jobs.run(min(fitting, key=lambda trial: trial.seconds or 0.0).choice)
        gain = candidate.gain_over(best)
        if gain is None or gain < LEAST_GAIN:
            return best
        best = candidate
        trials = [jobs.run(c, 1) for choices in _alternatives(jobs, best.choice).values() for c in choices]
    return best


def _only_what_is_needed(jobs: _Simulated, base: Trial, best: Trial) -> tuple[Trial, dict[str, float | None]]:
    """Take back every change without which a step is less than ``LEAST_GAIN`` longer; says what others are worth."""
    groups = (("tolerance",), ("backward",), ("ranks_per_node",), ("placement",), ("nano_batches",), ("checkpointing",),
              ("cp",), ("pp", "microbatches", "schedule"))  # fmt: skip
    worth: dict[str, float | None] = {}
    for last in (False, True):  # what was left out changes what others are worth
        for group in groups:
            back = replace(best.choice, **{name: getattr(base.choice, name) for name in group})
            if back == best.choice:
                continue
            gain = best.gain_over(jobs.run(back))
            if last:
                worth[next(name for name in group if name in back.changes(best.choice))] = gain
            elif gain is not None and gain < LEAST_GAIN:
                best = jobs.run(back)
    return best, worth


def _beside(jobs: _Simulated, base: Trial, best: Trial, trials: list[Trial]) -> dict[Choice, Trial]:
    """Add every change that gains alone but is not taken to what is taken."""
    taken = best.choice.changes(base.choice)
    found: dict[Choice, Trial] = {}
    for trial in trials:
        changes = trial.choice.changes(base.choice)
        if (trial.gain_over(base) or 0.0) >= LEAST_GAIN and not changes.items() <= taken.items():
            found[trial.choice] = jobs.run(replace(best.choice, **changes))
    return found
