# SPDX-License-Identifier: BSD-3-Clause
"""The CPU kernel and the merge against dense fp64 attention; bits of cut documents; torch's varlen on the CPU."""

import inspect
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from tests.lib.fake_flash_attn import install
from tests.lib.kernels_reference import (
    Task,
    assert_results_as_exact,
    dense_in_fp32,
    dense_in_fp64,
    offsets,
    random_qkv,
    run_split,
)
from tests.lib.refusals import refusal
from tests.lib.sets import params, seeds
from torchtitan_cad.integration.cpu_varlen import register_cpu_varlen
from torchtitan_cad.runtime.kernels import AttentionKernel, VarlenArgs, get_kernel
from torchtitan_cad.runtime.kernels.base import Merged, row_delta
from torchtitan_cad.runtime.kernels.cpu import QUERY_TILE, CpuKernel, iter_tiles
from torchtitan_cad.runtime.kernels.merge import merge_partials

KERNEL = CpuKernel()
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

CALLS = {
    "odd": ([1, 77, 333], [1, 77, 333], True),
    "prefix": ([130, 1, 128], [517, 300, 128], True),
    "no keys for some rows": ([40, 200], [7, 0], True),
    "no rows": ([0, 5, 0], [9, 5, 0], True),
    "rectangles": ([130, 1, 300], [257, 700, 1], False),
    "empty keys": ([5, 140, 3], [0, 31, 0], False),
    "rectangles without rows": ([0, 5], [9, 5], False),
    "no tasks": ([], [], True),
    "no rectangles": ([], [], False),
}
"""Query lengths, key lengths and whether the tasks are causal."""


def check_call(
    lengths: Sequence[list[int]],
    causal: bool,
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
    value_dim: int | None = None,
):
    cu_q, cu_k = offsets(lengths[0]), offsets(lengths[1])
    call = VarlenArgs.from_numpy(cu_q, cu_k, causal=causal, scale=dim**-0.5)
    out, lse = check_results(
        call, *random_qkv(cu_q[-1], cu_k[-1], heads, dim, dtype, value_dim=value_dim)
    )
    assert out.dtype == dtype
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.all(out[lse == -torch.inf] == 0)


