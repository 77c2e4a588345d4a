"""The predicted time of a training step under several systems, on the same batches. Imports planning only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from .baselines import packed, packing_cp
from .batches import Batch, Split, draw_batches
from .costs import Costs
from .disaggregated import Disaggregated, halves_allowed
from .inputs import Cluster, Documents, Model, Rates, Settings
from .memory import Memory, states, token_bytes
from .report import SYSTEMS, Report, SystemReport
from .step import Outcome, Step

MAX_PP = 8
MAX_MICROBATCHES = 8
"""Per pipeline rank, at most."""
TRIED, FINALISTS = 2, 3
"""Batches by which configurations of the baselines are ranked, and how many of the best are compared on all."""
ROUNDING = 1e-9
"""What sums of the same seconds in another order may differ by, relatively."""

VARIED = ("net", "node", "latency", "memory", "linear_flops", "attention_flops", "backward_flops", "tolerance")

Progress = Callable[[str], None]


def simulate(
    model: Model,
    cluster: Cluster,
    documents: Documents,
    settings: Settings | None = None,
    rates: Rates | None = None,
    progress: Progress = lambda text: None,
) -> Report:
    """Times of a step under every system of ``SYSTEMS``.

    ``packed``, ``packing_cp``, ``greedy`` and ``cad`` take the configuration that fits the memory and is fastest, the
    last two by their first batch; ``perfect`` takes the fastest for every batch, so that nothing is below it.

    Args:
        progress: is called with what is simulated next.

    Raises:
        ValueError: inputs that do not fit each other, or documents that no configuration can divide.
    """
    costs = Costs(model, cluster, rates or Rates(), settings)
    progress("drawing documents")
    batches = draw_batches(documents)
    divisions = list(_divisions(cluster, batches[0]))
    if not divisions:
        raise ValueError(
            f"documents step_tokens = {documents.step_tokens} in rows of {documents.row_tokens} cannot be divided over "
            f"{cluster.ranks} ranks with tp = {cluster.tp}, pp = {cluster.pp}, cp = {cluster.cp}: set a multiple of "
            "ranks / (tp x pp x cp) rows, and rows that 2 x cp divides"
        )
    found: dict[str, list[Outcome] | str] = {}
    progress("perfect")
    found["perfect"] = _perfect(costs, batches, divisions)
    progress("packed")
    own = [(pp, split) for pp, split in divisions if cluster.cp in (None, split.cp)]
    found["packed"] = _best_of([lambda batch, d=d: _packed(costs, batch, *d) for d in own], batches)  # type: ignore[misc]
    progress("packing_cp")
    found["packing_cp"] = _best_of(list(_packings(costs, batches[0])), batches)
    for name, planner in (("greedy", "greedy"), ("cad", costs.settings.planner.planner)):
        found[name] = _disaggregated(costs, batches, divisions, planner, lambda text, name=name: progress(name + text))  # type: ignore[misc]
    return _report(costs, batches, found)


def _divisions(cluster: Cluster, batch: Batch) -> Iterator[tuple[int, Split]]:
    """(pipeline ranks, split) of every way to divide the batch."""
    for pp in _pipelines(cluster):
        ranks = cluster.ranks // (cluster.tp * pp)
        for microbatches in _microbatches(pp, batch):
            split = Split.of(batch, ranks, microbatches, cluster.cp)
            if split is None:
                continue
            yield pp, split
            if cluster.tp > 1 and split.rows_per_rank % 2:
                even = Split.of(batch, ranks, microbatches, 2 * split.cp)  # TP lets ping-pong halve by whole rows only
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
    return sorted(m for m in every if m <= most and (2 * m >= pp))


def _perfect(costs: Costs, batches: list[Batch], divisions: list[tuple[int, Split]]) -> list[Outcome] | str:
    """Balanced, nothing exchanged for attention; TP and parameters as everywhere. The fastest for every batch."""
    choices = []
    for pp, split in divisions:
        step = Step(costs, batches[0], pp, split)
        memory = Memory(
            states(costs, step.ranks, pp),
            step.tokens * token_bytes(costs, step.layers, pp, min(pp, split.microbatches)),
        )
        if memory.total <= costs.cluster.memory:
            choices.append((pp, split, memory))
    if not choices:
        pp, split = divisions[-1]
        return _too_large(costs, memory.total)
    outcomes = []
    for batch in batches:
        every = []
        for pp, split, memory in choices:
            step = Step(costs, batch, pp, split)
            parts = step.even("CAD1F1B", step.tp_share(2))
            named = {"pp": pp, "dp": step.ranks // split.cp, "cp": split.cp, "microbatches": split.microbatches}
            every.append(Outcome(parts, named, memory))
        outcomes.append(min(every, key=lambda outcome: outcome.seconds))
    return outcomes


def _packed(costs: Costs, batch: Batch, pp: int, split: Split) -> Outcome | None:
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


def _disaggregated(
    costs: Costs, batches: list[Batch], divisions: list[tuple[int, Split]], planner: str, progress: Progress
) -> list[Outcome] | str:
    """Chooses by the first batch. What even perfect balance would leave behind the best so far is not planned."""
    settings, memory = costs.settings, costs.cluster.memory
    choices = []
    for pp, split in divisions:
        step = Step(costs, batches[0], pp, split)
        for schedule in settings.schedules if pp > 1 else settings.schedules[:1]:
            for nano_batches in (1, 2) if settings.nano_batches is None else (settings.nano_batches,):
                if halves_allowed(step, nano_batches):
                    bound = step.even(schedule, step.tp_share(nano_batches)).total
                    choices.append((bound, pp, split, schedule, nano_batches))
    best, least = None, float("inf")
    known: dict[tuple, float] = {}
    for bound, pp, split, schedule, nano_batches in sorted(choices, key=lambda c: (c[0], c[2].microbatches, -c[4])):
        if best is not None and bound >= best[0]:
            break
        if best is not None and pp == 1 == best[1] and split.microbatches > best[2].microbatches:
            continue  # without a pipeline smaller microbatches only leave less to balance
        progress(f": pp {pp}, {split.microbatches} microbatches in {nano_batches}, {schedule}")
        system = Disaggregated(Step(costs, batches[0], pp, split), planner, nano_batches, schedule)
        needed = system.memory().total
        if needed <= memory:
            seconds, needed = system.total(), system.memory().total
            known[pp, split, schedule, nano_batches] = seconds
        least = min(least, needed)
        if needed <= memory and (best is None or seconds < best[0]):
            best = seconds, pp, split, schedule, nano_batches
    if best is None:
        return _too_large(costs, least)
    _, pp, split, schedule, nano_batches = best
    single = known.get((pp, split, schedule, 1))
    outcomes = []
    for number, batch in enumerate(batches, start=1):
        progress(f": batch {number} of {len(batches)}")
        step = Step(costs, batch, pp, split)
        outcome = Disaggregated(step, planner, nano_batches, schedule).outcome()
        if outcome.memory.total > memory:
            return _too_large(costs, outcome.memory.total)
        if single and nano_batches == 2:  # of the first batch, which is enough to say what ping-pong is worth
            outcome.details["single_stream_over_ping_pong"] = single / best[0]
        outcomes.append(outcome)
    return outcomes


def _too_large(costs: Costs, needed: float) -> str:
    return f"needs at least {needed / 1e9:.1f} GB of a GPU's {costs.cluster.memory / 1e9:.1f} GB"


def _report(costs: Costs, batches: list[Batch], found: dict[str, list[Outcome] | str]) -> Report:
    perfect = found["perfect"]
    systems = {}
    for name in SYSTEMS:
        outcomes = found[name]
        if isinstance(outcomes, str):
            systems[name] = SystemReport((), outcomes)
            continue
        for index, outcome in enumerate(outcomes):
            assert isinstance(perfect, list)
            assert outcome.seconds >= perfect[index].seconds * (1 - ROUNDING), f"{name} is faster than perfect"
        systems[name] = SystemReport(tuple(outcomes))
    return Report(costs.model, costs.cluster, costs.rates, batches[0].tokens, systems)


def vary(cluster: Cluster, rates: Rates, settings: Settings, key: str, value: float) -> tuple[Cluster, Rates, Settings]:
    """The inputs with one number replaced.

    Raises:
        ValueError: no such key, or a value that cannot be; names both.
    """
    numbers: dict[str, Any] = {key: value}
    if key in ("net", "node", "latency", "memory"):
        return replace(cluster, **numbers), rates, settings
    if key in ("linear_flops", "attention_flops", "backward_flops"):
        return cluster, replace(rates, **numbers), settings
    if key == "tolerance":
        return cluster, rates, replace(settings, planner=replace(settings.planner, tolerance=value))
    raise ValueError(f"--vary {key}: choose one of {', '.join(VARIED)}")
