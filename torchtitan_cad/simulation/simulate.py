"""The predicted time of a training step under several systems, on the same batches."""

from __future__ import annotations

from dataclasses import replace

from torchtitan_cad.simulation.batches import draw_batches
from torchtitan_cad.simulation.inputs import Cluster, Documents, Model, Rates, Settings
from torchtitan_cad.simulation.report import SYSTEMS, Report
from torchtitan_cad.simulation.search import Configuration, Progress, Search, Trial

MOST_PLACED = 40
"""layouts: most that are placed where the settings do not ask for it; each takes a few tenths of a second."""


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
    settings = settings or Settings()
    progress("drawing documents")
    search = Search(model, cluster, draw_batches(documents), settings, rates or Rates(), progress=progress)
    if not search.candidates("packed"):
        raise ValueError(
            f"documents step_tokens = {documents.step_tokens} in rows of {documents.row_tokens} cannot be divided over "
            f"{cluster.ranks} ranks with tp = {cluster.tp}, pp = {cluster.pp}, cp = {cluster.cp}: set a multiple of "
            "ranks / (tp x pp x cp) rows, and rows that 2 x cp divides"
        )
    found = {"perfect": _perfect(search)}
    for name in ("packed", "packing_cp"):
        progress(name)
        found[name] = search.fastest(name, search.candidates(name))
    planner = settings.planner.planner
    greedy = best = search.fastest_cad("greedy", search.candidates("greedy"))
    if planner != "greedy":  # tried first, most choices are left before all their plans are made
        best = search.fastest_cad(planner, [greedy.configuration] * greedy.fits + search.candidates(planner))
    for name, chosen in (("greedy", greedy), ("cad", best), ("cad_placed", best)):
        found[name] = chosen
        if chosen.fits:
            placement = {"greedy": "loader", "cad": settings.placement, "cad_placed": "balanced"}[name]
            configuration = replace(chosen.configuration, placement=placement)
            parts = configuration.microbatches * configuration.nano_batches * len(search.batches)
            if name == "cad_placed" and parts > MOST_PLACED:
                reason = f"{parts} layouts to place: give --placement balanced, or fewer --batches"
                found[name] = Trial(configuration, reason=reason)
            elif name != "cad_placed" or settings.placement == "loader":
                found[name] = search.run("greedy" if name == "greedy" else planner, configuration)
    if settings.placement == "balanced":
        del found["cad_placed"]
    return Report(cluster, search.batches[0].tokens, {name: found[name] for name in SYSTEMS if name in found})


def _perfect(search: Search) -> Trial:
    """Take the fastest configuration for every batch. Rows do not bind it: any number of microbatches will do."""
    trials = [search.run("perfect", each) for each in search.candidates("perfect")]
    fitting = [trial.outcomes for trial in trials if trial.fits]
    if not fitting:
        return search.none(trials)
    outcomes = tuple(min(each, key=lambda outcome: outcome.seconds) for each in zip(*fitting, strict=True))
    return Trial(Configuration(), outcomes, max(outcome.memory.total for outcome in outcomes))
