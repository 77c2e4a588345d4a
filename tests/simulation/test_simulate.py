"""The simulation: closed forms, properties, and agreement with the repository's other models of a step."""

from __future__ import annotations

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
from tests.profiles import make_profile
from tests.simulation.cases import FAST, MODEL, cluster, documents
from torchtitan_cad.planning import Plan, PlannerConfig, make_plan
from torchtitan_cad.simulation import (
    SYSTEMS,
    Costs,
    Model,
    Rates,
    Report,
    Settings,
    disaggregated,
    draw_batches,
    losses,
    named_lengths,
    simulate,
    speedups,
)
from torchtitan_cad.simulation.baselines import packed, packing_cp
from torchtitan_cad.simulation.batches import Batch, Split, layouts
from torchtitan_cad.simulation.disaggregated import Disaggregated
from torchtitan_cad.simulation.inputs import CHECKPOINTING
from torchtitan_cad.simulation.report import PARTS
from torchtitan_cad.simulation.search import Configuration, Search, Trial
from torchtitan_cad.simulation.step import Step


def seconds(report: Report, name: str) -> float:
    return report.systems[name].seconds


def run(**changes: Any) -> Report:
    """A report for changes of the cluster, of ``lengths``, and of ``settings``."""
    chosen = changes.pop("settings", Settings(nano_batches=2))
    drawn = documents(changes.pop("lengths", (300, 700, 1500, 4000, 9000)), seed=changes.pop("seed", 0))
    return simulate(changes.pop("model", MODEL), cluster(**changes), drawn, chosen)


def test_equal_documents_gain_nothing() -> None:
    report = run(lengths=(16384,))
    assert seconds(report, "packed") == pytest.approx(seconds(report, "perfect"), rel=1e-9)
    assert seconds(report, "cad") == pytest.approx(seconds(report, "perfect"), rel=1e-9)
    assert report.systems["cad"].outcomes[0].exchanged_bytes == 0


def test_one_document_per_rank_is_packed_as_the_longest_and_perfect_as_the_mean() -> None:
    rows = tuple(np.array([a, 16384 - a]) for a in (16384 - 128, 8192) for _ in range(4))
    costs = Costs(MODEL, cluster(cp=1), Rates())
    step = Step(costs, Batch(rows, 16384), 1, Split(1, 8, 1, 1))
    forward, backward = (
        [float(costs.document_seconds(row, direction).sum()) for row in rows] for direction in (True, False)
    )
    even = step.even("1F1B", 1.0)
    assert even.attention == pytest.approx(MODEL.layers * (np.mean(forward) + np.mean(backward)))
    home = Disaggregated(step, "home", 1, "1F1B")
    parts = home.outcome().parts
    assert parts.attention + parts.imbalance == pytest.approx(MODEL.layers * (max(forward) + max(backward)))
    assert parts.exchange == 0


def test_parts_add_up_and_nothing_is_faster_than_perfect() -> None:
    report = run(pp=2, tp=2, ranks=16)
    for name in SYSTEMS:
        (outcome,) = report.systems[name].outcomes
        assert sum(getattr(outcome.parts, part) for part in PARTS) == pytest.approx(outcome.seconds)
        assert all(getattr(outcome.parts, part) >= -1e-12 for part in PARTS), outcome.parts
        assert 0 < report.share_of_perfect(name) <= 1 + 1e-9


def test_what_cad_loses_to_perfect_is_said_by_part() -> None:
    report = run(cp=1, settings=Settings(nano_batches=1), net=1e9)
    lost = report.lost_to_perfect("cad")
    assert sum(lost.values()) == pytest.approx(1 - report.share_of_perfect("cad"))
    assert lost["exchange"] > 0.02
    printed = {line.partition(":")[0]: line for line in losses(report).splitlines()}
    assert f"exchange {100 * lost['exchange']:.1f}" in printed["cad"]
    assert report.to_dict()["systems"]["cad"]["lost_to_perfect"] == lost
    assert not losses(run(lengths=(16384,)))


