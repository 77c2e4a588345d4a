# SPDX-License-Identifier: BSD-3-Clause
"""Advice: what is recommended is simulated, fits, is not refused, and gains; what the new settings cost and need."""

import dataclasses
import functools
from dataclasses import replace
from typing import Any

import pytest

from tests.lib import attention_memory
from tests.lib.refusals import refusal
from tests.lib.simulation_cases import MODEL, cad, configuration, inputs, step
from torchtitan_cad.planning.model.shape import RowBytes
from torchtitan_cad.tools.advise import reordering, table
from torchtitan_cad.tools.simulation.advice import LEAST_GAIN, Advice, advise
from torchtitan_cad.tools.simulation.disaggregated import Disaggregated
from torchtitan_cad.tools.simulation.inputs import CHECKPOINTING, MODELS, Configuration
from torchtitan_cad.tools.simulation.memory import (
    kept_bytes_per_call,
    stock_attention,
    working_bytes,
)

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


def test_recommended_changes_gain_and_are_simulated_together() -> None:
    found = as_written()
    assert found.base is found.written
    assert found.best.seconds * (1 + LEAST_GAIN) <= found.written.seconds
    for name, trials in found.trials.items():
        assert all(
            name in trial.configuration.changes(found.base.configuration)
            for trial in trials
        )
    lines = table(found).splitlines()
    assert sum(line.endswith("gains are over this") for line in lines) == 1
    assert lines[-1].startswith("recommended")


@pytest.mark.matrix
def test_reordering_is_enough_for_short_documents_in_many_rows() -> None:
    few, many = (
        as_written(),
        advise(
            inputs(lengths=(900, 1000), row_tokens=2048, step_tokens=8 * 4096),
        ),
    )
    assert [few.reordering_is_enough, many.reordering_is_enough] == [False, True]
    assert reordering(few).startswith("reordering alone is not enough: ")
    assert reordering(many).startswith("reordering alone is enough: ")


def test_equal_documents_are_not_worth_it() -> None:
    found = advise(inputs(lengths=(16384,)))
    assert found.speedup == pytest.approx(1)
    assert not found.worth_it
    assert found.best is found.written
    assert found.trials["placement"][0].gain_over(found.base) == 0


def test_what_the_job_refuses_is_not_recommended() -> None:
    free = as_written()
    assert (free.best.configuration.nano_batches, free.best.configuration.cp) != (1, 1)
    bound = advice(refused=lambda c: "no" if c.nano_batches == 2 or c.cp > 1 else "")
    best = bound.best.configuration
    assert (best.nano_batches, best.cp) == (1, 1)
    assert bound.trials["nano_batches"][0].reason == "no"


@pytest.mark.matrix
def test_checkpointing_is_as_little_as_fits() -> None:
    needs = {
        kind: advice(replace(WRITTEN, checkpointing=kind)).written.memory
        for kind in CHECKPOINTING
    }
    assert needs["none"] > needs["selective"] > needs["linear"] > needs["full"]
    tight = advice(memory=(needs["none"] + needs["selective"]) / 2)
    assert not tight.written.fits
    assert (
        tight.base.configuration.checkpointing
        == tight.best.configuration.checkpointing
        == "selective"
    )
    assert tight.best.memory <= (needs["none"] + needs["selective"]) / 2
    roomy = advice(replace(WRITTEN, checkpointing="full"))
    assert roomy.best.configuration.checkpointing == "none"
    assert not advice(memory=1e6).worth_it


def test_keeping_rows_takes_memory_and_saves_time() -> None:
    resend, keep = (
        planned(backward=backward, net=1e9) for backward in ("resend", "keep")
    )
    assert keep.outcome().seconds < resend.outcome().seconds
    assert keep.outcome().exchanged_bytes < resend.outcome().exchanged_bytes
    assert resend.memory().kept == 0
    shape, (plans,) = MODEL.shape(1), keep.plans((0,))
    rows = [
        sum(getattr(plan, name).rows_in for plan in plans)
        for name in ("query_needs", "key_needs")
    ]
    per_layer = (
        rows[0] * shape.num_heads * shape.head_dim * 2 + rows[1] * shape.kv_bytes
    )
    assert keep.memory().kept == MODEL.layers * per_layer.max()
    assert (
        planned(backward="keep", checkpointing="full").memory().kept == per_layer.max()
    )


def test_rows_are_kept_where_memory_has_room() -> None:
    resend, keep = (
        planned(backward=backward, net=1e9) for backward in ("resend", "keep")
    )
    roomy, full = (
        planned(backward="auto", net=1e9, memory=memory)
        for memory in (1e15, resend.memory().total)
    )
    assert (roomy.outcome(), full.outcome()) == (keep.outcome(), resend.outcome())
    (plans,), calls, buffers = (
        roomy.plans((0,)),
        2 * MODEL.layers,
        roomy.memory().buffers,
    )
    needed = sorted(
        plan.most_rows.kept_bytes(RowBytes.of(plan.shape)) for plan in plans
    )
    used = 1e15 - calls * kept_bytes_per_call(roomy.step, buffers, in_ticks=False)
    sent = []
    for per_call in (needed[0] - 1, needed[0] + 1, needed[1] + 1):
        sent.append(
            planned(backward="auto", net=1e9, memory=used + calls * per_call)
            .outcome()
            .exchanged_bytes
        )
    assert (
        sent[0]
        == resend.outcome().exchanged_bytes
        > sent[1]
        > sent[2]
        == keep.outcome().exchanged_bytes
    )
    in_ticks = planned(
        backward="auto", memory=1e15, pp=2, microbatches=2, schedule="CAD1F1B"
    )
    assert in_ticks.outcome().memory.kept == 0


@pytest.mark.parametrize("layout", ["whole documents", "one big"])
def test_memory_has_attentions_working_memory_as_the_bench_states_it(
    layout: str,
) -> None:
    stated = attention_memory.measure(layout, 8, (11,), 2)
    working = working_bytes([attention_memory.plans_of(layout, 8, 11, 2)], None)
    assert working == max(stated.forward, stated.backward)
    stock = stock_attention(step(model=MODELS["llama-8b"]), 32768, 32768, 10)
    assert stock == pytest.approx(stated.stock_backward, rel=0.03)
    system = planned()
    memory = system.memory()
    assert memory.attention == working_bytes(system.plans((0,)), None) > 0
    assert memory.total - dataclasses.replace(
        memory, attention=0.0
    ).total == pytest.approx(memory.attention)


def test_plans_know_nodes() -> None:
    several, one = (planned(nano_batches=1, ranks_per_node=node) for node in (4, 8))
    assert [
        each.plans((0,))[0][0].config.ranks_per_node for each in (several, one)
    ] == [4, None]


def test_placement_is_tried_and_recommended_where_it_gains() -> None:
    """Few long documents over a slow network, and no other setting allowed."""
    job = replace(WRITTEN, cp=4)
    slow = {"ranks": 32, "ranks_per_node": 1, "net": 5e9}
    asked = inputs(cp=4, lengths=(300, 300, 300, 16384), **slow)
    refused = lambda choice: "" if set(choice.changes(job)) <= {"placement"} else "no"  # noqa: E731
    found = advise(asked, refused=refused)
    assert [trial.configuration.placement for trial in found.trials["placement"]] == [
        "balanced"
    ]
    assert found.best.configuration.placement == "balanced"
    assert found.best.memory == pytest.approx(found.written.memory, rel=0.1)


def test_a_step_that_cannot_be_divided_is_named() -> None:
    with refusal(remedy="training.global_batch_size"):
        advice(replace(WRITTEN, microbatches=3))
