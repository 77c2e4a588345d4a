# SPDX-License-Identifier: BSD-3-Clause
"""The simulation: closed forms, properties, and agreement with the repository's other models of a step."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import pipeline as bench
from bench import replay
from tests.lib.profiles import make_profile
from tests.lib.refusals import refusal
from tests.lib.simulation_cases import (
    FAST,
    KINDS,
    MODEL,
    SHAPE,
    cad,
    cluster,
    configuration,
    inputs,
    run,
    step,
)
from tests.lib.workloads import document_lengths, spanning_layout
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.tools.simulation.baselines import packed, packing_cp, reorder
from torchtitan_cad.tools.simulation.batches import Batch, named_lengths
from torchtitan_cad.tools.simulation.costs import Costs
from torchtitan_cad.tools.simulation.inputs import CHECKPOINTING, Model, Rates
from torchtitan_cad.tools.simulation.search import Search, Trial
from torchtitan_cad.tools.simulation.systems import PARTS, SYSTEMS


def test_equal_documents_gain_nothing() -> None:
    report = run(lengths=(16384,))
    assert report.systems["packed"].seconds == pytest.approx(
        report.systems["perfect"].seconds, rel=1e-9
    )
    assert report.systems["cad"].seconds == pytest.approx(
        report.systems["perfect"].seconds, rel=1e-9
    )
    assert report.systems["cad"].outcomes[0].exchanged_bytes == 0
    slow = run(
        lengths=(16384,), fsdp=True, net=5e9, cp=1
    ).systems  # parameters travel longer than layers take
    assert slow["cad"].seconds == pytest.approx(slow["packed"].seconds, rel=1e-9)


def test_attention_servers_pay_where_links_are_fast() -> None:
    """Ranks and servers share attention in proportion to their speed; on slow links everything stays with the ranks."""
    ranks = cluster().ranks
    fast = run(lengths=(16384,), servers=ranks // 2, server_net=FAST)
    alone, served = (fast.systems[name] for name in ("cad", "servers"))
    saved = alone.seconds - served.seconds
    assert saved == pytest.approx(alone.part("attention") / 3, rel=0.15)
    assert served.part("attention") == pytest.approx(
        alone.part("attention") - saved, rel=1e-6
    )
    assert " pay: " in fast.table()
    slow = run(lengths=(16384,), servers=ranks // 2, server_net=1e6)
    assert slow.systems["servers"].seconds == slow.systems["cad"].seconds
    assert "do not pay" in slow.table()
    assert "servers" not in run(lengths=(16384,)).systems


def test_one_document_per_rank_is_packed_as_the_longest_and_perfect_as_the_mean() -> (
    None
):
    rows = tuple(
        np.array([a, 16384 - a]) for a in (16384 - 128, 8192) for _ in range(4)
    )
    home = cad(Batch(rows, 16384), planner="home")
    costs = home.step.costs
    forward, backward = (
        [float(costs.document_seconds(row, direction).sum()) for row in rows]
        for direction in (True, False)
    )
    assert home.step.even("1F1B").attention == pytest.approx(
        MODEL.layers * (np.mean(forward) + np.mean(backward))
    )
    parts = home.outcome().parts
    assert parts.attention + parts.imbalance == pytest.approx(
        MODEL.layers * (max(forward) + max(backward))
    )
    assert parts.exchange == 0


@pytest.mark.parametrize("changes", [{}, {"fsdp": True}])
def test_reordered_rows_of_two_kinds_are_even(changes: dict[str, Any]) -> None:
    """Half of the ranks have long documents in two microbatches: with one of them each, or all in the first, ranks are
    even, and CAD that places has nothing to exchange either.
    """
    long, short = np.array([16384]), np.full(16, 1024)
    rows = tuple(row for row in (long, short) for _ in range(8))
    system = cad(
        Batch(rows, 16384),
        microbatches=2,
        placement="balanced",
        tolerance="auto",
        **changes,
    )
    reordered = reorder(system.step)
    assert packed(system.step).seconds > 1.05 * reordered.seconds
    assert reordered.exchanged_bytes == 0
    assert reordered.seconds == pytest.approx(system.step.even("1F1B").total)
    # the gather of the first layer's parameters is seen
    assert system.outcome().seconds <= reordered.seconds * 1.005


def test_what_cad_loses_to_perfect_adds_up() -> None:
    report = run(cp=1, nano_batches=1, net=1e9)
    assert list(report.systems) == list(SYSTEMS)
    assert all(0 < report.share_of_perfect(name) <= 1 + 1e-9 for name in SYSTEMS)
    lost = report.to_dict()["systems"]["cad"]["lost_to_perfect"]
    assert sum(lost.values()) == pytest.approx(1 - report.share_of_perfect("cad"))
    assert lost["exchange"] > 0.02


def test_how_much_faster_cad_is_than_what_fits_is_said_in_a_line() -> None:
    report = run(cp=1)
    gain = report.systems["packed"].seconds / report.systems["cad"].seconds
    assert gain > 1.01
    line = report.table().splitlines()[-1]
    assert line.startswith(
        f"cad: {gain:.2f} times as fast as packed ({gain:.2f} to {gain:.2f}), "
    )
    assert line.endswith("; means of 1 steps")
    none = Trial(configuration(), reason="does not fit")
    without = dataclasses.replace(report, systems={**report.systems, "packed": none})
    assert "as packed (" not in without.table()
    assert (
        "times as fast"
        not in dataclasses.replace(
            report, systems={**report.systems, "cad": none}
        ).table()
    )


def test_no_part_is_printed_as_less_than_nothing() -> None:
    report = run(cp=1)
    packed_trial = report.systems["packed"]
    (outcome,) = packed_trial.outcomes
    parts = dataclasses.replace(outcome.parts, bubble=-1e-9)
    rounded = dataclasses.replace(
        packed_trial, outcomes=(dataclasses.replace(outcome, parts=parts),)
    )
    assert (
        "-0.0"
        not in dataclasses.replace(
            report, systems={**report.systems, "packed": rounded}
        ).table()
    )


def test_rows_are_not_kept_in_ticks_which_refuse_it() -> None:
    fast: dict[str, Any] = {
        "net": FAST,
        "node": FAST,
        "latency": 0.0,
        "pp": 2,
        "cp": 1,
        "nano_batches": 1,
    }
    chosen = {
        kept: run(**fast, backward=kept).systems["cad"].configuration.schedule
        for kept in ("resend", "keep")
    }
    assert chosen == {"resend": "CAD1F1B", "keep": "1F1B"}
    for model in (KINDS, dataclasses.replace(MODEL, idle_ffn=4096)):
        assert run(**fast, model=model).systems["cad"].configuration.schedule == "1F1B"
    forced = run(**fast, model=KINDS, schedule="CAD1F1B", microbatches=2)
    assert forced.systems["cad"].reason == "these settings cannot run"


def test_every_kind_of_attention_takes_its_own_time() -> None:
    """By hand, in tiles: a document of 128 rows of tiles, of which a row of the window has two and a chunk eight."""
    tiles = {
        "full": 128 * 129 // 2,
        "window": 1 + 127 * 2,
        "chunked": 16 * (8 * 9 // 2),
    }
    seconds = 4 * SHAPE.num_heads * SHAPE.head_dim * 128**2 / Rates().attention_flops
    of_rows = 8 * seconds * (2 * tiles["full"] + tiles["window"] + tiles["chunked"]) / 4
    assert step(lengths=(16384,), model=KINDS).layer_attention[0] == pytest.approx(
        of_rows
    )
    plain, kinds = (packed(step(cp=4, model=model)) for model in (MODEL, KINDS))
    # only layers in full gather keys
    assert kinds.exchanged_bytes * 2 == plain.exchanged_bytes > 0
    moved = {
        plans[0].shape.window: plans[0].moves_rows
        for plans in cad(cp=4, model=KINDS).plans((0,))[::2]
    }
    assert moved == {None: True, 128: True}


@pytest.mark.parametrize(
    "changes",
    [{"nano_batches": 2}, {"placement": "balanced", "tolerance": "auto", "cp": 4}],
)
def test_chunks_that_cut_nothing_are_full_attention(changes: dict[str, Any]) -> None:
    kinds = (
        AttentionKind("full", 2, SHAPE),
        AttentionKind("chunked", 2, SHAPE, block=16384),
    )
    several, plain = (
        cad(model=dataclasses.replace(MODEL, attention=kinds), **changes),
        cad(**changes),
    )
    assert several.outcome() == plain.outcome()
    waits = [reorder(each.step).parts.imbalance for each in (several, plain)]
    assert waits[0] == pytest.approx(waits[1])


def test_latents_are_made_by_every_tp_rank() -> None:
    """By hand: latents of 32 and 16, a shared part of 4 of 8 elements of a key, values of 6."""
    shape = dataclasses.replace(
        SHAPE, num_kv_heads=8, head_dim=8, value_dim=6, shared_dim=4
    )
    model = Model(
        4,
        64,
        8,
        8,
        8,
        100,
        1,
        query_rank=32,
        key_rank=16,
        attention=(AttentionKind("full", 4, shape),),
    )
    made, latents = 32 * 8 * 8 + 16 * 8 * (4 + 6), 64 * (32 + 16 + 4)
    assert [model.pre_parameters(tp) for tp in (1, 2)] == [
        made + latents,
        made + 2 * latents,
    ]
    assert model.post_parameters == 64 * (8 * 6 + 3 * 100)
    forward, backward = Costs(
        model, cluster(), Rates(attention_flops=1e12, backward_flops=1e12)
    ).unit_seconds
    assert (forward, backward) == (
        8 * 128**2 * 2 * (8 + 6) / 1e12,
        8 * 128**2 * (6 * 8 + 4 * 6) / 1e12,
    )


def test_backward_begins_with_the_half_that_forward_ends_with() -> None:
    """As autograd does: runtime/tick_engine.py and integration/pingpong/loop.py."""
    system = cad(planner="home", nano_batches=2)
    forward, backward = (
        [nano.attention.sum() for nano in system._nanos((0,), way, False)[0]]
        for way in (True, False)
    )
    assert forward[0] < forward[1]  # the first halves of rows have fewer keys
    assert backward[0] > backward[1]


def test_halves_of_checkpointed_blocks_hide_the_exchange_inside_the_block_alone() -> (
    None
):
    """Forward shows what the other half's work before attention does not hide, in every layer."""
    exposed = {}
    for kind in ("none", "linear", "full"):
        system = cad(nano_batches=2, checkpointing=kind, net=5e9, node=5e9)
        times = [
            system._alone(True, (0,), exchange).max() for exchange in (True, False)
        ]
        exposed[kind] = times[0] - times[1]
    assert exposed["full"] > exposed["none"] + 1e-4
    assert exposed["linear"] == exposed["none"]


