"""Pipelines in ticks that are trained and compared with the run without a pipeline."""

from itertools import product

from tests.integration import compositions as c

EIGHT_BLOCKS = ("--model.flavor=tiny8_varlen",)
HALVES = ("--cad.nano_batches=2",)
"""Two nano-batches: halves in the middle of every row, or by rows with ``BY_ROW``."""
HALVES_BY_ROW = (*HALVES, *c.BY_ROW)


def ticks(pp: int, name: str = "CAD1F1B") -> tuple[str, ...]:
    return (*c.dp(pipeline_parallel=pp), *c.schedule(name))


INTERLEAVED, INTERLEAVED4 = (ticks(pp, "CADInterleaved1F1B") for pp in (2, 4))
# name: (arguments of the pipeline, arguments of both runs, ranks, ranks of the reference, rows per rank)
Case = tuple[tuple[str, ...], tuple[str, ...], int, int, int]
QUICK: dict[str, Case] = {
    "pp2 dp2": (ticks(2), c.VALIDATE4, 4, 2, 4),
    # Four blocks on four stages are 1, 2, 1 and 0.
    "pp4 ac full": ((*ticks(4), *c.FULL), c.FOUR_BLOCKS, 4, 1, 4),
    "interleaved": (INTERLEAVED, c.FOUR_BLOCKS, 2, 1, 4),
    "halves pp2 dp2": ((*ticks(2), *HALVES), c.VALIDATE4, 4, 2, 4),
}
PIPELINES = {
    "pp2": (ticks(2), 2),
    "pp4": (ticks(4), 4),
    "interleaved": (INTERLEAVED, 2),
    "halves": ((*ticks(2), *HALVES), 2),
    "halves pp4": ((*ticks(4), *HALVES), 4),
    "halves by row": ((*ticks(2), *HALVES_BY_ROW), 2),
    "halves interleaved": ((*INTERLEAVED, *HALVES), 2),
    "halves interleaved by row": ((*INTERLEAVED, *HALVES_BY_ROW), 2),
}
"""Arguments and ranks."""
COMPOSED = {
    "ac full": (c.FULL, 1),
    "ac layer": (c.LAYER, 1),
    "ac op": (c.OP, 1),
    "attention kept": (c.ATTENTION_KEPT, 1),
    "compile": (c.COMPILE, 1),
    "compile ac full": ((*c.COMPILE, *c.FULL), 1),
    "tp2": (c.TP2, 2),
    "tp2 ac full": ((*c.TP2, *c.FULL), 2),
    "tp2 compile": ((*c.TP2, *c.COMPILE), 2),
    "cp2": (c.CP2, 2),
}
"""What every pipeline is composed with: arguments, and ranks for each of its own."""


def matrix() -> dict[str, Case]:
    """Stages x microbatches x data parallel x tensor parallel, and with documents that span ranks."""
    cases = {}
    for pp, rounds, data, (name, args) in product(
        (2, 4), (1, 2, 4), (1, 2), {"tp1": (), "tp2": c.TP2, "cp2": c.CP2}.items()
    ):
        ranks, rows = pp * data * (1 if name == "tp1" else 2), rounds * pp
        cases[f"pp{pp} m{rows} dp{data} {name}"] = (*ticks(pp), *args), c.FOUR_BLOCKS, ranks, data, rows
    return cases


SLOW: dict[str, Case] = matrix()
for (pipeline, (args, ranks)), (what, (more, times)) in product(PIPELINES.items(), COMPOSED.items()):
    in_the_middle = "halves" in pipeline and "by row" not in pipeline
    refused = (what.startswith("tp2") and in_the_middle) or (what == "tp2 compile" and "halves" not in pipeline)
    if ranks * times <= 4 and not refused:
        SLOW[f"{pipeline} {what}"] = (*args, *more), c.FOUR_BLOCKS, ranks * times, 1, 4
for pipeline, (args, ranks) in PIPELINES.items():
    if ranks == 2:
        SLOW[f"{pipeline} dp2"] = args, c.FOUR_BLOCKS, 4, 2, 8
        SLOW[f"{pipeline} accumulation"] = args, (*c.FOUR_BLOCKS, *c.global_batch(8)), 2, 1, 4
        SLOW[f"{pipeline} validation"] = args, (*c.FOUR_BLOCKS, *c.VALIDATE4), 2, 1, 4
SLOW |= {
    "interleaved pp4 m4": (INTERLEAVED4, EIGHT_BLOCKS, 4, 1, 4),
    "interleaved pp4 m8 ac full": ((*INTERLEAVED4, *c.FULL), EIGHT_BLOCKS, 4, 1, 8),
    "halves pp4": ((*ticks(4), *HALVES), c.FOUR_BLOCKS, 4, 1, 4),
    "halves interleaved pp4": ((*INTERLEAVED4, *HALVES), EIGHT_BLOCKS, 4, 1, 4),
}
