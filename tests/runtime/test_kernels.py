# SPDX-License-Identifier: BSD-3-Clause
"""The CPU kernel and the merge against dense fp64 attention; bits of cut documents; torch's varlen on the CPU."""

import inspect
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from tests.lib.fake_flash_attn import install
from tests.lib.kernels_reference import (
    assert_results_as_exact,
    attend,
    dense_in_fp32,
    dense_in_fp64,
    offsets,
    random_qkv,
)
from tests.lib.refusals import refusal
from tests.lib.sets import params
from torchtitan_cad.integration.cpu_varlen import register_cpu_varlen
from torchtitan_cad.runtime.kernels import AttentionKernel, VarlenArgs, get_kernel
from torchtitan_cad.runtime.kernels.base import Merged, row_delta
from torchtitan_cad.runtime.kernels.cpu import QUERY_TILE, CpuKernel
from torchtitan_cad.runtime.kernels.merge import merge_partials

KERNEL = CpuKernel()
HEADS = ((2, 2), (4, 1), (6, 2))
WINDOWS = st.none() | st.sampled_from([2, 100, 128, 129, 700])


def check_results(
    call: VarlenArgs, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> None:
    """Results are as exact as a dense computation in fp32; out gives the bits that delta gives."""
    out, lse, *grads = results = attend(KERNEL, q, k, v, dout, call)
    assert out.dtype == q.dtype
    assert lse.dtype == torch.promote_types(q.dtype, torch.float32)
    assert not out[lse == -torch.inf].any()
    by_out = KERNEL.backward(dout, q, k, v, Merged(lse, out=out), call)
    assert all(map(torch.equal, grads, by_out))
    independent = dense_in_fp32(q, k, v, dout, call)
    assert_results_as_exact(results, independent, dense_in_fp64(q, k, v, dout, call))


def check_call(
    tasks: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    **options: bool | int | None,
) -> None:
    """A call of tasks with so many queries and keys."""
    cu_q, cu_k = (offsets(lengths) for lengths in zip(*tasks, strict=True))
    dim, value_dim = dims
    call = VarlenArgs.from_numpy(cu_q, cu_k, scale=dim**-0.5, **options)
    rows = random_qkv(cu_q[-1], cu_k[-1], heads, dim, dtype, value_dim=value_dim)
    check_results(call, *rows)


@pytest.mark.parametrize("dims", [(128, 128), (192, 128)])
@pytest.mark.parametrize("causal", [True, False])
def test_large_heads(dims, causal):
    check_call([(129, 385), (70, 71)], (4, 2), dims, torch.float32, causal=causal)


@given(
    tasks=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 600)), max_size=3),
    heads=st.sampled_from(HEADS),
    dims=st.sampled_from([(16, 16), (64, 64), (24, 8), (16, 40)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    causal=st.booleans(),
    window=WINDOWS,
)
def test_any_call_is_as_exact_as_a_dense_one(tasks, heads, dims, dtype, causal, window):
    """Rows without keys too; one task is as large as errors of sums need to be alike."""
    window = window if causal else None
    tasks = [(200, 333), *tasks]
    check_call(tasks, heads, dims, dtype, causal=causal, window=window)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("len_k", [[], [9]])
def test_calls_without_queries(len_k, causal):
    cu_q = offsets([0] * len(len_k))
    cu_k = offsets(len_k)
    call = VarlenArgs.from_numpy(cu_q, cu_k, causal=causal, scale=1.0)
    check_results(call, *random_qkv(0, cu_k[-1], (4, 2), 24, torch.float32))


def test_large_scores_do_not_overflow():
    call = VarlenArgs.from_numpy([0, 200], [0, 200], causal=True, scale=1.0)
    q, k, v, dout = random_qkv(200, 200, (2, 1), 16, torch.float32)
    check_results(call, q * 30, k * 10, v, dout)


def test_noncontiguous_inputs_and_autocast():
    call = VarlenArgs.from_numpy([0, 150], [0, 150], causal=True, scale=0.25)
    rows = random_qkv(150, 150, (4, 2), 16, torch.float32)
    views = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in rows]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = attend(KERNEL, *views, call)
    assert all(map(torch.equal, results, attend(KERNEL, *rows, call)))


# Merge ----------------------------------------------------------------------------------------------------------------


def test_merge_copies_single_partials_and_skips_empty_ones():
    torch.manual_seed(0)
    part_out = torch.randn(4, 2, 8).bfloat16()
    part_lse = torch.randn(4, 2)
    part_out[0, 0] = -0.0  # a copy keeps the sign
    out = torch.zeros(6, 2, 8)
    lse = torch.full((6, 2), -torch.inf)
    rows = torch.tensor([4, 0, 5, 2])
    merge_partials(out, lse, part_out, part_lse, rows)
    assert torch.equal(out[rows].view(torch.int32), part_out.float().view(torch.int32))
    assert torch.equal(lse[rows], part_lse)
    before = out.clone(), lse.clone()
    empty = torch.full((6, 2, 8), torch.nan), torch.full((6, 2), -torch.inf)
    merge_partials(out, lse, *empty, torch.arange(6))
    merge_partials(out, lse, part_out[:0], part_lse[:0], rows[:0])
    assert torch.equal(out, before[0])
    assert torch.equal(lse, before[1])
    assert not out[[1, 3]].any()


def test_merge_does_not_overflow():
    out = torch.ones(1, 1, 2)
    lse = torch.full((1, 1), 1e4)
    for value, score in ((3.0, 1e4), (9.0, -1e4)):
        part = torch.full((1, 1, 2), value), torch.full((1, 1), score)
        merge_partials(out, lse, *part, torch.tensor([0]))
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


