# SPDX-License-Identifier: BSD-3-Clause
"""Memory of a simulated step: what rows that are kept and attention take, and what checkpointing saves."""

from dataclasses import replace

import pytest

from tests.lib.simulation_cases import MODEL, cad, configuration
from torchtitan_cad.planning.keeping import CHECKPOINTING
from torchtitan_cad.tools.simulation.memory import stock_attention

LONG = (300, 700, 1500, 4000, 16384)


def planned(**changes):
    system = cad(lengths=LONG, **{"nano_batches": 2, **changes})
    system.plans((0,))
    return system


def test_torchtitan_alone_does_not_keep_attention():
    job = configuration(checkpointing="linear")
    assert job.without_cad() == configuration(checkpointing="full")


def test_checkpointing_saves_memory():
    needs = [planned(checkpointing=kind).memory().total for kind in CHECKPOINTING]
    assert needs == sorted(needs, reverse=True)


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
    def bytes_within(memory):
        system = planned(backward="auto", net=1e9, memory=memory)
        return system.outcome().exchanged_bytes

    resend = planned(backward="resend", net=1e9)
    keep = planned(backward="keep", net=1e9).outcome()
    assert bytes_within(1e15) == keep.exchanged_bytes
    assert bytes_within(resend.memory().total) == resend.outcome().exchanged_bytes
    ticks = {"pp": 2, "microbatches": 2, "schedule": "CAD1F1B"}
    assert planned(backward="auto", memory=1e15, **ticks).outcome().memory.kept == 0


def test_attention_takes_more_memory_with_cad():
    system = planned()
    memory = system.memory()
    stock = stock_attention(system.step, system.step.tokens, system.step.tokens, 0)
    assert 1.1 * stock < memory.attention < 4 * stock
    without = replace(memory, attention=0.0)
    assert memory.total - without.total == pytest.approx(memory.attention)


def test_plans_know_nodes():
    for ranks_per_node, known in ((4, 4), (8, None)):
        system = planned(nano_batches=1, ranks_per_node=ranks_per_node)
        assert system.plans((0,))[0][0].config.ranks_per_node == known
