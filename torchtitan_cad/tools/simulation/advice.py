# SPDX-License-Identifier: BSD-3-Clause
"""Recommends settings of a job: a search from the job as written, one setting at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any

from torchtitan_cad.tools.simulation.inputs import (
    CHECKPOINTING,
    PLACEMENTS,
    SCHEDULES,
    Configuration,
    Inputs,
)
from torchtitan_cad.tools.simulation.search import Progress, Search, Trial

LEAST_GAIN = 0.01
"""speed: least gain of a setting to be recommended, and of CAD to be worth it."""
ENOUGH = 0.02
"""share of CAD's step: reordering rows is enough where its step is at most this much longer."""
TOLERANCES = (0.0, 0.02, 0.05, 0.1, 0.2, "auto")
MICROBATCHES = (1, 2, 4, 8)
"""microbatches per pipeline rank: those tried where the number of pipeline ranks changes."""
MOST_CHANGES = 6
"""changes: most that are taken together."""


@dataclass(frozen=True)
class Advice:
    """Findings of ``advise``.

    Attributes:
        written: the job as it is, with CAD.
        base: the same with as much activation checkpointing as it needs to fit; gains are over it.
        without_written: the job as it is, without CAD.
        without: without CAD at the best of the degrees and kinds of checkpointing that were tried for it.
        reorder: without CAD at its best, with whole rows distributed anew over ranks and microbatches.
        best: with CAD at the best of what was tried.
        trials: by setting, every value tried on ``base``.
        servers: ``best`` with the cluster's attention servers, if there are any.
    """

    written: Trial
    base: Trial
    without_written: Trial
    without: Trial
    reorder: Trial
    best: Trial
    trials: dict[str, list[Trial]]
    servers: Trial | None

    @property
    def speedup(self) -> float | None:
        """Speed with CAD over that without; None if either way does not fit."""
        gain = self.best.gain_over(self.without)
        return None if gain is None else 1 + gain

    @property
    def worth_it(self) -> bool:
        """Tell whether the job should use CAD: it fits, and gains ``LEAST_GAIN`` or does not fit otherwise."""
        return self.best.fits and (
            self.speedup is None or self.speedup >= 1 + LEAST_GAIN
        )

    @property
    def recommended(self) -> Trial:
        """Return the trial with CAD if that is worth it, otherwise without; as the job is written if nothing fits."""
        return (
            self.best
            if self.worth_it
            else self.without
            if self.without.fits
            else self.without_written
        )

    @property
    def reordering_is_enough(self) -> bool:
        """Tell whether rows that are only reordered take hardly longer than CAD."""
        return self.reorder.seconds <= self.best.seconds * (1 + ENOUGH)


def advise(
    inputs: Inputs,
    *,
    refused: Callable[[Configuration], str] = lambda configuration: "",
    progress: Progress = lambda text: None,
) -> Advice:
    """Return the settings by which a step of the job takes the least time, of those that gain at least ``LEAST_GAIN``.

    For ``refused`` and ``progress`` see ``Search``. Raises ValueError for inputs that do not fit each other.
    """
    job = inputs.configuration
    search = Search(replace(inputs, open=frozenset()), refused, progress)
    if search.step("cad", job) is None:
        documents = inputs.documents
        cluster = inputs.cluster
        raise ValueError(
            f"documents step_tokens = {documents.step_tokens} in rows of {documents.row_tokens} cannot be divided over "
            f"{cluster.ranks} ranks with tp = {cluster.tp}, pp = {job.pp}, cp = {job.cp} in {job.microbatches} "
            "microbatches: set a training.global_batch_size that can be"
        )
    written = search.run("cad", job)
    base = _made_to_fit(search, written)
    trials = {
        name: [search.run("cad", configuration) for configuration in choices]
        for name, choices in _alternatives(search, base.configuration).items()
    }
    tried = list(chain.from_iterable(trials.values()))
    best = _climb(search, base, tried)
    with_cad = [job, *(trial.configuration for trial in (base, *tried, best))]
    stock = _without_cad(search, with_cad)
    return Advice(
        written=written,
        base=base,
        without_written=search.run("packed", job.without_cad()),
        without=search.fastest("packed", stock),
        reorder=search.fastest("reorder", stock),
        best=best,
        trials=trials,
        servers=search.run("servers", best.configuration)
        if search.cluster.servers
        else None,
    )