Piece = tuple[int, int, int, int]
"""Number of the document, first key, first query, and end of both."""


def whole_document(
    kernel: AttentionKernel, call: VarlenArgs, rows: tuple[Tensor, ...]
) -> dict[str, Tensor]:
    """Rows of a document and their undivided results, by name."""
    names = ("q", "k", "v", "dout", "out", "lse", "dq")
    whole = dict(zip(names, (*rows, *attend(kernel, *rows, call)), strict=False))
    whole["delta"] = row_delta(whole["dout"], whole["out"])
    return whole


def check_pieces(
    kernel: AttentionKernel,
    documents: list[dict[str, Tensor]],
    pieces: list[Piece],
    names: tuple[str, ...] = ("out", "lse", "dq"),
    **options: float | str | None,
) -> None:
    """Pieces of documents in one call have the bits of whole ones."""

    def rows(name: str) -> Tensor:
        return torch.cat([documents[doc][name][lo:hi] for doc, _, lo, hi in pieces])

    def keys(name: str) -> Tensor:
        return torch.cat([documents[doc][name][key:hi] for doc, key, _, hi in pieces])

    call = VarlenArgs.from_numpy(
        offsets([hi - lo for _, _, lo, hi in pieces]),
        offsets([hi - key for _, key, _, hi in pieces]),
        q_start=[lo for _, _, lo, _ in pieces],
        causal=True,
        **options,
    )
    qkv = rows("q"), keys("k"), keys("v")
    out, lse = kernel.forward(*qkv, call)
    merged = Merged(rows("lse"), rows("delta"))
    dq, _, _ = kernel.backward(rows("dout"), *qkv, merged, call)
    results = {"out": out, "lse": lse, "dq": dq}
    for name in names:
        assert torch.equal(results[name], rows(name)), name


@settings(max_examples=24, derandomize=True)
@given(data=st.data())
def test_cuts_at_tile_boundaries_keep_the_bits(data):
    """In whatever order, and with however many keys before their windows."""
    heads = data.draw(st.sampled_from(HEADS))
    dim = data.draw(st.sampled_from([16, 24, 80]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    window = data.draw(st.none() | st.integers(1, 300))
    lengths = data.draw(st.lists(st.integers(1, 900), min_size=1, max_size=3))
    documents = []
    pieces = []
    for doc, length in enumerate(lengths):
        rows = random_qkv(length, length, heads, dim, dtype, seed=doc)
        cu = [0, length]
        call = VarlenArgs.from_numpy(cu, cu, causal=True, scale=0.2, window=window)
        documents.append(whole_document(KERNEL, call, rows))
        boundaries = [*range(QUERY_TILE, length, QUERY_TILE)]
        chosen = [cut for cut in boundaries if data.draw(st.booleans())]
        for lo, hi in pairwise([0, *chosen, length]):
            seen = 0 if window is None else max(0, lo + 1 - window)
            pieces.append((doc, data.draw(st.sampled_from([0, seen])), lo, hi))
    order = data.draw(st.permutations(pieces))
    first = data.draw(st.integers(1, len(order)))
    for group in filter(None, (order[:first], order[first:])):
        check_pieces(KERNEL, documents, group, scale=0.2, window=window)


def test_bits_do_not_depend_on_the_number_of_threads():
    cu = offsets([1, 37, 300, 515])
    call = VarlenArgs.from_numpy(cu, cu, causal=True, scale=0.2)
    rows = random_qkv(cu[-1], cu[-1], (6, 2), 40, torch.float32)
    before = torch.get_num_threads()
    results = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        results.append(attend(KERNEL, *rows, call))
    torch.set_num_threads(before)
    assert all(map(torch.equal, *results))


# Stock torch.nn.attention.varlen on the CPU, equal to the CPU kernel bit for bit --------------------------------------


register_cpu_varlen()
register_cpu_varlen()  # a second registration does nothing

CU_Q = torch.tensor([0, 1, 200, 557], dtype=torch.int32)
CU_K = torch.tensor([0, 4, 203, 600], dtype=torch.int32)
TAKES_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
GQA = {"enable_gqa": True} if TAKES_GQA else {}


def stock(q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int]) -> Tensor:
    lengths = (CU_Q, CU_K, 357, 397)
    return varlen_attn(q, k, v, *lengths, window_size=window, scale=0.2, **GQA)


@pytest.mark.parametrize(
    "compiled", params([False, True], [False]), ids=["eager", "compiled"]
)
@pytest.mark.parametrize(
    "window", [(-1, 0), (-1, -1), (63, 0)], ids=["causal", "full", "window"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_cpu_kernel(dtype, window, compiled):
    *qkv, dout = random_qkv(557, 600, (4, 2), 16, dtype)
    options = {"causal": window[1] == 0, "window": 64 if window[0] >= 0 else None}
    call = VarlenArgs.from_numpy(CU_Q.numpy(), CU_K.numpy(), scale=0.2, **options)
    out, _, *grads = attend(KERNEL, *qkv, dout, call)
    # as torchtitan passes them: views of [batch, heads, seq, dim]
    leaves = [
        x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in qkv
    ]
    torch.compiler.reset()
    function = torch.compile(stock, fullgraph=True) if compiled else stock
    got = function(*leaves, window)
    got.backward(dout)
    assert torch.equal(got, out)
    for leaf, grad in zip(leaves, grads, strict=True):
        assert torch.equal(leaf.grad, grad.to(dtype))


def test_windows_into_the_future_are_refused():
    q, k, v, _ = random_qkv(557, 600, (2, 2), 16, torch.float32)
    with refusal("varlen_attn"):
        stock(q, k, v, (64, 1))
