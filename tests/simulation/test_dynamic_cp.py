# SPDX-License-Identifier: BSD-3-Clause
"""Dynamic context parallelism: groups of ranks, and their places in microbatches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.simulation_cases import run, step
from torchtitan_cad.tools.simulation.baselines import packed, packing_cp
from torchtitan_cad.tools.simulation.dynamic_cp import (
    _with_limits,
    dynamic_cp,
    group_sizes,
    side_by_side,
)


def test_a_long_document_gets_as_many_ranks_as_it_needs():
    lengths = np.array([100, 900, 401, 200, 1600])
    assert group_sizes(lengths, 400.0, 16).tolist() == [4, 4, 2, *[1] * 6]
    # what has no ranks of its own fills the groups of others
    assert group_sizes(lengths, 400.0, 9).tolist() == [4, 4, 1]
    assert group_sizes(lengths, 2000.0, 3).tolist() == [1, 1, 1]


@given(st.lists(st.sampled_from([1, 2, 4, 8]), max_size=6), st.integers(1, 3))
def test_every_group_has_its_ranks_in_one_microbatch(shared, microbatches):
    ranks = 8
    alone = ranks * microbatches - sum(shared)
    if alone < 0:
        return
    sizes = np.array(sorted(shared, reverse=True) + [1] * alone, dtype=np.int64)
    placed = side_by_side(sizes, np.ones(len(sizes)), ranks, microbatches)
    for group, size in enumerate(sizes):
        where = np.argwhere(placed == group)
        assert len(where) == size
        assert len(set(where[:, 1])) == 1


def test_it_is_between_packed_and_perfect():
    for seed in range(4):
        one = step(seed=seed, lengths=(300, 700, 1500, 4000, 14000), microbatches=1)
        outcome = dynamic_cp(one)
        assert one.even("CAD1F1B").total <= outcome.seconds * (1 + 1e-9)
        assert outcome.seconds < packed(one).seconds


def test_short_documents_are_packed_as_without_context_parallelism():
    one = step(lengths=(300, 700, 1500), cp=1)
    alone = packing_cp(one)
    outcome = dynamic_cp(one)
    assert outcome.exchanged_bytes == 0
    assert outcome.seconds == pytest.approx(alone.seconds, rel=0.01)


@pytest.mark.parametrize(("flops", "is_hidden"), [(1e10, True), (1e18, False)])
def test_keys_go_round_a_ring_behind_attention(flops, is_hidden):
    rates = {"attention_flops": flops, "backward_flops": flops}
    one = step(lengths=(16384,), microbatches=1, **rates)
    outcome = _with_limits(one, 1.05 * one.tokens, 0.25)
    assert outcome.exchanged_bytes > 0
    assert (outcome.parts.exchange == 0) == is_hidden


def test_speed_and_mfu_are_those_of_a_gpu():
    report = run(cp=1)
    assert 0 < report.share_of_perfect("dynamic_cp") <= 1
    perfect = report.to_dict()["systems"]["perfect"]
    tokens = report.step_tokens / report.cluster.ranks
    per_second = perfect["tokens_per_second_per_gpu"]
    assert per_second == pytest.approx(tokens / perfect["seconds_per_step"])
    flops = per_second * report.step_flops / report.step_tokens
    assert perfect["mfu"] == pytest.approx(flops / report.peak_flops)
    assert 0 < perfect["mfu"] < 1
