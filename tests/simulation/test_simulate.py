# SPDX-License-Identifier: BSD-3-Clause
"""The simulation: closed forms, properties, and agreement with the repository's other models of a step."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import paper, replay
from bench.gpu import results
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
from torchtitan_cad.planning.keeping import CHECKPOINTING
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.tools.simulation.baselines import packed, packing_cp, reorder
from torchtitan_cad.tools.simulation.batches import Batch, named_lengths
from torchtitan_cad.tools.simulation.costs import Costs
from torchtitan_cad.tools.simulation.inputs import Model, Rates
from torchtitan_cad.tools.simulation.search import Search
from torchtitan_cad.tools.simulation.systems import PARTS, SYSTEMS


def test_equal_documents_gain_nothing():
    systems = run(lengths=(16384,)).systems
    perfect = pytest.approx(systems["perfect"].seconds, rel=1e-9)
    assert systems["packed"].seconds == perfect
    assert systems["cad"].seconds == perfect
    assert systems["cad"].outcomes[0].exchanged_bytes == 0
    # parameters travel longer than layers take
    slow = run(lengths=(16384,), fsdp=True, net=5e9, cp=1).systems
    assert slow["cad"].seconds == pytest.approx(slow["packed"].seconds, rel=1e-9)


def test_attention_servers_pay_where_links_are_fast():
    """Ranks and servers share attention in proportion to their speed; on slow links everything stays with the ranks."""
    servers = cluster().ranks // 2
    fast = run(lengths=(16384,), servers=servers, server_net=FAST)
    alone = fast.systems["cad"]
    served = fast.systems["servers"]
    saved = alone.seconds - served.seconds
    attention = alone.part("attention")
    assert saved == pytest.approx(attention / 3, rel=0.15)
    assert served.part("attention") == pytest.approx(attention - saved, rel=1e-6)
    assert " pay: " in fast.table()
    slow = run(lengths=(16384,), servers=servers, server_net=1e6)
    assert slow.systems["servers"].seconds == slow.systems["cad"].seconds
    assert "do not pay" in slow.table()
    assert "servers" not in run(lengths=(16384,)).systems


def test_one_document_per_rank_is_packed_as_the_longest_and_perfect_as_the_mean():
    rows = [np.array([first, 16384 - first]) for first in (16384 - 128, 8192)] * 4
    home = cad(Batch(tuple(rows), 16384), planner="home")
    seconds_of = home.step.costs.document_seconds
    forward = [seconds_of(row, True).sum() for row in rows]
    backward = [seconds_of(row, False).sum() for row in rows]
    mean = MODEL.layers * (np.mean(forward) + np.mean(backward))
    assert home.step.even("1F1B").attention == pytest.approx(mean)
    parts = home.outcome().parts
    longest = MODEL.layers * (max(forward) + max(backward))
    assert parts.attention + parts.imbalance == pytest.approx(longest)
    assert parts.exchange == 0


@pytest.mark.parametrize("fsdp", [False, True])
def test_reordered_rows_of_two_kinds_are_even(fsdp):
    """Half of the ranks have long documents in two microbatches: with one of them each, or all in the first, ranks are
    even, and CAD that places has nothing to exchange either.
    """
    long = np.array([16384])
    short = np.full(16, 1024)
    system = cad(
        Batch((*[long] * 8, *[short] * 8), 16384),
        microbatches=2,
        placement="balanced",
        tolerance="auto",
        fsdp=fsdp,
    )
    reordered = reorder(system.step)
    assert packed(system.step).seconds > 1.05 * reordered.seconds
    assert reordered.exchanged_bytes == 0
    assert reordered.seconds == pytest.approx(system.step.even("1F1B").total)
    # the gather of the first layer's parameters is seen
    assert system.outcome().seconds <= reordered.seconds * 1.005


def test_how_much_faster_cad_is_than_what_fits_is_said_in_a_line():
    """That parts add up is drawn below."""
    report = run(cp=1)
    assert list(report.systems) == list(SYSTEMS)
    assert all(0 < report.share_of_perfect(name) <= 1 + 1e-9 for name in SYSTEMS)
    cad_trial = report.systems["cad"]
    gain = report.systems["packed"].seconds / cad_trial.seconds
    assert gain > 1.01
    line = report.table().splitlines()[-1]
    assert f"{gain:.2f} times as fast as packed ({gain:.2f} to {gain:.2f}), " in line
    assert line.endswith("; means of 1 steps")
    slow = run(cp=1, nano_batches=1, net=1e9).systems["cad"]
    assert slow.part("exchange") > 0.02 * slow.seconds


def test_rows_are_not_kept_in_ticks_which_refuse_it():
    free = {"net": FAST, "node": FAST, "latency": 0.0, "pp": 2, "cp": 1}

    def cad_trial(**changes):
        return run(**free, nano_batches=1, **changes).systems["cad"]

    assert cad_trial(backward="resend").configuration.schedule == "CAD1F1B"
    for refused in (
        {"backward": "keep"},
        {"model": KINDS},
        {"model": dataclasses.replace(MODEL, idle_ffn=4096)},
    ):
        assert cad_trial(**refused).configuration.schedule == "1F1B"
    forced = cad_trial(model=KINDS, schedule="CAD1F1B", microbatches=2)
    assert forced.reason == "these settings cannot run"


def test_every_kind_of_attention_takes_its_own_time():
    """By hand, in tiles: a document of 128 rows of tiles, of which a row of the window has two and a chunk eight."""
    full = 128 * 129 // 2
    window = 1 + 127 * 2
    chunked = 16 * (8 * 9 // 2)
    of_tile = 4 * SHAPE.num_heads * SHAPE.head_dim * 128**2 / Rates().attention_flops
    of_rows = 8 * of_tile * (2 * full + window + chunked) / 4
    found = step(lengths=(16384,), model=KINDS).layer_attention[0]
    assert found == pytest.approx(of_rows)
    plain = packed(step(cp=4, model=MODEL)).exchanged_bytes
    # only layers in full gather keys
    assert packed(step(cp=4, model=KINDS)).exchanged_bytes * 2 == plain > 0
    of_full, _, of_window = cad(cp=4, model=KINDS).plans((0,))
    assert (of_full[0].shape.window, of_window[0].shape.window) == (None, 128)
    assert of_full[0].moves_rows
    assert of_window[0].moves_rows


@pytest.mark.parametrize(
    "changes",
    [{"nano_batches": 2}, {"placement": "balanced", "tolerance": "auto", "cp": 4}],
)
def test_chunks_that_cut_nothing_are_full_attention(changes):
    full = AttentionKind("full", 2, SHAPE)
    whole_rows = AttentionKind("chunked", 2, SHAPE, block=16384)
    model = dataclasses.replace(MODEL, attention=(full, whole_rows))
    several = cad(model=model, **changes)
    plain = cad(**changes)
    assert several.outcome() == plain.outcome()
    wait = reorder(plain.step).parts.imbalance
    assert reorder(several.step).parts.imbalance == pytest.approx(wait)


def test_latents_are_made_by_every_tp_rank():
    """By hand: latents of 32 and 16, a shared part of 4 of 8 elements of a key, values of 6."""
    shape = dataclasses.replace(
        SHAPE, num_kv_heads=8, head_dim=8, value_dim=6, shared_dim=4
    )
    model = Model(
        layers=4,
        hidden=64,
        heads=8,
        kv_heads=8,
        head_dim=8,
        ffn=100,
        vocabulary=1,
        query_rank=32,
        key_rank=16,
        attention=(AttentionKind("full", 4, shape),),
    )
    made = 32 * 8 * 8 + 16 * 8 * (4 + 6)
    latents = 64 * (32 + 16 + 4)
    assert model.pre_parameters(1) == made + latents
    assert model.pre_parameters(2) == made + 2 * latents
    assert model.post_parameters == 64 * (8 * 6 + 3 * 100)
    rates = Rates(attention_flops=1e12, backward_flops=1e12)
    forward, backward = Costs(model, cluster(), rates).unit_seconds
    assert forward == 8 * 128**2 * 2 * (8 + 6) / 1e12
    assert backward == 8 * 128**2 * (6 * 8 + 4 * 6) / 1e12


def test_backward_repeats_what_checkpointing_dropped():
    costs = Costs(MODEL, cluster(tp=2), Rates())
    forward = np.array(costs.segments(1000, True))
    none, selective, linear = (
        np.array(costs.segments(1000, False, kind))
        for kind in ("none", "selective", "linear")
    )
    assert linear == pytest.approx(forward + none)
    assert (none < selective).all()
    assert (selective < linear).all()
    steps = [
        step(tp=2, microbatches=2, checkpointing=kind) for kind in ("linear", "full")
    ]
    kept, recomputed = (one.even("1F1B").attention for one in steps)
    assert kept < recomputed
    assert steps[0].work(False) == pytest.approx(steps[1].work(False))


def test_packing_in_more_microbatches_than_rows_allow_is_not_faster_than_perfect():
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


@settings(max_examples=10)
@given(
    seed=st.integers(0, 20),
    pp=st.sampled_from([1, 2]),
    nano_batches=st.sampled_from([1, 2]),
    several_kinds=st.booleans(),
    machines=st.fixed_dictionaries(
        {
            "net": st.floats(1e9, 1e12),
            "fsdp": st.booleans(),
            "checkpointing": st.sampled_from(CHECKPOINTING),
            "schedule": st.sampled_from(["1F1B", "CAD1F1B"]),
        }
    ),
)
def test_parts_add_up_and_nothing_is_faster_than_perfect(
    seed, pp, nano_batches, several_kinds, machines
):
    machines |= {"seed": seed, "pp": pp, "tp": 2, "microbatches": 2}
    if several_kinds and machines["schedule"] == "1F1B":
        machines["model"] = KINDS
    system = cad(cp=pp, nano_batches=nano_batches, **machines)
    perfect = system.step.even("CAD1F1B").total
    at_home = packed(system.step)
    reordered = reorder(system.step)
    assert reordered.seconds <= at_home.seconds
    packings = [packing_cp(step(cp=cp, **machines)) for cp in (1, 4 // pp)]
    for outcome in (system.outcome(), at_home, reordered, *packings):
        assert outcome.seconds >= perfect * (1 - 1e-9)
        parts = [getattr(outcome.parts, part) for part in PARTS]
        assert sum(parts) == pytest.approx(outcome.seconds)
        assert min(parts) >= -1e-12, outcome.parts


def test_ping_pong_hides_what_a_single_stream_shows():
    single, double = (
        run(nano_batches=nano_batches, net=50e9).systems["cad"].part("exchange")
        for nano_batches in (1, 2)
    )
    assert double < 0.5 * single
    # nothing is exchanged, but halves of rows cut some tiles
    whole = cad(planner="home", nano_batches=1).seconds(False)
    halves = cad(planner="home", nano_batches=2).seconds(False)
    assert halves == pytest.approx(whole, rel=0.01)


def test_agrees_with_what_a_replay_measured():
    """Slowest rank over the mean of the home plan, ranks one after another on one H200, forward and backward."""
    path = results.RESULTS / "h200-replay.json"
    options = replay.Options(tokens_per_rank=32_768)
    model = Model(1, 1024, *options.heads, options.head_dim, 1024, 1)
    for row in json.loads(path.read_text())["figures"]["plans"]:
        layout = replay.make_layout(options, row["ranks"])
        batch = Batch((layout.doc_lengths.astype(np.int64),), layout.num_tokens)
        parts = cad(batch, model=model, cp=row["ranks"]).outcome().parts
        predicted = 1 + parts.imbalance / parts.attention
        assert predicted == pytest.approx(row["planned_over_mean"], rel=0.05)


def test_packing_keeps_what_it_gathered_where_that_fits():
    """Kept keys and values spare a gather in backward, and take memory in every layer."""
    kept = packing_cp(step(cp=4, backward="keep"))
    again = packing_cp(step(cp=4, backward="resend"))
    assert kept.seconds < again.seconds
    assert kept.exchanged_bytes * 3 == pytest.approx(again.exchanged_bytes * 2)
    assert kept.memory.gathered == MODEL.layers * again.memory.gathered
    search = Search(inputs(memory=(kept.memory.total + again.memory.total) / 2))
    for backward, fits in (("keep", False), ("resend", True)):
        asked = configuration(cp=4, backward=backward)
        assert search.run("packing_cp", asked).fits == fits


def test_packing_leaves_room_for_what_many_documents_take():
    """Without, replicas of short documents would be filled with more tokens than they have memory for."""
    lengths = (*[16] * 1000, 12000)
    enough = packing_cp(step(lengths=lengths, cp=1)).memory.total
    assert packing_cp(step(lengths=lengths, cp=1, memory=0.85 * enough)) is not None
    assert packing_cp(step(lengths=lengths, cp=1, memory=0.5 * enough)) is None


def test_a_gather_over_nodes_has_the_links_of_all_gpus_of_a_node():
    """Also FSDP's. A ring has one of them."""
    links = {"ranks_per_node": 4, "net": 1e9, "node": 100e9, "latency": 0.0}
    costs = step(**links).costs
    tokens = np.array(4096.0)
    for ranks, rate in ((4, 100e9), (8, 4e9)):
        num_bytes = costs.gathered_bytes(tokens, ranks, True)
        seconds = costs.gather_seconds(tokens, ranks, True)
        assert seconds == pytest.approx(num_bytes / rate)
    assert costs.ring_seconds(tokens, 8, True) == pytest.approx(num_bytes / 1e9)
    parameters = costs.parameter_seconds(1000.0, 8, gradients=False)
    assert parameters == pytest.approx(1000 * MODEL.dtype_bytes * 7 / 8 / 4e9)


