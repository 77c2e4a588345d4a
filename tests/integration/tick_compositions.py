"""Pipelines in ticks that are trained and compared with the run without a pipeline."""

from itertools import product

from tests.integration.compositions import (
    ATTENTION_KEPT,
    BY_ROW,
    COMPILE,
    CP2,
    FOUR_BLOCKS,
    FULL,
    LAYER,
    OP,
    TP2,
    VALIDATE4,
    dp,
    global_batch,
    schedule,
)

EIGHT_BLOCKS = ("--model.flavor=tiny8_varlen",)
HALVES = ("--cad.nano_batches=2",)
"""Two nano-batches: halves in the middle of every row, or by rows with ``BY_ROW``."""
HALVES_BY_ROW = (*HALVES, *BY_ROW)
ACCUMULATED = (*FOUR_BLOCKS, *global_batch(4))


def ticks(pp: int, name: str = "CAD1F1B") -> tuple[str, ...]:
    return (*dp(pipeline_parallel=pp), *schedule(name))


INTERLEAVED, INTERLEAVED4 = (ticks(pp, "CADInterleaved1F1B") for pp in (2, 4))
# name: (arguments of the pipeline, arguments of both runs, ranks, ranks of the reference, rows per rank)
Case = tuple[tuple[str, ...], tuple[str, ...], int, int, int]
QUICK: dict[str, Case] = {
    "pp2 dp2": (ticks(2), VALIDATE4, 4, 2, 4),
    # Four blocks on four stages are 1, 2, 1 and 0.
    "pp4 ac full": ((*ticks(4), *FULL), FOUR_BLOCKS, 4, 1, 4),
    "interleaved": (INTERLEAVED, FOUR_BLOCKS, 2, 1, 4),
    "halves pp2 dp2": ((*ticks(2), *HALVES), VALIDATE4, 4, 2, 4),
}


def matrix() -> dict[str, Case]:
    """Stages x microbatches x data parallel x tensor parallel, and with documents that span ranks."""
    cases = {}
    for pp, rounds, data, tensor in product((2, 4), (1, 2, 4), (1, 2), (1, 2)):
        rows, args = rounds * pp, (*ticks(pp), *dp(tensor_parallel=tensor))
        cases[f"pp{pp} m{rows} dp{data} tp{tensor}"] = args, FOUR_BLOCKS, pp * data * tensor, data, rows
    for pp, rounds, data in product((2, 4), (1, 2, 4), (1, 2)):
        rows, args = rounds * pp, (*ticks(pp), *CP2)
        cases[f"pp{pp} m{rows} dp{data} cp2"] = args, FOUR_BLOCKS, pp * data * 2, data, rows
    return cases