def test_backward_repeats_what_checkpointing_dropped() -> None:
    costs = Costs(MODEL, cluster(tp=2), Rates())
    forward = np.array(costs.segments(1000, True))
    backward = {
        kind: np.array(costs.segments(1000, False, kind)) for kind in CHECKPOINTING
    }
    assert backward["linear"] == pytest.approx(forward + backward["none"])
    assert (backward["none"] < backward["selective"]).all()
    assert (backward["selective"] < backward["linear"]).all()
    products = Costs(MODEL, cluster(tp=2), Rates(memory_bandwidth=FAST))
    again = products.segments(1000, False, "selective", tp=False)
    assert again == pytest.approx(
        [2.5 * one for one in products.segments(1000, True, tp=False)]
    )
    steps = {
        kind: step(tp=2, microbatches=2, checkpointing=kind) for kind in CHECKPOINTING
    }
    attention = {kind: each.even("1F1B").attention for kind, each in steps.items()}
    assert (
        attention["none"]
        == attention["selective"]
        == attention["linear"]
        < attention["full"]
    )
    assert steps["linear"].work(False) == pytest.approx(steps["full"].work(False))


def test_norms_rotary_embedding_activation_and_loss_take_their_bytes() -> None:
    """By hand, of a token: two passes over the hidden state for a norm, three for a sum (``elementwise_elements``)."""
    fast, plain = (
        Costs(MODEL, cluster(), Rates(memory_bandwidth=rate)) for rate in (FAST, 2e12)
    )
    hidden, wide, rotary = (
        MODEL.hidden,
        MODEL.ffn,
        2 * MODEL.head_dim * (MODEL.heads + MODEL.kv_heads),
    )
    forward, backward = (
        [2 * hidden + rotary, 8 * hidden + 3 * wide],
        [3 * hidden + rotary, 9 * hidden + 5 * wide],
    )
    for way, elements in ((True, forward), (False, backward)):
        added = 2e12 * (np.array(plain.segments(1, way)) - fast.segments(1, way))
        assert added == pytest.approx([2 * each for each in elements], rel=1e-6)
    loss = sum(
        2e12 * (plain.head_seconds(1, way) - fast.head_seconds(1, way))
        for way in (True, False)
    )
    assert loss == pytest.approx(MODEL.vocabulary * 16, rel=1e-6)


