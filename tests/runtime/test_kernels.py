"""The CPU kernel and the merge against dense fp64 attention."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.runtime.fake_flash_attn import install
from tests.runtime.kernels_reference import (
    Task,
    assert_results_as_exact,
    dense_in_fp32,
    dense_in_fp64,
    offsets,
    random_qkv,
    run_split,
)
from tests.sets import params, seeds
from torchtitan_cad.runtime.kernels import VarlenArgs, get_kernel
from torchtitan_cad.runtime.kernels.base import Merged, row_delta
from torchtitan_cad.runtime.kernels.cpu import CpuKernel
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


def check_call(lengths: Sequence[list[int]], causal: bool, heads: tuple[int, int], dim: int, dtype: torch.dtype):
    cu_q, cu_k = offsets(lengths[0]), offsets(lengths[1])
    call = VarlenArgs.from_numpy(cu_q, cu_k, causal=causal, scale=dim**-0.5)
    out, lse = check_results(call, *random_qkv(cu_q[-1], cu_k[-1], heads, dim, dtype))
    assert out.dtype == dtype
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.all(out[lse == -torch.inf] == 0)


def check_results(call: VarlenArgs, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    """Returns out and lse; they and the gradients are as exact as a dense computation in fp32."""
    out, lse = KERNEL.forward(q, k, v, call)
    grads = KERNEL.backward(dout, q, k, v, Merged(lse, row_delta(dout, out)), call)
    assert all(map(torch.equal, grads, KERNEL.backward(dout, q, k, v, Merged(lse, out=out), call)))
    results = out, lse, *grads
    assert_results_as_exact(results, dense_in_fp32(q, k, v, dout, call), dense_in_fp64(q, k, v, dout, call))
    return out, lse


@pytest.mark.parametrize("heads", params([(2, 2), (4, 1), (16, 2)], [(4, 1)]))
@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_gqa_and_head_dims(heads: tuple[int, int], dim: int, causal: bool) -> None:
    check_call(([129, 70], [129 + 256, 71]), causal, heads, dim, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_every_kind_of_call(name: str, dtype: torch.dtype) -> None:
    *lengths, causal = CALLS[name]
    check_call(lengths, causal, (4, 2), 24, dtype)


def test_large_scores_do_not_overflow() -> None:
    call = VarlenArgs.from_numpy([0, 200], [0, 200], causal=True, scale=1.0)
    q, k, v, dout = random_qkv(200, 200, (2, 1), 16, torch.float32)
    check_results(call, q * 30, k * 10, v, dout)


def test_noncontiguous_inputs_and_autocast() -> None:
    call = VarlenArgs.from_numpy([0, 150], [0, 150], causal=True, scale=0.25)
    q, k, v, dout = random_qkv(150, 150, (4, 2), 16, torch.float32)
    out, lse = KERNEL.forward(q, k, v, call)
    views = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        other_out, other_lse = KERNEL.forward(*views, call)
        grads = KERNEL.backward(
            dout.transpose(0, 1).contiguous().transpose(0, 1), *views, Merged(lse, row_delta(dout, out)), call
        )
    assert torch.equal(out, other_out)
    assert torch.equal(lse, other_lse)
    for grad, other in zip(KERNEL.backward(dout, q, k, v, Merged(lse, row_delta(dout, out)), call), grads, strict=True):
        assert torch.equal(grad, other)


# Split keys -----------------------------------------------------------------------------------------------------------


def split_tasks(length: int, rng: np.random.Generator) -> list[Task]:
    """Tasks that cover a causal document, keys split at random."""
    tasks = []
    cuts = sorted({0, length, *rng.integers(1, length, 3).tolist()})
    for q_start, q_end in pairwise(cuts):
        near = int(rng.integers(0, q_start + 1))
        tasks.append((q_start, q_end, near, q_end, True))
        key_cuts = sorted({0, near, *(rng.integers(1, near, 2).tolist() if near > 1 else [])})
        tasks += [(q_start, q_end, lo, hi, False) for lo, hi in pairwise(key_cuts)]
    return tasks


@pytest.mark.parametrize(
    "dtype", params([torch.float32, torch.bfloat16, torch.float16], [torch.float32, torch.bfloat16])
)
@pytest.mark.parametrize("seed", seeds(1, 4))
def test_split_keys_err_at_most_twice_as_much(seed: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(seed)
    length, dim = int(rng.integers(200, 700)), 32
    q, k, v, dout = random_qkv(length, length, (4, 2), dim, dtype, seed)
    whole = VarlenArgs.from_numpy([0, length], [0, length], causal=True, scale=dim**-0.5)
    out, lse = KERNEL.forward(q, k, v, whole)
    undivided = out, lse, *KERNEL.backward(dout, q, k, v, Merged(lse, row_delta(dout, out)), whole)
    split = run_split(KERNEL, split_tasks(length, rng), (q, k, v, dout), dim**-0.5)
    assert_results_as_exact(split, undivided, dense_in_fp64(q, k, v, dout, whole))


# Merge ----------------------------------------------------------------------------------------------------------------


def test_merge_copies_single_partials_and_skips_empty_ones() -> None:
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
    merge_partials(out, lse, torch.zeros_like(part_out), torch.full_like(part_lse, -torch.inf), rows)
    merge_partials(out, lse, torch.zeros(2, 2, 8), torch.full((2, 2), -torch.inf), torch.tensor([1, 3]))
    merge_partials(out, lse, part_out[:0], part_lse[:0], rows[:0])
    assert torch.equal(out, before[0])
    assert torch.equal(lse, before[1])
    assert not out[[1, 3]].any()


def test_merge_does_not_overflow() -> None:
    out, lse = torch.ones(1, 1, 2), torch.full((1, 1), 1e4)
    merge_partials(out, lse, torch.full((1, 1, 2), 3.0), torch.full((1, 1), 1e4), torch.tensor([0]))
    assert torch.equal(out, torch.full((1, 1, 2), 2.0))
    merge_partials(out, lse, torch.full((1, 1, 2), 9.0), torch.full((1, 1), -1e4), torch.tensor([0]))
    assert torch.equal(out, torch.full((1, 1, 2), 2.0))


# Calls and the choice of a kernel -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "q_start", "message"),
    [
        ([1, 2], [0, 2], None, "cu_q"),
        ([0, 2], [0, 3, 2], None, "cu_k"),
        ([0, 2], [0], None, "tasks"),
        ([0, 2], [0, 2], [0, 0], "one entry per task"),
        ([0, 2**31], [0, 2**31], None, "32-bit"),
    ],
)
def test_bad_calls_are_refused(cu_q, cu_k, q_start, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VarlenArgs.from_numpy(cu_q, cu_k, causal=True, scale=1.0, q_start=q_start)


def test_get_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, capability=(8, 0))
    assert get_kernel("auto", "cpu").name == get_kernel("cpu", torch.device("cpu")).name == "cpu"
    assert get_kernel("auto", "cuda").name == get_kernel("varlen", torch.device("cuda", 0)).name == "varlen"
    wrong = {"varlen": "cpu", "cpu": "cuda", "auto": "mps", "flash_attn": "cuda", "cudnn": "cuda", "fast": "cpu"}
    for name, device in wrong.items():
        with pytest.raises(ValueError, match=f"cad.kernel = '{name}'"):
            get_kernel(name, device)
