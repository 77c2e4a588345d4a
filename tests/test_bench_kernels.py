"""The benchmarks of attention on a device, as far as they run on a CPU."""

import json
from typing import Any

import pytest
import torch

from bench import replay
from bench.gpu import attention
from bench.record import cell
from torchtitan_cad.runtime.kernels.cpu import CpuKernel


@pytest.mark.matrix
def test_replay_times_every_rank_before_and_after_planning(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    output = tmp_path / "results" / "replay.json"
    options = replay.Options(
        ranks=(3,), tokens_per_rank=512, longest=1024, heads=(4, 2), head_dim=16, repeats=1, output=output
    )
    replay.main(options)
    (row,) = json.loads(output.read_text())["rows"]
    assert row["ranks"] == 3
    assert row["planned"]["network_milliseconds"] > 0
    printed = capsys.readouterr().out
    for name in ("forward", "backward"):
        for plan in ("home", "planned"):
            times = row[plan][name]["milliseconds"]
            assert len(times) == 3
            assert row[plan][name]["makespan"] == max(times) >= row[plan][name]["mean"] > 0
        assert row[f"{name}_speedup"] == row["home"][name]["makespan"] / row["planned"][name]["makespan"]
        assert f"| {cell(row[f'{name}_speedup'])} |" in printed


def test_a_layout_has_as_many_tokens_as_asked_for() -> None:
    layout = replay.make_layout(replay.Options(tokens_per_rank=700, longest=300), 5)
    assert layout.tokens_per_rank.tolist() == [700] * 5
    assert layout.doc_lengths.max() == 300


@pytest.mark.parametrize("squares_only", [False, True])
def test_shards_have_the_work_of_the_undivided_document(squares_only: bool) -> None:
    """As many query-key pairs as the causal triangle, up to half a shard; unmasked if the kernel takes squares only."""
    kernel = CpuKernel()
    kernel.squares_only = squares_only
    sizes = attention.Sizes(torch.device("cpu"), length=8192)
    whole = attention.visible_pairs(8192, 8192)
    assert whole == 8192 * 8193 // 2
    assert attention.shard_call(kernel, 8192, sizes).causal
    for shard in (128, 512, 2048):
        call = attention.shard_call(kernel, shard, sizes)
        assert call.causal is not squares_only
        each = attention.visible_pairs(shard, 8192, call.causal)
        assert abs(len(call.q_start) * each - whole) <= each / 2
        assert (call.max_q, call.max_k) == (shard, 8192)


def test_shards_and_kernels_are_measured() -> None:
    figures: dict[str, Any] = {}
    attention.attention("cpu", figures.__setitem__)
    assert [row["shard"] for row in figures["shards"]] == [64, 128]
    assert all(row["forward_share"] > 0 and row["backward_share"] > 0 for row in figures["shards"])
    rows = attention.measure_bandwidth(attention.sizes_of("cpu"))
    assert [row["name"] for row in rows] == ["copy", "gather", "merge", "sum", "delta"]
    assert all(row["gigabytes_per_second"] > 0 for row in rows)