def test_seconds_of_a_step_come_on_top_in_every_system() -> None:
    reports = [
        run(cp=1, nano_batches=1, seconds_per_step=extra) for extra in (0.0, 0.5)
    ]
    for name, system in reports[0].systems.items():
        assert reports[1].systems[name].seconds == pytest.approx(system.seconds + 0.5)


def test_packing_in_more_microbatches_than_rows_allow_is_not_faster_than_perfect() -> (
    None
):
    """Two rows of many short documents: CAD can cut them in two microbatches, packing in sixteen."""
    report = run(
        lengths=(512,),
        step_tokens=2 * 16384,
        ranks=4,
        pp=2,
        open={"cp", "microbatches", "nano_batches"},
    )
    assert report.systems["packing_cp"].configuration.microbatches == 16
    assert 0.9 < report.share_of_perfect("packing_cp") <= 1


def test_infinite_bandwidth_hides_exchanges_and_hardly_any_makes_cad_slower_than_packed() -> (
    None
):
    (outcome,) = (
        run(net=FAST, node=FAST, latency=0.0, nano_batches=1).systems["cad"].outcomes
    )
    assert outcome.parts.exchange == pytest.approx(0, abs=1e-12)
    report = run(net=1e6, node=1e6, cp=1)
    assert report.systems["cad"].part("exchange") > 1e3 * report.systems["packed"].part(
        "imbalance"
    )
    assert report.systems["cad"].seconds > report.systems["packed"].seconds


