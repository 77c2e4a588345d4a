"""Advice: what is recommended is simulated, fits, is not refused, and gains; what the new settings cost and need."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench import memory as bench_memory
from tests.simulation.cases import FAST, MODEL, cluster, documents
from torchtitan_cad.cli.advise_text import BASE, table
from torchtitan_cad.planning import PlannerConfig
from torchtitan_cad.planning.memory import attention_memory
from torchtitan_cad.simulation import MODELS, Advice, Configuration, Costs, Rates, Settings, advise, draw_batches
from torchtitan_cad.simulation.advice import LEAST_GAIN
from torchtitan_cad.simulation.batches import Split
from torchtitan_cad.simulation.disaggregated import Disaggregated
from torchtitan_cad.simulation.inputs import CHECKPOINTING
from torchtitan_cad.simulation.memory import stock_attention, working_bytes
from torchtitan_cad.simulation.step import Step

WRITTEN = Configuration()
LONG = (300, 700, 1500, 4000, 16384)


def advice(job: Configuration = WRITTEN, refused: Any = lambda choice: "", **changes: Any) -> Advice:
    drawn = documents(changes.pop("lengths", LONG))
    return advise(MODEL, cluster(**{"pp": None, **changes}), drawn, Settings(), Rates(), job, refused)


as_written = functools.cache(advice)
"""The advice that several tests look at."""


def disaggregated(settings: Settings, nano_batches: int = 2, **changes: Any) -> Disaggregated:
    costs = Costs(
        replace(MODEL, checkpointing=changes.pop("checkpointing", "none")), cluster(**changes), Rates(), settings
    )
    batch = draw_batches(documents(LONG))[0]
    split = Split.of(batch, 8, 1, 1)
    assert split is not None
    system = Disaggregated(Step(costs, batch, 1, split), "local_search", nano_batches, "1F1B")
    system.plans((0,))
    return system


def test_recommended_changes_gain_and_are_simulated_together() -> None:
    found = as_written()
    assert found.base is found.written
    assert found.best.seconds < found.written.seconds
    assert found.worth
    assert all(worth is None or worth >= LEAST_GAIN for worth in found.worth.values())
    for name, trials in found.trials.items():
        assert all(name in trial.configuration.changes(found.base.configuration) for trial in trials)


def test_the_table_says_what_gains_are_over_and_what_is_taken() -> None:
    found = as_written()
    lines = table(found).splitlines()
    (base,) = [line for line in lines if line.endswith(BASE)]
    assert base.split()[:4] == ["with", "cad", "as", "written"]
    taken = found.best.configuration.changes(found.base.configuration)
    assert sum(line.endswith("  taken") for line in lines) == len(taken) > 0


def test_equal_documents_are_not_worth_it() -> None:
    found = advice(lengths=(16384,))
    assert found.speedup == pytest.approx(1)
    assert not found.worth_it
    assert found.best is found.written


def test_what_the_job_refuses_is_not_recommended() -> None:
    free = as_written()
    assert free.best.configuration.backward == "keep" or free.best.configuration.nano_batches == 2
    bound = advice(refused=lambda c: "no" if c.backward == "keep" or c.nano_batches == 2 or c.cp > 1 else "")
    assert (bound.best.configuration.backward, bound.best.configuration.nano_batches, bound.best.configuration.cp) == (
        "resend",
        1,
        1,
    )
    assert bound.trials["nano_batches"][0].reason == "no"


@pytest.mark.matrix
def test_checkpointing_is_as_little_as_fits() -> None:
    needs = {kind: advice(replace(WRITTEN, checkpointing=kind)).written.memory for kind in CHECKPOINTING}
    assert needs["none"] > needs["selective"] > needs["linear"] > needs["full"]
    tight = advice(memory=(needs["none"] + needs["selective"]) / 2)
    assert not tight.written.fits
    assert tight.base.configuration.checkpointing == tight.best.configuration.checkpointing == "selective"
    assert tight.best.memory <= (needs["none"] + needs["selective"]) / 2
    roomy = advice(replace(WRITTEN, checkpointing="full"))
    assert roomy.best.configuration.checkpointing == "none"
    assert not advice(memory=1e6).worth_it


def test_keeping_rows_takes_memory_and_saves_time() -> None:
    resend, keep = (disaggregated(Settings(backward=backward), net=1e9) for backward in ("resend", "keep"))
    assert keep.total() < resend.total()
    assert keep.outcome().exchanged_bytes < resend.outcome().exchanged_bytes
    assert resend.memory().kept == 0
    shape, plans = MODEL.shape(1), keep.plans((0,))
    rows = [sum(getattr(plan, name).rows_in() for plan in plans) for name in ("query_needs", "key_needs")]
    per_layer = rows[0] * shape.num_heads * shape.head_dim * 2 + rows[1] * shape.kv_bytes
    assert keep.memory().kept == MODEL.layers * per_layer.max()
    full = disaggregated(Settings(backward="keep"), checkpointing="full")
    assert full.memory().kept == per_layer.max()


def test_auto_tolerance_is_even_on_a_fast_network_and_home_on_a_slow_one() -> None:
    settings = Settings(PlannerConfig(tolerance=0.05), auto_tolerance=True)
    fast, slow = disaggregated(settings, net=FAST, node=FAST), disaggregated(settings, 1, net=1e7)
    assert {plan.config.tolerance for plan in fast.plans((0,))} == {0.0}
    assert {plan.config.tolerance for plan in slow.plans((0,))} == {0.5}


@pytest.mark.parametrize("nano_batches", [1, 2])
@pytest.mark.parametrize("gigabytes", [None, 1e-3])
def test_buffers_are_those_of_the_job(nano_batches: int, gigabytes: float | None) -> None:
    system = disaggregated(Settings(receive_buffer_gb=gigabytes), nano_batches)
    buffers = attention_memory(system.plans((0,)), receive_buffer_gb=gigabytes).buffers
    assert system.memory().slots == buffers
    assert buffers == pytest.approx(1e9 * (gigabytes or nano_batches), rel=2e-3)


@pytest.mark.parametrize("layout", ["whole documents", "one big"])
def test_memory_has_attentions_working_memory_as_the_bench_states_it(layout: str) -> None:
    costs = Costs(MODELS["llama-8b"], cluster(), Rates())
    stated = bench_memory.measure(layout, 8, (11,), 2)
    working = working_bytes(costs, [bench_memory.plans_of(layout, 8, 11, 2)])
    assert working == max(stated.forward, stated.backward)
    assert stock_attention(costs, 32768, 32768, 10) == pytest.approx(stated.stock_backward, rel=0.03)
    system = disaggregated(Settings())
    memory = system.memory()
    assert memory.attention == working_bytes(system.step.costs, [system.plans((0,))]) > 0
    assert memory.total - dataclasses.replace(memory, attention=0.0).total == pytest.approx(memory.attention)


def test_plans_that_do_not_know_nodes_send_more_between_them() -> None:
    between = []
    for node_aware in (True, False):
        system = disaggregated(Settings(node_aware=node_aware), 1, ranks_per_node=4)
        plan = system.plans((0,))[0]
        inside, _ = plan.key_needs.rows_inside(np.arange(8) // 4)
        between.append(int((plan.key_needs.rows_in() - inside).sum()))
    assert between[0] <= between[1]
    assert disaggregated(Settings(node_aware=True), 1, ranks_per_node=4)._config(8).ranks_per_node == 4
    assert disaggregated(Settings(node_aware=False), 1, ranks_per_node=4)._config(8).ranks_per_node is None


def test_placement_is_tried_and_recommended_where_it_gains() -> None:
    """Few long documents over a slow network, and no other setting allowed."""
    job = replace(WRITTEN, cp=4)
    few, slow = documents((300, 300, 300, 16384)), cluster(ranks=32, ranks_per_node=1, net=5e9)
    refused = lambda choice: "" if set(choice.changes(job)) <= {"placement"} else "no"  # noqa: E731
    found = advise(MODEL, slow, few, Settings(), Rates(), job, refused)
    (trial,) = found.trials["placement"]
    assert trial.configuration.placement == found.best.configuration.placement == "balanced"
    assert found.worth["placement"] == pytest.approx(found.best.gain_over(found.written))
    assert found.best.memory == pytest.approx(found.written.memory, rel=0.1)
    kept = advice(lengths=(16384,))
    assert (kept.best.configuration.placement, kept.trials["placement"][0].gain_over(kept.base)) == ("loader", 0)


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="placement = 'best': set one of loader, balanced"):
        Settings(placement="best")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backward = 'never': set one of resend, keep"):
        Settings(backward="never")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="in 3 microbatches: set a global_batch_size"):
        advice(replace(WRITTEN, microbatches=3))