def _climb(search: Search, base: Trial, tried: list[Trial]) -> Trial:
    """Change one setting after the other, to the fastest of those tried, while it gains ``LEAST_GAIN``."""
    best = base
    for _ in range(MOST_CHANGES):
        fastest = min(tried, key=lambda trial: trial.seconds)
        candidate = search.run("cad", fastest.configuration)
        if not fastest.fits or (candidate.gain_over(best) or 0.0) < LEAST_GAIN:
            break
        best = candidate
        others = _alternatives(search, best.configuration)
        tried = [
            search.run("cad", configuration, 1)
            for configuration in chain.from_iterable(others.values())
        ]
    return best


def _made_to_fit(search: Search, written: Trial) -> Trial:
    """Return the job with as much activation checkpointing as it needs, and other degrees if that is not enough."""
    job = written.configuration
    kinds = CHECKPOINTING[CHECKPOINTING.index(job.checkpointing) :]
    choices = [replace(job, checkpointing=kind) for kind in kinds]
    for others in _alternatives(search, choices[-1]).values():
        choices += others
    for choice in choices:
        trial = search.run("cad", choice)
        if trial.fits:
            return trial
    return written


def _alternatives(
    search: Search, configuration: Configuration
) -> dict[str, list[Configuration]]:
    """By setting, the other values to try. Degrees come with halves, and with both schedules, that they may allow."""
    pp = configuration.pp
    cp = configuration.cp
    values: dict[str, tuple[Any, ...]] = {
        "nano_batches": (1, 2),
        "tolerance": TOLERANCES,
        "backward": ("auto", "keep"),
        "placement": PLACEMENTS,
        "checkpointing": CHECKPOINTING[
            : CHECKPOINTING.index(configuration.checkpointing)
        ],
        "schedule": SCHEDULES if pp > 1 else (),
    }
    found = {
        name: [
            replace(configuration, **{name: value})
            for value in choices
            if value != getattr(configuration, name)
        ]
        for name, choices in values.items()
    }
    found["cp"] = list(_degrees(search, configuration, [(pp, 2 * cp), (pp, cp // 2)]))
    found["pp"] = list(_degrees(search, configuration, [(2 * pp, cp), (pp // 2, cp)]))
    return {
        name: configurations for name, configurations in found.items() if configurations
    }


def _degrees(
    search: Search, configuration: Configuration, degrees: list[tuple[int, int]]
) -> Iterator[Configuration]:
    """Yield other (pp, cp) with every number of microbatches, schedule and nano-batches to try with them."""
    for pp, cp in degrees:
        if not cp or not 0 < pp <= search.inputs.model.layers:
            continue
        for microbatches in (
            [multiple * pp for multiple in MICROBATCHES]
            if pp != configuration.pp
            else [configuration.microbatches]
        ):
            for schedule in (
                SCHEDULES if 1 < pp != configuration.pp else (configuration.schedule,)
            ):
                for count in sorted({configuration.nano_batches, 2}):
                    candidate = replace(
                        configuration,
                        pp=pp,
                        cp=cp,
                        microbatches=microbatches,
                        schedule=schedule,
                        nano_batches=count,
                    )
                    if search.step("cad", candidate) is not None:
                        yield candidate


def _without_cad(search: Search, tried: list[Configuration]) -> list[Configuration]:
    """Return the degrees tried with CAD, with any power of two of context-parallel ranks and any checkpointing."""
    powers = [2**i for i in range(search.cluster.ranks.bit_length())]
    found = []
    for configuration in tried:
        for cp in (configuration.cp, *powers):
            alone = replace(
                tried[0],
                pp=configuration.pp,
                microbatches=configuration.microbatches,
                cp=cp,
                schedule="1F1B",
            )
            found.append(alone)
    divided = [
        configuration
        for configuration in dict.fromkeys(found)
        if search.step("packed", configuration) is not None
    ]
    choices = [
        replace(configuration, checkpointing=kind).without_cad()
        for configuration, kind in product(divided, CHECKPOINTING)
    ]
    return list(dict.fromkeys(choices))