def check_results(
    call: VarlenArgs, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns out and lse; they and the gradients are as exact as a dense computation in fp32."""
    out, lse = KERNEL.forward(q, k, v, call)
    grads = KERNEL.backward(dout, q, k, v, Merged(lse, row_delta(dout, out)), call)
    assert all(
        map(
            torch.equal,
            grads,
            KERNEL.backward(dout, q, k, v, Merged(lse, out=out), call),
        )
    )
    results = out, lse, *grads
    assert_results_as_exact(
        results, dense_in_fp32(q, k, v, dout, call), dense_in_fp64(q, k, v, dout, call)
    )
    return out, lse


@pytest.mark.parametrize("heads", params([(2, 2), (4, 1), (16, 2)], [(4, 1)]))
@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_gqa_and_head_dims(heads, dim, causal):
    check_call(([129, 70], [129 + 256, 71]), causal, heads, dim, torch.float32)


@pytest.mark.parametrize("dims", [(192, 128), (24, 8), (16, 40)])
@pytest.mark.parametrize("causal", [True, False])
def test_heads_of_keys_and_values_of_unequal_size(dims, causal):
    dim, value_dim = dims
    for dtype in (torch.float32, torch.bfloat16):
        check_call(([129, 70], [129 + 256, 71]), causal, (4, 2), dim, dtype, value_dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_every_kind_of_call(name, dtype):
    *lengths, causal = CALLS[name]
    check_call(lengths, causal, (4, 2), 24, dtype)


def test_large_scores_do_not_overflow():
    call = VarlenArgs.from_numpy([0, 200], [0, 200], causal=True, scale=1.0)
    q, k, v, dout = random_qkv(200, 200, (2, 1), 16, torch.float32)
    check_results(call, q * 30, k * 10, v, dout)


def test_noncontiguous_inputs_and_autocast():
    call = VarlenArgs.from_numpy([0, 150], [0, 150], causal=True, scale=0.25)
    q, k, v, dout = random_qkv(150, 150, (4, 2), 16, torch.float32)
    out, lse = KERNEL.forward(q, k, v, call)
    views = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        other_out, other_lse = KERNEL.forward(*views, call)
        grads = KERNEL.backward(
            dout.transpose(0, 1).contiguous().transpose(0, 1),
            *views,
            Merged(lse, row_delta(dout, out)),
            call,
        )
    assert torch.equal(out, other_out)
    assert torch.equal(lse, other_lse)
    for grad, other in zip(
        KERNEL.backward(dout, q, k, v, Merged(lse, row_delta(dout, out)), call),
        grads,
        strict=True,
    ):
        assert torch.equal(grad, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 2, 100, 128, 129, 700])
def test_windows(window, dtype):
    """Of documents and of their tails, with no more keys than their windows or with all."""
    lengths = [300, 1, 257, 40, 5], [300, 1, 257 + window - 1, 40 + 500, 3]
    cu_q, cu_k = map(offsets, lengths)
    call = VarlenArgs.from_numpy(cu_q, cu_k, causal=True, scale=0.2, window=window)
    check_results(call, *random_qkv(cu_q[-1], cu_k[-1], (4, 2), 24, dtype))


@pytest.mark.parametrize("window", [1, 50, 128, 300])
def test_windows_keep_the_bits_of_documents_cut_at_tiles(window):
    """However many keys before their windows the pieces have."""
    q, k, v, dout = random_qkv(700, 700, (4, 2), 16, torch.float32)
    whole = VarlenArgs.from_numpy(
        [0, 700], [0, 700], causal=True, scale=0.2, window=window
    )
    out, lse = KERNEL.forward(q, k, v, whole)
    delta = row_delta(dout, out)
    dq = KERNEL.backward(dout, q, k, v, Merged(lse, delta), whole)[0]
    for lo, hi in pairwise([0, 128, 384, 640, 700]):
        for first in {0, max(0, lo + 1 - window)}:
            cu_q, cu_k = [0, hi - lo], [0, hi - first]
            call = VarlenArgs.from_numpy(
                cu_q, cu_k, causal=True, scale=0.2, q_start=[lo], window=window
            )
            rows = q[lo:hi], k[first:hi], v[first:hi]
            assert all(
                map(torch.equal, KERNEL.forward(*rows, call), (out[lo:hi], lse[lo:hi]))
            )
            merged = Merged(lse[lo:hi], delta[lo:hi])
            assert torch.equal(
                KERNEL.backward(dout[lo:hi], *rows, merged, call)[0], dq[lo:hi]
            )


# Split keys -----------------------------------------------------------------------------------------------------------


def split_tasks(length: int, rng: np.random.Generator) -> list[Task]:
    """Tasks that cover a causal document, keys split at random."""
    tasks = []
    cuts = sorted({0, length, *rng.integers(1, length, 3).tolist()})
    for q_start, q_end in pairwise(cuts):
        near = int(rng.integers(0, q_start + 1))
        tasks.append((q_start, q_end, near, q_end, True))
        key_cuts = sorted(
            {0, near, *(rng.integers(1, near, 2).tolist() if near > 1 else [])}
        )
        tasks += [(q_start, q_end, lo, hi, False) for lo, hi in pairwise(key_cuts)]
    return tasks


@pytest.mark.parametrize(
    "dtype",
    params(
        [torch.float32, torch.bfloat16, torch.float16], [torch.float32, torch.bfloat16]
    ),
)
@pytest.mark.parametrize("seed", seeds(1, 4))
def test_split_keys_err_at_most_twice_as_much(seed, dtype):
    rng = np.random.default_rng(seed)
    length, dim = int(rng.integers(200, 700)), 32
    q, k, v, dout = random_qkv(length, length, (4, 2), dim, dtype, seed)
    whole = VarlenArgs.from_numpy(
        [0, length], [0, length], causal=True, scale=dim**-0.5
    )
    out, lse = KERNEL.forward(q, k, v, whole)
    undivided = (
        out,
        lse,
        *KERNEL.backward(dout, q, k, v, Merged(lse, row_delta(dout, out)), whole),
    )
    split = run_split(KERNEL, split_tasks(length, rng), (q, k, v, dout), dim**-0.5)
    assert_results_as_exact(split, undivided, dense_in_fp64(q, k, v, dout, whole))


# Merge ----------------------------------------------------------------------------------------------------------------


def test_merge_copies_single_partials_and_skips_empty_ones():
    generator = torch.Generator().manual_seed(0)
    part_out = torch.randn(4, 2, 8, generator=generator).bfloat16()
    part_out[0, 0] = -0.0  # a copy keeps the sign
    part_lse = torch.randn(4, 2, generator=generator)
    out, lse = torch.zeros(6, 2, 8), torch.full((6, 2), -torch.inf)
    rows = torch.tensor([4, 0, 5, 2])
    merge_partials(out, lse, part_out, part_lse, rows)
    assert torch.equal(out[rows].view(torch.int32), part_out.float().view(torch.int32))
    assert torch.equal(lse[rows], part_lse)
    before = out.clone(), lse.clone()
    merge_partials(
        out,
        lse,
        torch.zeros_like(part_out),
        torch.full_like(part_lse, -torch.inf),
        rows,
    )
    merge_partials(
        out,
        lse,
        torch.zeros(2, 2, 8),
        torch.full((2, 2), -torch.inf),
        torch.tensor([1, 3]),
    )
    merge_partials(out, lse, part_out[:0], part_lse[:0], rows[:0])
    assert torch.equal(out, before[0])
    assert torch.equal(lse, before[1])
    assert not out[[1, 3]].any()


def test_merge_does_not_overflow():
    out, lse = torch.ones(1, 1, 2), torch.full((1, 1), 1e4)
    merge_partials(
        out, lse, torch.full((1, 1, 2), 3.0), torch.full((1, 1), 1e4), torch.tensor([0])
    )
    assert torch.equal(out, torch.full((1, 1, 2), 2.0))
    merge_partials(
        out,
        lse,
        torch.full((1, 1, 2), 9.0),
        torch.full((1, 1), -1e4),
        torch.tensor([0]),
    )
    assert torch.equal(out, torch.full((1, 1, 2), 2.0))


# Calls and the choice of a kernel -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "q_start"),
    [
        ([1, 2], [0, 2], None),
        ([0, 2], [0, 3, 2], None),
        ([0, 2], [0], None),
        ([0, 2], [0, 2], [0, 0]),
        ([0, 2**31], [0, 2**31], None),
    ],
)
def test_bad_calls_are_refused(cu_q, cu_k, q_start):
    with refusal():
        VarlenArgs.from_numpy(cu_q, cu_k, causal=True, scale=1.0, q_start=q_start)


@pytest.mark.parametrize(("window", "causal"), [(0, True), (5, False)])
def test_bad_windows_are_refused(window, causal):
    with refusal("window", window):
        VarlenArgs.from_numpy([0, 2], [0, 2], causal=causal, scale=1.0, window=window)


def test_get_kernel(monkeypatch):
    install(monkeypatch, capability=(8, 0))
    assert (
        get_kernel("auto", "cpu").name
        == get_kernel("cpu", torch.device("cpu")).name
        == "cpu"
    )
    assert (
        get_kernel("auto", "cuda").name
        == get_kernel("varlen", torch.device("cuda", 0)).name
        == "varlen"
    )
    wrong = {
        "varlen": "cpu",
        "cpu": "cuda",
        "auto": "mps",
        "flash_attn": "cuda",
        "cudnn": "cuda",
        "fast": "cpu",
    }
    for name, device in wrong.items():
        with refusal("cad.kernel", name):
            get_kernel(name, device)


# Bits of documents that are cut at tile boundaries --------------------------------------------------------------------


SHAPES = [
    ((1, 1), 16),
    ((4, 1), 16),
    ((8, 4), 32),
    ((2, 2), 64),
    ((6, 2), 24),
    ((3, 3), 80),
]


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
        self.q, self.k, self.v, self.dout = random_qkv(
            length, length, heads, dim, dtype, seed, device
        )
        self.kernel, self.options = (
            kernel,
            {"causal": True, "scale": dim**-0.5, "device": device},
        )
        call = VarlenArgs.from_numpy([0, length], [0, length], **self.options)
        self.out, self.lse = kernel.forward(self.q, self.k, self.v, call)
        self.delta = row_delta(self.dout, self.out)
        self.grads = kernel.backward(
            self.dout, self.q, self.k, self.v, Merged(self.lse, self.delta), call
        )


def run_group(
    documents: list[Document], group: list[tuple[int, int, int]]
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, dq of one call over tasks (document, q_start, q_end) with full key prefixes."""

    def rows(name: str) -> Tensor:
        return torch.cat(
            [getattr(documents[doc], name)[lo:hi] for doc, lo, hi in group]
        )

    def keys(name: str) -> Tensor:
        return torch.cat([getattr(documents[doc], name)[:hi] for doc, _, hi in group])

    cu_q, cu_k = (
        offsets([hi - lo for _, lo, hi in group]),
        offsets([hi for _, _, hi in group]),
    )
    call = VarlenArgs.from_numpy(
        cu_q, cu_k, q_start=[lo for _, lo, _ in group], **documents[0].options
    )
    kernel, q, k, v = documents[0].kernel, rows("q"), keys("k"), keys("v")
    out, lse = kernel.forward(q, k, v, call)
    dq, _, _ = kernel.backward(
        rows("dout"), q, k, v, Merged(rows("lse"), rows("delta")), call
    )
    return out, lse, dq


@pytest.mark.parametrize("shape", params(SHAPES, SHAPES[:3]), ids=str)
@settings(max_examples=8, derandomize=True)
@given(data=st.data())
def test_cuts_at_tile_boundaries_keep_the_bits(shape, data):
    heads, dim = shape
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    lengths = data.draw(st.lists(st.integers(1, 900), min_size=1, max_size=3))
    documents = [
        Document(length, heads, dim, dtype, seed) for seed, length in enumerate(lengths)
    ]
    tasks = []
    for doc, length in enumerate(lengths):
        boundaries = range(QUERY_TILE, length, QUERY_TILE)
        inner = (
            data.draw(st.lists(st.sampled_from(boundaries), unique=True))
            if boundaries
            else []
        )
        cuts = [0, *sorted(inner), length]
        tasks += [(doc, lo, hi) for lo, hi in pairwise(cuts)]
    order = data.draw(st.permutations(tasks))
    first = data.draw(st.integers(0, len(order)))
    for group in (order[:first], order[first:]):
        if not group:
            continue
        for got, name in zip(
            run_group(documents, group), ("out", "lse", "dq"), strict=True
        ):
            whole = [
                d.grads[0] if name == "dq" else getattr(d, name) for d in documents
            ]
            assert torch.equal(
                got, torch.cat([whole[doc][lo:hi] for doc, lo, hi in group])
            ), name


def test_bits_do_not_depend_on_the_number_of_threads():
    before = torch.get_num_threads()
    runs = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        runs.append(
            [
                Document(length, (6, 2), 40, torch.float32, 0)
                for length in (1, 37, 300, 515)
            ]
        )
    torch.set_num_threads(before)
    for one, two in zip(*runs, strict=True):
        assert torch.equal(one.out, two.out)
        assert torch.equal(one.lse, two.lse)
        assert all(torch.equal(a, b) for a, b in zip(one.grads, two.grads, strict=True))


@settings(max_examples=60, derandomize=True)
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 500), st.integers(0, 500), st.integers(0, 300)),
        min_size=1,
        max_size=4,
    ),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 400),
)
def test_tiles_cover_every_visible_pair_once(lengths, causal, window):
    window = window if causal else None
    cu_q, cu_k = (
        offsets([a for a, _, _ in lengths]),
        offsets([b for _, b, _ in lengths]),
    )
    lead = [max(a, b) + c for a, b, c in lengths]  # a common end position
    q_start = [end - a for end, (a, _, _) in zip(lead, lengths, strict=True)]
    call = VarlenArgs.from_numpy(
        cu_q, cu_k, causal=causal, scale=1.0, q_start=q_start, window=window
    )
    seen, want = (np.zeros((cu_q[-1], cu_k[-1]), np.int8) for _ in range(2))
    for tile in iter_tiles(call):
        rows, square = tile.q_hi - tile.q_lo, tile.k_hi - tile.k_mid
        assert 0 < rows <= QUERY_TILE
        assert square in (0, rows)
        pairs = np.hstack(
            [
                np.ones((rows, tile.k_mid - tile.k_lo), np.int8),
                np.tri(rows, square, dtype=np.int8),
            ]
        )
        if tile.window is not None:
            pairs = np.triu(pairs, tile.k_mid - tile.k_lo + 1 - tile.window)
        seen[tile.q_lo : tile.q_hi, tile.k_lo : tile.k_hi] += pairs
    for task, (num_q, num_k, _) in enumerate(lengths):
        block = np.tri(num_q, num_k, num_k - num_q, dtype=np.int8) if causal else 1
        block = block if window is None else np.triu(block, num_k - num_q + 1 - window)
        want[cu_q[task] : cu_q[task + 1], cu_k[task] : cu_k[task + 1]] = block
    assert np.array_equal(seen, want)


