"""The benchmarks of attention on a device, as far as they run on a CPU."""

import pytest
import torch

from bench import replay
from bench.gpu import attention
from torchtitan_cad.runtime.kernels.cpu import CpuKernel


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
