# SPDX-License-Identifier: BSD-3-Clause
"""Advice: what is recommended is simulated, fits, is not refused, and gains; what the new settings cost and need."""

import functools
from dataclasses import replace
from typing import Any

import pytest

from tests.lib import attention_memory
from tests.lib.refusals import refusal
from tests.lib.simulation_cases import MODEL, cad, configuration, inputs, step
from torchtitan_cad.tools.advise import reordering, table
from torchtitan_cad.tools.simulation.advice import (
    LEAST_GAIN,
    Advice,
    _without_cad,
    advise,
)
from torchtitan_cad.tools.simulation.disaggregated import Disaggregated
from torchtitan_cad.tools.simulation.inputs import CHECKPOINTING, MODELS, Configuration
from torchtitan_cad.tools.simulation.memory import (
    stock_attention,
    working_bytes,
)
from torchtitan_cad.tools.simulation.search import Search

WRITTEN = configuration()
LONG = (300, 700, 1500, 4000, 16384)


def advice(
    job: Configuration = WRITTEN, refused: Any = lambda choice: "", **changes: Any
) -> Advice:
    asked = replace(inputs(lengths=LONG, **changes), configuration=job)
    return advise(asked, refused=refused)


as_written = functools.cache(advice)
"""The advice that several tests look at."""


def planned(**changes: Any) -> Disaggregated:
    system = cad(lengths=LONG, **{"nano_batches": 2, **changes})
    system.plans((0,))
    return system


def test_torchtitan_alone_does_not_keep_attention():
    job = configuration(checkpointing="linear")
    assert job.without_cad() == configuration(checkpointing="full")
    alone = _without_cad(Search(inputs()), [job])
    assert {one.checkpointing for one in alone} == {"none", "selective", "full"}


def test_recommended_changes_gain_and_are_simulated_together():
    found = as_written()
    assert found.base is found.written
    assert found.best.seconds * (1 + LEAST_GAIN) <= found.written.seconds
    for name, trials in found.trials.items():
        for trial in trials:
            assert name in trial.configuration.changes(found.base.configuration)
    lines = table(found).splitlines()
    assert sum(line.endswith("gains are over this") for line in lines) == 1
    assert lines[-1].startswith("recommended")


@pytest.mark.matrix
def test_reordering_is_enough_for_short_documents_in_many_rows():
    few = as_written()
    assert not few.reordering_is_enough
    assert reordering(few).startswith("reordering alone is not enough: ")
    many = advise(inputs(lengths=(900, 1000), row_tokens=2048, step_tokens=8 * 4096))
    assert many.reordering_is_enough
    assert reordering(many).startswith("reordering alone is enough: ")


def test_equal_documents_are_not_worth_it():
    found = advise(inputs(lengths=(16384,)))
    assert found.speedup == pytest.approx(1)
    assert not found.worth_it
    assert found.best is found.written
    assert found.trials["placement"][0].gain_over(found.base) == 0


def test_what_the_job_refuses_is_not_recommended():
    free = as_written().best.configuration
    assert (free.nano_batches, free.cp) != (1, 1)
    bound = advice(refused=lambda c: "no" if c.nano_batches == 2 or c.cp > 1 else "")
    best = bound.best.configuration
    assert (best.nano_batches, best.cp) == (1, 1)
    assert bound.trials["nano_batches"][0].reason == "no"


@pytest.mark.matrix
def test_checkpointing_is_as_little_as_fits():
    needs = {
        kind: advice(replace(WRITTEN, checkpointing=kind)).written.memory
        for kind in CHECKPOINTING
    }
    assert needs["none"] > needs["selective"] > needs["linear"] > needs["full"]
    memory = (needs["none"] + needs["selective"]) / 2
    tight = advice(memory=memory)
    assert not tight.written.fits
    for trial in (tight.base, tight.best):
        assert trial.configuration.checkpointing == "selective"
    assert tight.best.memory <= memory
    roomy = advice(replace(WRITTEN, checkpointing="full"))
    assert roomy.best.configuration.checkpointing == "none"
    assert not advice(memory=1e6).worth_it


def test_keeping_rows_takes_memory_and_saves_time():
    resend = planned(backward="resend", net=1e9)
    keep = planned(backward="keep", net=1e9)
    assert keep.outcome().seconds < resend.outcome().seconds
    assert keep.outcome().exchanged_bytes < resend.outcome().exchanged_bytes
    assert resend.memory().kept == 0
    shape = MODEL.shape(1)
    (plans,) = keep.plans((0,))
    query_rows = sum(plan.query_needs.rows_in for plan in plans)
    key_rows = sum(plan.key_needs.rows_in for plan in plans)
    query_bytes = shape.num_heads * shape.head_dim * 2
    of_a_layer = (query_rows * query_bytes + key_rows * shape.kv_bytes).max()
    assert keep.memory().kept == MODEL.layers * of_a_layer
    checkpointed = planned(backward="keep", checkpointing="full")
    assert checkpointed.memory().kept == of_a_layer


def test_rows_are_kept_where_memory_has_room():
    def bytes_within(memory: float) -> float:
        system = planned(backward="auto", net=1e9, memory=memory)
        return system.outcome().exchanged_bytes

    resend = planned(backward="resend", net=1e9)
    keep = planned(backward="keep", net=1e9).outcome()
    assert bytes_within(1e15) == keep.exchanged_bytes
    assert bytes_within(resend.memory().total) == resend.outcome().exchanged_bytes
    ticks = {"pp": 2, "microbatches": 2, "schedule": "CAD1F1B"}
    assert planned(backward="auto", memory=1e15, **ticks).outcome().memory.kept == 0


@pytest.mark.parametrize("layout", ["whole documents", "one big"])
def test_memory_has_attentions_working_memory_as_the_bench_states_it(layout):
    stated = attention_memory.measure(layout, 8, (11,), 2)
    working = working_bytes([attention_memory.plans_of(layout, 8, 11, 2)], None)
    assert working == max(stated.forward, stated.backward)
    stock = stock_attention(step(model=MODELS["llama-8b"]), 32768, 32768, 10)
    assert stock == pytest.approx(stated.stock_backward, rel=0.03)
    system = planned()
    memory = system.memory()
    assert memory.attention == working_bytes(system.plans((0,)), None) > 0
    without = replace(memory, attention=0.0)
    assert memory.total - without.total == pytest.approx(memory.attention)


def test_plans_know_nodes():
    for ranks_per_node, known in ((4, 4), (8, None)):
        system = planned(nano_batches=1, ranks_per_node=ranks_per_node)
        assert system.plans((0,))[0][0].config.ranks_per_node == known


def test_placement_is_tried_and_recommended_where_it_gains():
    """Few long documents over a slow network, and no other setting allowed."""
    job = replace(WRITTEN, cp=4)

    def refused(choice: Configuration) -> str:
        return "" if set(choice.changes(job)) <= {"placement"} else "no"

    slow = {"ranks": 32, "ranks_per_node": 1, "net": 5e9}
    asked = inputs(cp=4, lengths=(300, 300, 300, 16384), **slow)
    found = advise(asked, refused=refused)
    (trial,) = found.trials["placement"]
    assert trial.configuration.placement == "balanced"
    assert found.best.configuration.placement == "balanced"
    assert found.best.memory == pytest.approx(found.written.memory, rel=0.1)


def test_a_step_that_cannot_be_divided_is_named():
    with refusal(remedy="training.global_batch_size"):
        advice(replace(WRITTEN, microbatches=3))
