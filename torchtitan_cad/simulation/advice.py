"""Recommends settings of a job: a search from the job as written, one setting at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_cad.simulation.batches import draw_batches
from torchtitan_cad.simulation.inputs import (
    CHECKPOINTING,
    PLACEMENTS,
    SCHEDULES,
    Cluster,
    Documents,
    Model,
    Rates,
    Settings,
)
from torchtitan_cad.simulation.search import Configuration, Progress, Search, Trial

LEAST_GAIN = 0.01
"""speed: least gain of a setting to be recommended, and of CAD to be worth it."""
TOLERANCES = (0.0, 0.02, 0.05, 0.1, 0.2, "auto")
MICROBATCHES = (1, 2, 4, 8)
"""microbatches per pipeline rank: those tried where the number of pipeline ranks changes."""
MOST_CHANGES = 6
"""changes: most that are taken together."""
GROUPS = (
    ("tolerance",),
    ("backward",),
    ("ranks_per_node",),
    ("placement",),
    ("nano_batches",),
    ("checkpointing",),
    ("cp",),
    ("pp", "microbatches", "schedule"),
)
"""Fields of a configuration that are taken back together."""


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
    """

    written: Trial
    base: Trial
    without_written: Trial
    without: Trial
    best: Trial
    trials: dict[str, list[Trial]]
    worth: dict[str, float | None]

    @property
    def speedup(self) -> float | None:
        """Speed with CAD over that without; None if either way does not fit."""
        gain = self.best.gain_over(self.without)
        return None if gain is None else 1 + gain

    @property
    def worth_it(self) -> bool:
        """Tell whether the job should use CAD: it fits, and gains ``LEAST_GAIN`` or does not fit otherwise."""
        return self.best.fits and (self.speedup is None or self.speedup >= 1 + LEAST_GAIN)


def advise(
    model: Model,
    cluster: Cluster,
    documents: Documents,
    settings: Settings,
    rates: Rates,
    job: Configuration,
    refused: Callable[[Configuration], str] = lambda configuration: "",
    progress: Progress = lambda text: None,
) -> Advice:
    """Return the settings by which a step of the job takes the least time, of those that gain at least ``LEAST_GAIN``.

    Args:
        settings: of the job; ``job`` replaces what both have.
        refused: why the job could not start with a configuration; empty if it could.
        progress: is called with what is simulated next.

    Raises:
        ValueError: inputs that do not fit each other.
    """
    search = Search(model, cluster, draw_batches(documents), settings, rates, refused, progress)
    planner = settings.planner.planner
    if search.step(planner, job) is None:
        raise ValueError(
            f"documents step_tokens = {documents.step_tokens} in rows of {documents.row_tokens} cannot be divided over "
            f"{cluster.ranks} ranks with tp = {cluster.tp}, pp = {job.pp}, cp = {job.cp} in {job.microbatches} "
            "microbatches: set a global_batch_size that divides so"
        )
    written = search.run(planner, job)
    base = best = _made_to_fit(search, planner, written)
    trials = {
        name: [search.run(planner, each) for each in choices]
        for name, choices in _alternatives(search, base.configuration).items()
    }
    ranked = [trial for every in trials.values() for trial in every]
    for _ in range(MOST_CHANGES):
        fastest = min(ranked, key=lambda trial: trial.seconds)
        candidate = search.run(planner, fastest.configuration)
        if not fastest.fits or (candidate.gain_over(best) or 0.0) < LEAST_GAIN:
            break
        best = candidate
        others = _alternatives(search, best.configuration)
        ranked = [search.run(planner, each, 1) for choices in others.values() for each in choices]
    best, worth = _only_what_is_needed(search, planner, base, best)
    tried = [trial.configuration for every in trials.values() for trial in every] + [base.configuration]
    degrees = _degrees(search, job, [*tried, best.configuration])
    without = search.fastest(
        "packed", [replace(each, checkpointing=kind) for each in degrees for kind in CHECKPOINTING]
    )
    # torchtitan alone has no kind of checkpointing that keeps the output of attention
    alone = replace(job, checkpointing="full") if job.checkpointing == "linear" else job
    return Advice(written, base, search.run("packed", alone), without, best, trials, worth)