def test_how_much_faster_cad_is_than_what_fits_is_said_in_a_line() -> None:
    report = run(cp=1)
    steps = zip(report.systems["packed"].outcomes, report.systems["cad"].outcomes, strict=True)
    gain = np.mean([packed.seconds / cad.seconds for packed, cad in steps])
    assert gain > 1.01
    line = speedups(report)
    assert line.startswith(f"cad: {gain:.2f} times as fast as packed, ")
    assert line.endswith(" times as fast as greedy (means of 1 steps)")
    none = Trial(Configuration(), reason="does not fit")
    without = dataclasses.replace(report, systems={**report.systems, "packed": none})
    assert speedups(without).startswith("cad: ")
    assert "packed," not in speedups(without)
    assert not speedups(dataclasses.replace(report, systems={**report.systems, "cad": none}))


def test_rows_are_not_kept_in_ticks_which_refuse_it() -> None:
    fast: dict[str, Any] = {"net": FAST, "node": FAST, "latency": 0.0, "pp": 2, "cp": 1}
    chosen = {}
    for kept in ("resend", "keep"):
        report = run(**fast, settings=Settings(nano_batches=1, backward=kept))  # type: ignore[arg-type]
        chosen[kept] = report.systems["cad"].outcomes[0].configuration
    assert chosen["resend"]["schedule"] == "CAD1F1B"
    assert chosen["keep"]["schedule"] == "1F1B"


def test_backward_begins_with_the_half_that_forward_ends_with() -> None:
    """As autograd does: runtime/tick_engine.py and integration/pingpong/loop.py."""
    step = Step(Costs(MODEL, cluster(cp=1), Rates()), draw_batches(documents())[0], 1, Split(1, 8, 1, 1))
    system = Disaggregated(step, "home", 2, "1F1B")
    forward, backward = ([nano.attention.sum() for nano in system._nanos((0,), way, False)] for way in (True, False))
    assert forward[0] < forward[1]  # the first halves of rows have fewer keys
    assert backward[0] > backward[1]


def test_halves_of_checkpointed_blocks_hide_the_exchange_inside_the_block_alone() -> None:
    """Forward shows what the other half's work before attention does not hide, in every layer."""
    exposed = {}
    for kind in ("none", "linear", "full"):
        costs = Costs(dataclasses.replace(MODEL, checkpointing=kind), cluster(cp=1, net=5e9, node=5e9), Rates())
        system = Disaggregated(
            Step(costs, draw_batches(documents())[0], 1, Split(1, 8, 1, 1)), "local_search", 2, "1F1B"
        )
        times = [system._alone(True, (0,), exchange) for exchange in (True, False)]
        exposed[kind] = times[0] - times[1]
    assert exposed["full"] > exposed["none"] + 1e-4
    assert exposed["linear"] == exposed["none"]


def test_backward_repeats_what_checkpointing_dropped() -> None:
    kinds = {
        kind: Costs(dataclasses.replace(MODEL, checkpointing=kind), cluster(tp=2), Rates()) for kind in CHECKPOINTING
    }
    no_elementwise = [Costs(kinds["selective"].model, cluster(tp=2), Rates(memory_bandwidth=FAST))]
    forward, plain = (kinds["none"].regions(1000, way) for way in (True, False))
    linear, selective = (kinds[kind].regions(1000, False) for kind in ("linear", "selective"))
    for name in ("pre", "post", "tp_pre", "tp_post"):
        assert getattr(linear, name) == pytest.approx(getattr(forward, name) + getattr(plain, name))
    products = {way: [costs.regions(1000, way).pre for costs in no_elementwise] for way in (True, False)}
    assert products[False] == pytest.approx([2.5 * one for one in products[True]])
    assert plain.pre < selective.pre < linear.pre
    steps = {kind: Step(costs, draw_batches(documents())[0], 1, Split(2, 4, 1, 1)) for kind, costs in kinds.items()}
    attention = {kind: step.attention for kind, step in steps.items()}
    assert attention["none"] == attention["selective"] == attention["linear"] < attention["full"]
    assert steps["linear"].work(False, 1.0) == pytest.approx(steps["full"].work(False, 1.0))