SLOW: dict[str, Case] = {
    **matrix(),
    "pp4 ac layer": ((*ticks(4), *LAYER), FOUR_BLOCKS, 4, 1, 4),
    "pp4 attention kept": ((*ticks(4), *ATTENTION_KEPT), FOUR_BLOCKS, 4, 1, 4),
    "pp4 ac op": ((*ticks(4), *OP), FOUR_BLOCKS, 4, 1, 4),
    "accumulation": (ticks(2), ACCUMULATED, 2, 1, 2),
    "compile": ((*ticks(2), *COMPILE), FOUR_BLOCKS, 2, 1, 4),
    "compile ac full": ((*ticks(2), *COMPILE, *FULL), FOUR_BLOCKS, 2, 1, 4),
    "interleaved pp4 m4": (INTERLEAVED4, EIGHT_BLOCKS, 4, 1, 4),
    "interleaved pp4 m8 ac full": ((*INTERLEAVED4, *FULL), EIGHT_BLOCKS, 4, 1, 8),
    "interleaved dp2": (INTERLEAVED, FOUR_BLOCKS, 4, 2, 4),
    "interleaved tp2": ((*INTERLEAVED, *TP2), FOUR_BLOCKS, 4, 1, 4),
    "interleaved cp2": ((*INTERLEAVED, *CP2), FOUR_BLOCKS, 4, 1, 4),
    "interleaved ac full": ((*INTERLEAVED, *FULL), FOUR_BLOCKS, 2, 1, 4),
    "interleaved ac layer": ((*INTERLEAVED, *LAYER), FOUR_BLOCKS, 2, 1, 4),
    "interleaved attention kept": ((*INTERLEAVED, *HALVES, *ATTENTION_KEPT), FOUR_BLOCKS, 2, 1, 4),
    "interleaved ac op": ((*INTERLEAVED, *OP), FOUR_BLOCKS, 2, 1, 4),
    "interleaved compile": ((*INTERLEAVED, *COMPILE), FOUR_BLOCKS, 2, 1, 4),
    "interleaved accumulation": (INTERLEAVED, ACCUMULATED, 2, 1, 2),
    "interleaved validation": (INTERLEAVED, (*FOUR_BLOCKS, *VALIDATE4), 2, 1, 4),
    "halves pp4": ((*ticks(4), *HALVES), FOUR_BLOCKS, 4, 1, 4),
    "halves pp4 ac full": ((*ticks(4), *HALVES, *FULL), FOUR_BLOCKS, 4, 1, 4),
    "halves pp4 ac layer": ((*ticks(4), *HALVES, *LAYER), FOUR_BLOCKS, 4, 1, 4),
    "halves pp4 ac op": ((*ticks(4), *HALVES, *OP), FOUR_BLOCKS, 4, 1, 4),
    "halves pp4 by row": ((*ticks(4), *HALVES_BY_ROW), FOUR_BLOCKS, 4, 1, 8),
    "halves by row dp2": ((*ticks(2), *HALVES_BY_ROW), FOUR_BLOCKS, 4, 2, 8),
    "halves by row tp2": ((*ticks(2), *HALVES_BY_ROW, *TP2), FOUR_BLOCKS, 4, 1, 4),
    "halves cp2": ((*ticks(2), *HALVES, *CP2), FOUR_BLOCKS, 4, 1, 4),
    "halves by row cp2": ((*ticks(2), *HALVES_BY_ROW, *CP2), FOUR_BLOCKS, 4, 1, 4),
    "halves accumulation": ((*ticks(2), *HALVES), ACCUMULATED, 2, 1, 2),
    "halves compile": ((*ticks(2), *HALVES, *COMPILE), FOUR_BLOCKS, 2, 1, 4),
    "halves compile ac full": ((*ticks(2), *HALVES, *COMPILE, *FULL), FOUR_BLOCKS, 2, 1, 4),
    "halves by row dp2 ac op compile": (
        (*ticks(2), *HALVES_BY_ROW, *OP, *COMPILE),
        (*FOUR_BLOCKS, *VALIDATE4, "--validation.local_batch_size=8"),
        4,
        2,
        8,
    ),
    "halves interleaved": ((*INTERLEAVED, *HALVES), (*FOUR_BLOCKS, *VALIDATE4), 2, 1, 4),
    "halves interleaved pp4": ((*INTERLEAVED4, *HALVES), EIGHT_BLOCKS, 4, 1, 4),
    "halves interleaved by row tp2": ((*INTERLEAVED, *HALVES_BY_ROW, *TP2), FOUR_BLOCKS, 4, 1, 4),
    "halves interleaved cp2": ((*INTERLEAVED, *HALVES, *CP2), FOUR_BLOCKS, 4, 1, 4),
    "halves interleaved compile": ((*INTERLEAVED, *HALVES, *COMPILE), FOUR_BLOCKS, 2, 1, 4),
    "halves interleaved ac full": ((*INTERLEAVED, *HALVES, *FULL), FOUR_BLOCKS, 2, 1, 4),
    "halves interleaved ac op": ((*INTERLEAVED, *HALVES, *OP), FOUR_BLOCKS, 2, 1, 4),
    "halves interleaved ac layer": ((*INTERLEAVED, *HALVES, *LAYER), FOUR_BLOCKS, 2, 1, 4),
    "halves interleaved accumulation": ((*INTERLEAVED, *HALVES), ACCUMULATED, 2, 1, 2),
    "halves by row tp2 ac full": ((*ticks(2), *HALVES_BY_ROW, *TP2, *FULL), FOUR_BLOCKS, 4, 1, 4),
    "halves by row tp2 compile": ((*ticks(2), *HALVES_BY_ROW, *TP2, *COMPILE), FOUR_BLOCKS, 4, 1, 4),
    "halves interleaved by row dp2": ((*INTERLEAVED, *HALVES_BY_ROW), FOUR_BLOCKS, 4, 2, 4),
}