def _made_to_fit(search: Search, planner: str, written: Trial) -> Trial:
    """Return the job with as much activation checkpointing as it needs, and other degrees if that is not enough."""
    if written.fits:
        return written
    for kind in CHECKPOINTING[CHECKPOINTING.index(written.configuration.checkpointing) + 1 :]:
        trial = search.run(planner, replace(written.configuration, checkpointing=kind))
        if trial.fits:
            return trial
    full = replace(written.configuration, checkpointing="full")
    others = [search.run(planner, each) for choices in _alternatives(search, full).values() for each in choices]
    return min((t for t in others if t.fits), key=lambda trial: trial.seconds, default=written)


def _alternatives(search: Search, now: Configuration) -> dict[str, list[Configuration]]:
    """By setting, the other values to try. Degrees come with halves, and with both schedules, that they may allow."""
    cluster = search.cluster
    knows_nodes = cluster.ranks > cluster.ranks_per_node and cluster.group_per_node > 1
    values: dict[str, Any] = {
        "nano_batches": (1, 2),
        "tolerance": TOLERANCES,
        "backward": ("resend", "keep"),
        "ranks_per_node": (None, cluster.ranks_per_node) if knows_nodes and now.ranks_per_node is None else (None,),
        "placement": PLACEMENTS,
        "checkpointing": CHECKPOINTING[: CHECKPOINTING.index(now.checkpointing)],
        "cp": (2 * now.cp, now.cp // 2),
        "pp": (2 * now.pp, now.pp // 2),
        "schedule": SCHEDULES if now.pp > 1 else (),
    }
    found = {}
    for name, each in values.items():
        changed = [replace(now, **{name: value}) for value in each if value != getattr(now, name)]
        if name in ("cp", "pp"):
            changed = [way for choice in changed for way in _ways(search, choice, now)]
        if changed:
            found[name] = changed
    return found


def _ways(search: Search, choice: Configuration, now: Configuration) -> Iterator[Configuration]:
    """Yield a choice of other degrees with every number of microbatches, schedule and nano-batches to try with it."""
    if not choice.cp or not 0 < choice.pp <= search.model.layers:
        return
    counts = [each * choice.pp for each in MICROBATCHES] if choice.pp != now.pp else [choice.microbatches]
    for microbatches in counts:
        for schedule in SCHEDULES if 1 < choice.pp != now.pp else (now.schedule,):
            for nano_batches in sorted({now.nano_batches, 2}):
                way = replace(choice, microbatches=microbatches, schedule=schedule, nano_batches=nano_batches)
                if search.step("cad", way) is not None:
                    yield way


def _degrees(search: Search, job: Configuration, tried: list[Configuration]) -> list[Configuration]:
    """Return the job's degrees without CAD, those tried with it, and every power of two of context-parallel ranks."""
    found: dict[Configuration, None] = {}
    for choice in tried:
        for cp in {choice.cp, *(2**i for i in range(search.cluster.ranks.bit_length()))}:
            other = replace(job, pp=choice.pp, microbatches=choice.microbatches, cp=cp, schedule="1F1B")
            if search.step("packed", other) is not None:
                found[other] = None
    return list(found)


def _only_what_is_needed(
    search: Search, planner: str, base: Trial, best: Trial
) -> tuple[Trial, dict[str, float | None]]:
    """Take back every change without which a step is less than ``LEAST_GAIN`` longer; say what others are worth."""
    worth: dict[str, float | None] = {}
    for last in (False, True):  # what was left out changes what others are worth
        for group in GROUPS:
            back = replace(best.configuration, **{name: getattr(base.configuration, name) for name in group})
            if back == best.configuration:
                continue
            trial = search.run(planner, back)
            gain = best.gain_over(trial)
            if last:
                worth[next(iter(back.changes(best.configuration)))] = gain
            elif gain is not None and gain < LEAST_GAIN:
                best = trial
    return best, worth