# Stock torch.nn.attention.varlen on the CPU, equal to the CPU kernel bit for bit --------------------------------------


register_cpu_varlen()
register_cpu_varlen()  # a second registration does nothing

CU_Q, CU_K = (
    torch.tensor(cu, dtype=torch.int32) for cu in ([0, 1, 200, 557], [0, 4, 203, 600])
)
GQA = (
    {"enable_gqa": True}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters
    else {}
)


def attend(q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int]) -> Tensor:
    return varlen_attn(
        q, k, v, CU_Q, CU_K, 357, 397, window_size=window, scale=0.2, **GQA
    )


@pytest.mark.parametrize(
    "compiled", params([False, True], [False]), ids=["eager", "compiled"]
)
@pytest.mark.parametrize(
    "window", [(-1, 0), (-1, -1), (63, 0)], ids=["causal", "full", "window"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_cpu_kernel(dtype, window, compiled):
    q, k, v, dout = random_qkv(557, 600, (4, 2), 16, dtype)
    options = {"causal": window[1] == 0, "window": 64 if window[0] >= 0 else None}
    call = VarlenArgs.from_numpy(CU_Q.numpy(), CU_K.numpy(), scale=0.2, **options)
    out, lse = CpuKernel().forward(q, k, v, call)
    grads = CpuKernel().backward(dout, q, k, v, Merged(lse, row_delta(dout, out)), call)
    # as torchtitan passes them: views of [batch, heads, seq, dim]
    leaves = [
        x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
        for x in (q, k, v)
    ]
    torch.compiler.reset()
    function = torch.compile(attend, fullgraph=True) if compiled else attend
    got = function(*leaves, window)
    got.backward(dout)
    assert torch.equal(got, out)
    for leaf, grad in zip(leaves, grads, strict=True):
        assert torch.equal(leaf.grad, grad.to(dtype))


def test_windows_into_the_future_are_refused():
    q, k, v, _ = random_qkv(557, 600, (2, 2), 16, torch.float32)
    with refusal("varlen_attn"):
        attend(q, k, v, (64, 1))
