"""A document cut at tile boundaries keeps its bits, and tiles cover what is visible."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.runtime.kernels_reference import offsets, random_qkv
from tests.sets import params
from torchtitan_cad.runtime.kernels import AttentionKernel, VarlenArgs
from torchtitan_cad.runtime.kernels.base import Merged, row_delta
from torchtitan_cad.runtime.kernels.cpu import QUERY_TILE, CpuKernel, iter_tiles

KERNEL = CpuKernel()
SHAPES = [((1, 1), 16), ((4, 1), 16), ((8, 4), 32), ((2, 2), 64), ((6, 2), 24), ((3, 3), 80)]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Document:
    """One document's tensors and its undivided results."""

    def __init__(
        self,
        length: int,
        heads: tuple[int, int],
        dim: int,
        dtype: torch.dtype,
        seed: int,
        kernel: AttentionKernel = KERNEL,
        device: str = "cpu",
    ) -> None:
        self.q, self.k, self.v, self.dout = random_qkv(length, length, heads, dim, dtype, seed, device)
        self.kernel, self.options = kernel, {"causal": True, "scale": dim**-0.5, "device": device}
        call = VarlenArgs.from_numpy([0, length], [0, length], **self.options)
        self.out, self.lse = kernel.forward(self.q, self.k, self.v, call)
        self.delta = row_delta(self.dout, self.out)
        self.grads = kernel.backward(self.dout, self.q, self.k, self.v, Merged(self.lse, self.delta), call)


def run_group(documents: list[Document], group: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, dq of one call over tasks (document, q_start, q_end) with full key prefixes."""

    def rows(name: str) -> Tensor:
        return torch.cat([getattr(documents[doc], name)[lo:hi] for doc, lo, hi in group])

    def keys(name: str) -> Tensor:
        return torch.cat([getattr(documents[doc], name)[:hi] for doc, _, hi in group])

    cu_q, cu_k = offsets([hi - lo for _, lo, hi in group]), offsets([hi for _, _, hi in group])
    call = VarlenArgs.from_numpy(cu_q, cu_k, q_start=[lo for _, lo, _ in group], **documents[0].options)
    kernel, q, k, v = documents[0].kernel, rows("q"), keys("k"), keys("v")
    out, lse = kernel.forward(q, k, v, call)
    dq, _, _ = kernel.backward(rows("dout"), q, k, v, Merged(rows("lse"), rows("delta")), call)
    return out, lse, dq


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", params(SHAPES, SHAPES[:3]), ids=str)
@settings(max_examples=8, derandomize=True)
@given(data=st.data())
def test_cuts_at_tile_boundaries_keep_the_bits(shape: tuple[tuple[int, int], int], data: st.DataObject) -> None:
    heads, dim = shape
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    lengths = data.draw(st.lists(st.integers(1, 900), min_size=1, max_size=3))
    documents = [Document(length, heads, dim, dtype, seed) for seed, length in enumerate(lengths)]
    tasks = []
    for doc, length in enumerate(lengths):
        boundaries = range(QUERY_TILE, length, QUERY_TILE)
        inner = data.draw(st.lists(st.sampled_from(boundaries), unique=True)) if boundaries else []
        cuts = [0, *sorted(inner), length]
        tasks += [(doc, lo, hi) for lo, hi in pairwise(cuts)]
    order = data.draw(st.permutations(tasks))
    first = data.draw(st.integers(0, len(order)))
    for group in (order[:first], order[first:]):
        if not group:
            continue
        for got, name in zip(run_group(documents, group), ("out", "lse", "dq"), strict=True):
            whole = [d.grads[0] if name == "dq" else getattr(d, name) for d in documents]
            assert torch.equal(got, torch.cat([whole[doc][lo:hi] for doc, lo, hi in group])), name


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    runs = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        runs.append([Document(length, (6, 2), 40, torch.float32, 0) for length in (1, 37, 300, 515)])
    torch.set_num_threads(before)
    for one, two in zip(*runs, strict=True):
        assert torch.equal(one.out, two.out)
        assert torch.equal(one.lse, two.lse)
        assert all(torch.equal(a, b) for a, b in zip(one.grads, two.grads, strict=True))


@settings(max_examples=60, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500), st.integers(0, 300)), min_size=1, max_size=4),
    causal=st.booleans(),
)
def test_tiles_cover_every_visible_pair_once(lengths: list[tuple[int, int, int]], causal: bool) -> None:
    cu_q, cu_k = offsets([a for a, _, _ in lengths]), offsets([b for _, b, _ in lengths])
    lead = [max(a, b) + c for a, b, c in lengths]  # a common end position
    call = VarlenArgs.from_numpy(
        cu_q, cu_k, causal=causal, scale=1.0, q_start=[end - a for end, (a, _, _) in zip(lead, lengths, strict=True)]
    )
    seen, want = (np.zeros((cu_q[-1], cu_k[-1]), np.int8) for _ in range(2))
    for tile in iter_tiles(call):
        rows, square = tile.q_hi - tile.q_lo, tile.k_hi - tile.k_mid
        assert 0 < rows <= QUERY_TILE
        assert square in (0, rows)
        seen[tile.q_lo : tile.q_hi, tile.k_lo : tile.k_mid] += 1
        seen[tile.q_lo : tile.q_hi, tile.k_mid : tile.k_hi] += np.tri(rows, square, dtype=np.int8)
    for task, (num_q, num_k, _) in enumerate(lengths):
        block = np.tri(num_q, num_k, num_k - num_q, dtype=np.int8) if causal else 1
        want[cu_q[task] : cu_q[task + 1], cu_k[task] : cu_k[task + 1]] = block
    assert np.array_equal(seen, want)