def test_norms_rotary_embedding_activation_and_loss_take_their_bytes() -> None:
    """By hand, of a token: two passes over the hidden state for a norm, three for a sum (``elementwise_elements``)."""
    fast, plain = (Costs(MODEL, cluster(), Rates(memory_bandwidth=rate)) for rate in (FAST, 2e12))
    added = [
        [
            2e12 * (getattr(plain.regions(1, way), name) - getattr(fast.regions(1, way), name))
            for name in ("pre", "post")
        ]
        for way in (True, False)
    ]
    hidden, wide, rotary = MODEL.hidden, MODEL.ffn, 2 * MODEL.head_dim * (MODEL.heads + MODEL.kv_heads)
    forward, backward = [2 * hidden + rotary, 8 * hidden + 3 * wide], [3 * hidden + rotary, 9 * hidden + 5 * wide]
    assert added[0] == pytest.approx([2 * elements for elements in forward], rel=1e-6)
    assert added[1] == pytest.approx([2 * elements for elements in backward], rel=1e-6)
    loss = sum(2e12 * (plain.head_seconds(1, way) - fast.head_seconds(1, way)) for way in (True, False))
    assert loss == pytest.approx(MODEL.vocabulary * 16, rel=1e-6)


def test_seconds_of_a_step_come_on_top_in_every_system() -> None:
    reports = [
        simulate(MODEL, cluster(cp=1), documents(), Settings(nano_batches=1), Rates(seconds_per_step=extra))
        for extra in (0.0, 0.5)
    ]
    for name, system in reports[0].systems.items():
        assert seconds(reports[1], name) == pytest.approx(system.seconds + 0.5)


def test_packing_in_more_microbatches_than_rows_allow_is_not_faster_than_perfect() -> None:
    """Two rows of many short documents: CAD can cut them in two microbatches, packing in sixteen."""
    drawn = documents((512,), row_tokens=16384, step_tokens=2 * 16384)
    report = simulate(MODEL, cluster(ranks=4, pp=2), drawn, Settings())
    assert report.systems["packing_cp"].outcomes[0].configuration["microbatches"] == 16
    assert 0.9 < report.share_of_perfect("packing_cp") <= 1


def test_infinite_bandwidth_comes_within_the_tolerance_of_perfect() -> None:
    report = run(net=FAST, node=FAST, latency=0.0, settings=Settings(PlannerConfig(tolerance=0.05), 1))
    (outcome,) = report.systems["cad"].outcomes
    assert outcome.parts.exchange == pytest.approx(0, abs=1e-12)
    assert outcome.parts.imbalance <= (0.05 + 0.01) * outcome.parts.attention


def test_no_bandwidth_is_refused() -> None:
    with pytest.raises(ValueError, match="cluster net = 0: set a positive number of B/s"):
        run(net=0)


def test_hardly_any_bandwidth_makes_cad_slower_than_packed() -> None:
    report = run(net=1e6, node=1e6, cp=1)
    assert report.systems["cad"].part("exchange") > 1e3 * report.systems["packed"].part("imbalance")
    assert seconds(report, "cad") > seconds(report, "packed")


@pytest.mark.matrix
@settings(max_examples=8)
@given(st.floats(1e8, 1e12), st.floats(1.01, 100), st.sampled_from(["net", "node"]), st.integers(0, 3))
def test_more_bandwidth_never_takes_longer(rate: float, factor: float, link: str, seed: int) -> None:
    batch = draw_batches(documents(seed=seed))[0]
    times = []
    for bandwidth in (rate, rate * factor):
        costs = Costs(MODEL, cluster(**{link: bandwidth}), Rates())
        times.append(Disaggregated(Step(costs, batch, 1, Split(1, 8, 1, 1)), "local_search", 2, "1F1B").total())
    assert times[1] <= times[0] * (1 + 1e-12)