def test_what_does_not_fit_is_reported_and_not_used():
    report = run(memory=1e6)
    assert not any(system.fits for system in report.systems.values())
    assert "GB" in report.systems["cad"].reason
    assert not report.to_dict()["systems"]["cad"]["fits"]
    assert report.systems["cad"].seconds == float("inf")


def test_placement_is_of_cad_alone():
    loader = run(cp=1, nano_batches=1, placement="loader").systems
    balanced = run(cp=1, nano_batches=1, placement="balanced").systems
    assert loader["cad"].seconds != balanced["cad"].seconds
    assert loader["packing_cp"].seconds == balanced["packing_cp"].seconds


@pytest.mark.parametrize("change", [{"tp": 3, "ranks": 9}, {"pp": 3}])
def test_wrong_numbers_are_named(change):
    """Of options, others are in test_numbers.py."""
    with refusal():
        run(**change)


def test_named_lengths():
    lognormal = named_lengths("lognormal:median=3000,max=100000")
    assert np.median(lognormal) == pytest.approx(3000, rel=0.02)
    assert lognormal.max() == 100_000
    assert set(named_lengths("fixed:length=300")) == {300}
    assert named_lengths("uniform:min=10,max=20").max() <= 20


def test_documents_of_the_paper():
    lengths = paper.pretrain_lengths(paper.Options(scale=1.0, long=0.0))
    assert np.median(lengths) == pytest.approx(3227, rel=0.01)
    more = paper.pretrain_lengths(paper.Options())
    share_of_long = more[more >= 65536].sum() / more.sum()
    assert share_of_long == pytest.approx(0.5, abs=0.01)
