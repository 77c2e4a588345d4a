"""The predicted time of a training step under several systems, on the same batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from torchtitan_cad.simulation.baselines import packed, packing_cp
from torchtitan_cad.simulation.batches import Batch, Split, draw_batches
from torchtitan_cad.simulation.costs import Costs
from torchtitan_cad.simulation.disaggregated import Disaggregated, Plans, halves_allowed
from torchtitan_cad.simulation.inputs import Cluster, Documents, Model, Placement, Rates, Schedule, Settings
from torchtitan_cad.simulation.memory import Memory, states, stock_attention, token_bytes
from torchtitan_cad.simulation.report import SYSTEMS, Report, SystemReport
from torchtitan_cad.simulation.step import Outcome, Step

MAX_PP = 8
MAX_MICROBATCHES = 8
"""Per pipeline rank, at most."""
MOST_PLACED = 40
"""Layouts to place where the settings do not ask for it, at most; each takes a few tenths of a second."""
TRIED, FINALISTS = 2, 3
"""Batches by which configurations of the baselines are ranked, and how many of the best are compared on all."""

Division = tuple[Costs, int, Split]
"""Costs with a kind of activation checkpointing, pipeline ranks, and how a batch is split over the ranks of a stage."""

Progress = Callable[[str], None]


def simulate(
    model: Model,
    cluster: Cluster,
    documents: Documents,
    settings: Settings | None = None,
    rates: Rates | None = None,
    progress: Progress = lambda text: None,
) -> Report:
    """Return the times of a step under every system of ``SYSTEMS``.

    All but ``perfect`` take one configuration that fits the memory and is fastest, ``greedy`` and ``cad`` by the first
    batch and the loader's homes; ``perfect`` takes the fastest for every batch, so that nothing is below it.

    Args:
        progress: is called with what is simulated next.

    Raises:
        ValueError: inputs that do not fit each other, or documents that no configuration can divide.
    """
    settings, rates = settings or Settings(), rates or Rates()
    models = [replace(model, checkpointing=kind) for kind in settings.checkpointing] or [model]
    every = [Costs(each, cluster, rates, replace(settings, placement="loader")) for each in models]
    progress("drawing documents")
    batches = draw_batches(documents)
    divisions = [(costs, *division) for costs in every for division in _divisions(cluster, batches[0])]
    if not divisions:
        raise ValueError(
            f"documents step_tokens = {documents.step_tokens} in rows of {documents.row_tokens} cannot be divided over "
            f"{cluster.ranks} ranks with tp = {cluster.tp}, pp = {cluster.pp}, cp = {cluster.cp}: set a multiple of "
            "ranks / (tp x pp x cp) rows, and rows that 2 x cp divides"
        )
    found: dict[str, list[Outcome] | str] = {}
    progress("perfect")
    found["perfect"] = _perfect(batches, every)
    progress("packed")
    own = [division for division in divisions if cluster.cp in (None, division[2].cp)]
    found["packed"] = _best_of([lambda batch, d=d: _packed(batch, *d) for d in own], batches)  # type: ignore[misc]
    progress("packing_cp")
    found["packing_cp"] = _best_of([choice for costs in every for choice in _packings(costs, batches[0])], batches)
    rows: tuple[tuple[str, str, Placement], ...] = (
        ("greedy", "greedy", "loader"),  # the paper places nothing
        ("cad", settings.planner.planner, settings.placement),
        ("cad_placed", settings.planner.planner, "balanced"),
    )
    chosen: dict[str, _Chosen | str] = {}
    for name, planner, placement in rows[: 2 if settings.placement == "balanced" else 3]:
        say = lambda text, name=name: progress(name + text)  # noqa: E731
        if planner not in chosen:
            others = [other.choice for other in chosen.values() if isinstance(other, _Chosen)]
            chosen[planner] = _choose(batches[0], divisions, planner, say, others)
        best = chosen[planner]
        if isinstance(best, str):
            found[name] = best
        elif name == "cad_placed" and best.parts * len(batches) > MOST_PLACED:
            found[name] = f"{best.parts * len(batches)} layouts to place: give --placement balanced, or fewer --batches"
        else:
            found[name] = _disaggregated(batches, best, planner, placement, say)
    systems = {name: SystemReport.of(found[name]) for name in SYSTEMS if name in found}
    return Report(model, cluster, rates, batches[0].tokens, systems)


def _divisions(cluster: Cluster, batch: Batch) -> Iterator[tuple[int, Split]]:
    """(pipeline ranks, split) of every way to divide the batch."""
    for pp in _pipelines(cluster):
        ranks = cluster.ranks // (cluster.tp * pp)
        for microbatches in _microbatches(pp, batch):
            split = Split.of(batch, ranks, microbatches, cluster.cp)
            if split is None:
                continue
            yield pp, split
            if split.rows_per_rank % 2:  # halves of whole rows are more even, and under TP there are no others
                even = Split.of(batch, ranks, microbatches, 2 * split.cp)
                if even is not None:
                    yield pp, even


def _pipelines(cluster: Cluster) -> list[int]:
    if cluster.pp is not None:
        return [cluster.pp]
    pps = [2**i for i in range(MAX_PP.bit_length())]
    return [pp for pp in pps if cluster.ranks % (cluster.tp * pp * (cluster.cp or 1)) == 0]


def _microbatches(pp: int, batch: Batch) -> list[int]:
    """Powers of two, and divisors of the rows; those that leave a pipeline emptier than half are left out."""
    most = MAX_MICROBATCHES * pp
    every = {2**i for i in range(most.bit_length())} | {m for m in range(1, most + 1) if len(batch.rows) % m == 0}
    return sorted(m for m in every if m <= most and 2 * m >= pp)


def _perfect(batches: list[Batch], every: list[Costs]) -> list[Outcome] | str:
    """Balanced, nothing exchanged for attention; TP and parameters as everywhere. The fastest for every batch.

    Rows do not bind it: whatever number of microbatches another system takes, it can take, too.
    """
    cluster = every[0].cluster
    choices, least = [], float("inf")
    for costs in every:
        for pp in _pipelines(cluster):
            for microbatches in _microbatches(pp, batches[0]):
                split = Split(microbatches, cluster.ranks // (cluster.tp * pp), 1, 1)
                step = Step(costs, batches[0], pp, split)
                activations = step.tokens * token_bytes(costs, step.layers, pp, min(pp, microbatches))
                working = stock_attention(costs, step.tokens, step.tokens, 1)
                memory = Memory(states(costs, step.ranks, pp), activations, attention=working)
                least = min(least, memory.total)
                if memory.total <= cluster.memory:
                    choices.append((costs, pp, split, memory))
    if not choices:
        return _too_large(cluster, least)
    outcomes = []
    for batch in batches:
        candidates = []
        for costs, pp, split, memory in choices:
            step = Step(costs, batch, pp, split)
            named = {"pp": pp, "microbatches": split.microbatches, "checkpointing": costs.model.checkpointing}
            candidates.append(Outcome(step.even("CAD1F1B", step.tp_share(2)), named, memory))
        outcomes.append(min(candidates, key=lambda outcome: outcome.seconds))
    return outcomes


def _packed(batch: Batch, costs: Costs, pp: int, split: Split) -> Outcome | None:
    outcome = packed(Step(costs, batch, pp, split))
    return outcome if outcome.memory.total <= costs.cluster.memory else None


def _packings(costs: Costs, batch: Batch) -> Iterator[Callable[[Batch], Outcome | None]]:
    for pp in _pipelines(costs.cluster):
        ranks = costs.cluster.ranks // (costs.cluster.tp * pp)
        for cp in (d for d in range(1, ranks + 1) if ranks % d == 0):
            for microbatches in _microbatches(pp, batch):
                if microbatches * (ranks // cp) <= len(batch.lengths):
                    yield lambda b, pp=pp, ranks=ranks, cp=cp, m=microbatches: packing_cp(costs, b, pp, ranks, cp, m)  # type: ignore[misc]


def _best_of(choices: list[Callable[[Batch], Outcome | None]], batches: list[Batch]) -> list[Outcome] | str:
    """Outcomes of the configuration that fits every batch in the memory and takes least time for all of them.

    Of those that are fastest for the first ``TRIED`` batches, ``FINALISTS`` that fit all batches are compared.
    """
    ranked = []
    for number, choice in enumerate(choices):
        outcomes = _outcomes(choice, batches[:TRIED])
        if outcomes is not None:
            ranked.append((_total(outcomes), number))
    finalists: list[list[Outcome]] = []
    for _, number in sorted(ranked):
        outcomes = _outcomes(choices[number], batches)
        if outcomes is not None:
            finalists.append(outcomes)
        if len(finalists) == FINALISTS:
            break
    return min(finalists, key=_total) if finalists else "no configuration fits the memory"


def _outcomes(choice: Callable[[Batch], Outcome | None], batches: list[Batch]) -> list[Outcome] | None:
    outcomes = []
    for batch in batches:
        outcome = choice(batch)
        if outcome is None:
            return None
        outcomes.append(outcome)
    return outcomes


def _total(outcomes: list[Outcome]) -> float:
    return sum(outcome.seconds for outcome in outcomes)


class _Choice(NamedTuple):
    """A configuration of CAD; ``bound``: seconds of the first batch, if everything were balanced and hidden."""

    bound: float
    costs: Costs
    pp: int
    split: Split
    schedule: Schedule
    nano_batches: int

    @property
    def planned_as(self) -> tuple:
        """What plans depend on. Only tolerances that are chosen by times depend on activation checkpointing."""
        kind = self.costs.model.checkpointing if self.costs.settings.auto_tolerance else ""
        return self.pp, self.split, self.schedule, self.nano_batches, kind

    def system(self, batch: Batch, planner: str, plans: Plans | None = None) -> Disaggregated:
        step = Step(self.costs, batch, self.pp, self.split)
        return Disaggregated(step, planner, self.nano_batches, self.schedule, plans)


def _choices(batch: Batch, divisions: list[Division]) -> list[_Choice]:
    """By their bounds, smaller numbers of microbatches and halves first."""
    choices = []
    for costs, pp, split in divisions:
        step, settings = Step(costs, batch, pp, split), costs.settings
        kept = settings.backward == "keep"  # which schedules in ticks refuse
        schedules = [each for each in settings.schedules if each != "CAD1F1B" or not kept]
        for schedule in schedules if pp > 1 else settings.schedules[:1]:
            for nano_batches in (1, 2) if settings.nano_batches is None else (settings.nano_batches,):
                if halves_allowed(step, nano_batches):
                    bound = step.even(schedule, step.tp_share(nano_batches)).total
                    choices.append(_Choice(bound, costs, pp, split, schedule, nano_batches))
    return sorted(choices, key=lambda c: (c.bound, c.split.microbatches, -c.nano_batches))


class _Chosen(NamedTuple):
    choice: _Choice
    ping_pong: float | None
    """Seconds of the first batch without halves over those with them."""

    @property
    def parts(self) -> int:
        """Microbatches of a step, or halves of them."""
        return self.choice.split.microbatches * self.choice.nano_batches


def _choose(
    batch: Batch, divisions: list[Division], planner: str, progress: Progress, others: Sequence[_Choice]
) -> _Chosen | str:
    """Choose by one batch. What even perfect balance would leave behind the best so far is not planned.

    Args:
        others: what other planners chose, tried first: most choices are then left before all their plans are made.
    """
    cluster = divisions[0][0].cluster
    best: _Choice | None = None
    fastest = least = float("inf")
    plans: dict[tuple, Plans] = {}
    for choice in [*others, *_choices(batch, divisions)]:
        if choice.bound >= fastest:
            break
        if best is not None and choice.pp == 1 == best.pp and choice.split.microbatches > best.split.microbatches:
            continue  # without a pipeline smaller microbatches only leave less to balance
        progress(f": pp {choice.pp}, {choice.split.microbatches} microbatches in {choice.nano_batches}")
        system = choice.system(batch, planner, plans.setdefault(choice.planned_as, {}))
        needed = system.memory().total
        if needed <= cluster.memory:
            seconds = system.total(fastest)
            if seconds < fastest:
                needed = system.memory().total
                if needed <= cluster.memory:
                    best, fastest = choice, seconds
        least = min(least, needed)
    if best is None:
        return _too_large(cluster, least)
    if best.nano_batches == 1 or best.costs.settings.nano_batches is not None:
        return _Chosen(best, None)
    single = best._replace(nano_batches=1)
    seconds = single.system(batch, planner, plans.setdefault(single.planned_as, {})).total()
    return _Chosen(best, seconds / fastest)


def _disaggregated(
    batches: list[Batch], chosen: _Chosen, planner: str, placement: Placement, progress: Progress
) -> list[Outcome] | str:
    choice = chosen.choice._replace(costs=chosen.choice.costs.placed(placement))
    cluster, outcomes = choice.costs.cluster, []
    for number, batch in enumerate(batches, start=1):
        progress(f": batch {number} of {len(batches)}")
        outcome = choice.system(batch, planner).outcome()
        if outcome.memory.total > cluster.memory:
            return _too_large(cluster, outcome.memory.total)
        if chosen.ping_pong:
            outcome.details["single_stream_over_ping_pong"] = chosen.ping_pong
        outcomes.append(outcome)
    return outcomes


def _too_large(cluster: Cluster, needed: float) -> str:
    return f"needs at least {needed / 1e9:.1f} GB of a GPU's {cluster.memory / 1e9:.1f} GB"