@settings(max_examples=10)
@given(st.integers(1, 7))
def test_packed_takes_longer_the_less_even_documents_are(exponent: int) -> None:
    """The same tokens, one rank's in ever fewer documents."""
    times = []
    for pieces in (2**exponent, 2 ** (exponent - 1)):
        rows = (np.full(pieces, 16384 // pieces), *(np.full(128, 128) for _ in range(7)))
        step = Step(Costs(MODEL, cluster(), Rates()), Batch(rows, 16384), 1, Split(1, 8, 1, 1))
        times.append(Disaggregated(step, "home", 1, "1F1B").total() - step.even("1F1B", 1.0).total)
    assert times[1] > times[0]


@settings(max_examples=10)
@given(st.floats(0, 1), st.integers(0, 3))
def test_imbalance_stays_within_the_tolerance(tolerance: float, seed: int) -> None:
    batch = draw_batches(documents(seed=seed))[0]
    costs = Costs(MODEL, cluster(), Rates(), Settings(PlannerConfig(tolerance=tolerance)))
    system = Disaggregated(Step(costs, batch, 1, Split(1, 8, 1, 1)), "local_search", 1, "1F1B")
    (plan,) = system.plans((0,))
    parts = system.outcome().parts
    bound = (plan.stats.guaranteed_over_mean - 1) * parts.attention
    assert -1e-12 <= parts.imbalance <= bound * (1 + 1e-9) + 1e-9 * parts.attention


def test_more_tolerance_moves_fewer_bytes_and_leaves_more_imbalance() -> None:
    figures = []
    for tolerance in (0.0, 0.05, 0.2):
        costs = Costs(MODEL, cluster(cp=1), Rates(), Settings(PlannerConfig(tolerance=tolerance)))
        steps = [Step(costs, draw_batches(documents(seed=seed))[0], 1, Split(1, 8, 1, 1)) for seed in range(4)]
        outcomes = [Disaggregated(step, "local_search", 1, "1F1B").outcome() for step in steps]
        figures.append((sum(o.exchanged_bytes for o in outcomes), sum(o.parts.imbalance for o in outcomes)))
    moved, imbalance = zip(*figures, strict=True)
    assert moved[0] > moved[1] > moved[2] > 0
    assert imbalance[0] < imbalance[1] < imbalance[2]


@settings(max_examples=10)
@given(
    st.integers(0, 20), st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.floats(1e9, 1e12), st.booleans(),
    st.sampled_from(CHECKPOINTING), st.sampled_from(["1F1B", "CAD1F1B"]), st.booleans(),
)  # fmt: skip
def test_nothing_is_faster_than_perfect(
    seed: int, pp: int, nano_batches: int, net: float, fsdp: bool, checkpointing: Any, schedule: Any, tp_overlap: bool
) -> None:
    model = dataclasses.replace(MODEL, checkpointing=checkpointing)
    batch = draw_batches(documents(seed=seed))[0]
    costs = Costs(model, cluster(pp=pp, net=net, fsdp=fsdp, tp=2), Rates(), Settings(tp_overlap=tp_overlap))
    step = Step(costs, batch, pp, Split(2, 4 // pp, 1, pp))
    perfect = step.even("CAD1F1B", step.tp_share(2)).total
    outcomes = [
        Disaggregated(step, "local_search", nano_batches, schedule).outcome(),
        packed(step),
        *(packing_cp(Step(costs, batch, pp, Split(2, 4 // pp, cp, 1))) for cp in (1, 4 // pp)),
    ]
    for outcome in outcomes:
        assert outcome is not None
        assert outcome.seconds >= perfect * (1 - 1e-9)
        assert all(getattr(outcome.parts, part) >= -1e-12 for part in PARTS), outcome.parts


def test_checkpointing_does_not_plan_again(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []

    def counted(*args: Any) -> Plan:
        planned.append(1)
        return make_plan(*args)

    monkeypatch.setattr(disaggregated, "make_plan", counted)
    counts = []
    for kinds in (("none",), ("none", "selective", "linear", "full")):
        planned.clear()
        run(net=1e9, settings=Settings(checkpointing=kinds))  # so slow that no bound excludes a kind
        counts.append(len(planned))
    assert counts[0] == counts[1] > 0


def test_ping_pong_hides_what_a_single_stream_shows() -> None:
    exposed = {
        nano: run(settings=Settings(nano_batches=nano), net=50e9).systems["cad"].part("exchange") for nano in (1, 2)
    }
    assert exposed[2] < 0.5 * exposed[1]


def test_ping_pong_is_single_stream_where_nothing_is_exchanged() -> None:
    costs = Costs(MODEL, cluster(cp=1), Rates())
    step = Step(costs, draw_batches(documents())[0], 1, Split(1, 8, 1, 1))
    one, two = (Disaggregated(step, "home", nano, "1F1B").seconds(False) for nano in (1, 2))
    assert two == pytest.approx(one, rel=0.01)  # halves of rows cut some tiles


def test_halves_cover_a_microbatch() -> None:
    batch = draw_batches(documents())[0]
    for cp, rows in ((1, 1), (2, 2), (2, 1)):
        split = Split(8 * 2 // (8 * rows // cp) if rows == 2 else 8 * cp // 8, 8, cp, rows)
        whole, halves = layouts(batch, split, 0, 1)[0], layouts(batch, split, 0, 2)
        assert sum(half.queries_per_rank for half in halves).tolist() == whole.tokens_per_rank.tolist()
        pairs = [
            make_plan(layout, MODEL.shape(1), PlannerConfig(planner="home", tile=1)) for layout in (whole, *halves)
        ]
        assert sum(plan.stats.mean_load for plan in pairs[1:]) == pytest.approx(pairs[0].stats.mean_load)


@pytest.mark.matrix
def test_agrees_with_the_pipeline_bench() -> None:
    """The same documents and costs: bench/pipeline.py hides exchanges and counts work in forward linear work."""
    pp, dp, microbatches = 4, 4, 4
    lengths = [bench.document_lengths("lognormal", dp, seed) for seed in range(microbatches)]
    theirs = bench.Step([bench.spanning_layout(each, dp) for each in lengths], pp, dp, 0.02)
    model = Model(32, 4096, 32, 8, 128, 14336, 1)
    linear = 32768 * 2 * (model.pre_parameters + model.post_parameters)
    per_pair = linear / (32768 * bench.PAIRS_PER_TOKEN)  # operations of a pair in the bench
    attention = 640e12 * 4 * 4096 / per_pair
    rates = Rates(attention_flops=attention, backward_flops=attention, memory_bandwidth=FAST)  # no elementwise work
    costs = Costs(model, cluster(ranks=16, pp=pp, cp=dp, net=FAST, node=FAST, latency=0.0), rates)
    batch = Batch(tuple(np.array(each) for each in lengths), dp * 32768)
    step = Step(costs, batch, pp, Split(microbatches, dp, dp, 1))
    unit = linear / 640e12 * step.layers
    for planner, schedule, name in (("local_search", "1F1B", "1F1B + CAD"), ("local_search", "CAD1F1B", "CAD1F1B")):
        mine = Disaggregated(step, planner, 1, schedule).seconds(False)  # type: ignore[arg-type]
        assert mine / unit == pytest.approx(bench.simulate(theirs, name).makespan, rel=0.05)
    assert step.even("CAD1F1B", 1.0).total / unit == pytest.approx(theirs.ideal(), rel=0.05)


def test_agrees_with_what_a_replay_measured() -> None:
    """Slowest rank over the mean of the home plan, backward on 8 CPU ranks (bench/results/replay_cpu.json)."""
    results = json.loads((Path(replay.__file__).parent / "results" / "replay_cpu.json").read_text())
    options = {key: tuple(v) if isinstance(v, list) else v for key, v in results["options"].items()}
    layout = replay.make_layout(replay.Options(**options), 8)
    (row,) = [row for row in results["rows"] if row["ranks"] == 8]
    measured = row["planned"]["backward"]["makespan"] / row["home"]["backward"]["mean"]
    model = Model(1, 1024, *options["heads"], options["head_dim"], 1024, 1, dtype_bytes=4)
    rows = tuple(layout.doc_lengths[None].astype(np.int64))
    costs = Costs(model, cluster(cp=8), Rates())
    step = Step(costs, Batch(rows, int(layout.num_tokens)), 1, Split(1, 8, 8, 1))
    parts = Disaggregated(step, "local_search", 1, "1F1B").outcome().parts
    assert 1 + parts.imbalance / parts.attention == pytest.approx(measured, rel=0.05)


def test_a_profile_replaces_the_rates() -> None:
    profile = make_profile(MODEL.shape(1))
    costs = Costs(MODEL, cluster(), Rates(profile=profile))
    forward = profile.cost_model("forward", MODEL.shape(1))
    expected = forward.prefix_cost(4096)[-1] * 1e-12
    assert costs.document_seconds(np.array([4096]), True)[0] == pytest.approx(expected)
    report = simulate(MODEL, cluster(), documents(), Settings(), Rates(profile=profile))
    assert report.share_of_perfect("cad") > report.share_of_perfect("packed")


def test_packing_keeps_what_it_gathered_where_that_fits() -> None:
    """Kept keys and values spare a gather in backward, and take memory in every layer."""
    batch = draw_batches(documents())[0]
    kept, again = (
        packing_cp(Step(Costs(MODEL, cluster(), Rates(), Settings(backward=way)), batch, 1, Split(1, 8, 4, 1)))
        for way in ("keep", "resend")
    )
    assert kept is not None
    assert again is not None
    assert kept.seconds < again.seconds
    assert kept.exchanged_bytes * 3 == pytest.approx(again.exchanged_bytes * 2)
    assert kept.memory.gathered == MODEL.layers * again.memory.gathered
    middle = (kept.memory.total + again.memory.total) / 2
    chosen = run(settings=Settings(nano_batches=1, packing_cp=4)).systems["packing_cp"].outcomes[0].configuration
    assert (chosen["cp"], chosen["backward"]) == (4, "keep")
    search = Search(MODEL, cluster(memory=middle), [batch], Settings(), Rates())
    fits = {way: search.run("packing_cp", Configuration(cp=4, backward=way)).fits for way in ("keep", "resend")}  # type: ignore[arg-type]
    assert fits == {"keep": False, "resend": True}


def test_what_does_not_fit_is_reported_and_not_used() -> None:
    report = run(memory=1e6)
    assert not any(system.fits for system in report.systems.values())
    assert "GB" in report.systems["cad"].reason
    assert report.to_dict()["systems"]["cad"]["seconds_per_step"] is None
    assert seconds(report, "cad") == float("inf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tp": 3, "ranks": 9}, "tp = 3 does not divide"),
        ({"ranks": 0}, "cluster ranks = 0"),
        ({"latency": float("nan")}, "cluster latency = nan"),
        ({"latency": 20}, "cluster latency = 20 s: did you mean 20e-6"),
        ({"net": 40}, "cluster net = 40 B/s: did you mean 40e9"),
        ({"memory": 141.0}, "cluster memory = 141 B: did you mean 141e9"),
        ({"lengths": (0,)}, "documents lengths"),
        ({"pp": 3}, "ranks = 8: not a multiple"),
    ],
)
def test_wrong_numbers_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(**change)


def test_named_lengths() -> None:
    pretrain, more = named_lengths("pretrain"), named_lengths("pretrain:scale=4,long=0.5,max=524288")
    assert np.median(pretrain) == pytest.approx(3227, rel=0.01)
    assert pretrain[pretrain >= 65536].sum() / pretrain.sum() == pytest.approx(0.128, abs=0.01)
    assert more[more >= 65536].sum() / more.sum() == pytest.approx(0.5, abs=0.01)
    assert set(named_lengths("fixed:length=300").tolist()) == {300}
    assert named_lengths("uniform:min=10,max=20").max() <= 20