@settings(max_examples=10)
@given(st.floats(0, 1), st.integers(0, 3))
def test_imbalance_stays_within_the_tolerance(tolerance: float, seed: int) -> None:
    system = cad(seed=seed, tolerance=tolerance)
    ((plan,),) = system.plans((0,))
    parts = system.outcome().parts
    bound = (plan.stats.guaranteed_over_mean - 1) * parts.attention
    assert -1e-12 <= parts.imbalance <= bound * (1 + 1e-9) + 1e-9 * parts.attention


@settings(max_examples=10)
@given(
    st.integers(0, 20), st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.floats(1e9, 1e12), st.booleans(),
    st.sampled_from(CHECKPOINTING), st.sampled_from(["1F1B", "CAD1F1B"]), st.booleans(),
)  # fmt: skip
def test_parts_add_up_and_nothing_is_faster_than_perfect(
    seed: int,
    pp: int,
    nano_batches: int,
    net: float,
    fsdp: bool,
    checkpointing: Any,
    schedule: Any,
    several: bool,
) -> None:
    changes = {
        "checkpointing": checkpointing,
        "pp": pp,
        "net": net,
        "fsdp": fsdp,
        "tp": 2,
        "microbatches": 2,
    }
    changes["model"] = KINDS if several and schedule == "1F1B" else MODEL
    system = cad(
        seed=seed, cp=pp, nano_batches=nano_batches, schedule=schedule, **changes
    )
    perfect = system.step.even("CAD1F1B").total
    packings = [packing_cp(step(seed=seed, cp=cp, **changes)) for cp in (1, 4 // pp)]
    greedy = cad(
        seed=seed, cp=pp, nano_batches=nano_batches, planner="greedy", **changes
    )
    assert reorder(system.step).seconds <= packed(system.step).seconds
    for outcome in (
        system.outcome(),
        greedy.outcome(),
        packed(system.step),
        reorder(system.step),
        *packings,
    ):
        assert outcome is not None
        assert outcome.seconds >= perfect * (1 - 1e-9)
        assert sum(getattr(outcome.parts, part) for part in PARTS) == pytest.approx(
            outcome.seconds
        )
        assert all(getattr(outcome.parts, part) >= -1e-12 for part in PARTS), (
            outcome.parts
        )


def test_ping_pong_hides_what_a_single_stream_shows() -> None:
    exposed = {
        nano: run(nano_batches=nano, net=50e9).systems["cad"].part("exchange")
        for nano in (1, 2)
    }
    assert exposed[2] < 0.5 * exposed[1]
    one, two = (
        cad(planner="home", nano_batches=nano).seconds(False) for nano in (1, 2)
    )
    # nothing is exchanged, but halves of rows cut some tiles
    assert two == pytest.approx(one, rel=0.01)


@pytest.mark.matrix
def test_agrees_with_the_pipeline_bench() -> None:
    """The same documents and costs: bench/pipeline.py hides exchanges and counts work in forward linear work."""
    pp, dp, microbatches = 4, 4, 4
    lengths = [document_lengths("lognormal", dp, seed) for seed in range(microbatches)]
    theirs = bench.Step([spanning_layout(each, dp) for each in lengths], pp, dp)
    model = Model(32, 4096, 32, 8, 128, 14336, 1)
    linear = 32768 * 2 * model.layer_parameters
    # operations of a pair in the bench
    per_pair = linear / (32768 * bench.PAIRS_PER_TOKEN)
    attention = 640e12 * 4 * 4096 / per_pair
    # no elementwise work
    rates = {
        "attention_flops": attention,
        "backward_flops": attention,
        "memory_bandwidth": FAST,
    }
    network = {"ranks": 16, "net": FAST, "node": FAST, "latency": 0.0}
    batch = Batch(tuple(np.array(each) for each in lengths), dp * 32768)
    division = {"pp": pp, "cp": dp, "microbatches": microbatches}
    for schedule, name in (("1F1B", "1F1B + CAD"), ("CAD1F1B", "CAD1F1B")):
        mine = cad(
            batch, model=model, schedule=schedule, **rates, **network, **division
        )
        unit = linear / 640e12 * mine.step.layers
        assert mine.seconds(False) / unit == pytest.approx(
            bench.simulate(theirs, name), rel=0.05
        )
        assert mine.step.even("CAD1F1B").total / unit == pytest.approx(
            theirs.ideal(), rel=0.05
        )


def test_agrees_with_what_a_replay_measured() -> None:
    """Slowest rank over the mean of the home plan, backward on 8 CPU ranks (bench/results/replay_cpu.json)."""
    results = json.loads(
        (Path(replay.__file__).parent / "results" / "replay_cpu.json").read_text()
    )
    options = {
        key: tuple(v) if isinstance(v, list) else v
        for key, v in results["options"].items()
    }
    layout = replay.make_layout(replay.Options(**options), 8)
    (row,) = [row for row in results["rows"] if row["ranks"] == 8]
    measured = row["planned"]["backward"]["makespan"] / row["home"]["backward"]["mean"]
    model = Model(
        1, 1024, *options["heads"], options["head_dim"], 1024, 1, dtype_bytes=4
    )
    rows = tuple(layout.doc_lengths[None].astype(np.int64))
    parts = cad(Batch(rows, int(layout.num_tokens)), model=model, cp=8).outcome().parts
    assert 1 + parts.imbalance / parts.attention == pytest.approx(measured, rel=0.05)


def test_a_profile_replaces_the_rates() -> None:
    profile = make_profile(MODEL.shape(1))
    costs = Costs(MODEL, cluster(), Rates(profile=profile))
    forward = profile.cost_model("forward", MODEL.shape(1))
    expected = forward.prefix_cost(4096)[-1] * 1e-12
    assert costs.document_seconds(np.array([4096]), True)[0] == pytest.approx(expected)
    report = run(profile=profile)
    assert report.share_of_perfect("cad") > report.share_of_perfect("packed")


def test_packing_keeps_what_it_gathered_where_that_fits() -> None:
    """Kept keys and values spare a gather in backward, and take memory in every layer."""
    kept, again = (packing_cp(step(cp=4, backward=way)) for way in ("keep", "resend"))
    assert kept is not None
    assert again is not None
    assert kept.seconds < again.seconds
    assert kept.exchanged_bytes * 3 == pytest.approx(again.exchanged_bytes * 2)
    assert kept.memory.gathered == MODEL.layers * again.memory.gathered
    chosen = run(nano_batches=1, packing_cp=4).systems["packing_cp"].configuration
    assert (chosen.cp, chosen.backward) == (4, "keep")
    middle = (kept.memory.total + again.memory.total) / 2
    search = Search(inputs(memory=middle))
    fits = {
        way: search.run("packing_cp", configuration(cp=4, backward=way)).fits
        for way in ("keep", "resend")
    }
    assert fits == {"keep": False, "resend": True}


def test_what_does_not_fit_is_reported_and_not_used() -> None:
    report = run(memory=1e6)
    assert not any(system.fits for system in report.systems.values())
    assert "GB" in report.systems["cad"].reason
    assert report.to_dict()["systems"]["cad"]["seconds_per_step"] is None
    assert report.systems["cad"].seconds == float("inf")


def test_placement_is_of_cad_alone() -> None:
    loader, balanced = (
        run(cp=1, nano_batches=1, placement=each).systems
        for each in ("loader", "balanced")
    )
    assert loader["cad"].seconds != balanced["cad"].seconds
    assert loader["greedy"].seconds == balanced["greedy"].seconds


@pytest.mark.parametrize(
    "change",
    [
        {"tp": 3, "ranks": 9},
        {"ranks": 0},
        {"net": 0},
        {"latency": float("nan")},
        {"latency": 20},
        {"net": 40},
        {"memory": 141.0},
        {"memory_bandwidth": 3.35},
        {"lengths": (0,)},
        {"pp": 3},
        {"placement": "best"},
        {"backward": "never"},
        {"tolerance": -1.0},
    ],
)
def test_wrong_numbers_are_named(
    change: dict[str, Any],
) -> None:
    with refusal():
        run(**change)


def test_named_lengths() -> None:
    pretrain, more = (
        named_lengths("pretrain"),
        named_lengths("pretrain:scale=4,long=0.5,max=524288"),
    )
    assert np.median(pretrain) == pytest.approx(3227, rel=0.01)
    assert pretrain[pretrain >= 65536].sum() / pretrain.sum() == pytest.approx(
        0.128, abs=0.01
    )
    assert more[more >= 65536].sum() / more.sum() == pytest.approx(0.5, abs=0.01)
    assert set(named_lengths("fixed:length=300").tolist()) == {300}
    assert named_lengths("uniform:min=10,max=20").max() <= 20
