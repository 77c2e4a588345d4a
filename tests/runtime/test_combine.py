"""Orders in which partials are combined: waves with torch, and segments with Triton kernels under its interpreter."""

import importlib.util
import os
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.accuracy import assert_as_exact
from tests.runtime.processes import run_processes, values
from torchtitan_cad.runtime.combine import Segments, Waves, build_combination
from torchtitan_cad.runtime.kernels.base import compute_dtype

CPU = torch.device("cpu")
ROWS = st.lists(st.integers(0, 8), max_size=40)

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")


def positions_by_row(targets: list[int]) -> dict[int, list[int]]:
    return {row: [i for i, other in enumerate(targets) if other == row] for row in targets}


@settings(max_examples=200)
@given(ROWS)
def test_waves_visit_every_partial_once_in_order_with_distinct_rows(targets: list[int]) -> None:
    seen: dict[int, list[int]] = {}
    for wave in Waves.build(np.array(targets, dtype=np.int64), CPU).waves:
        assert len(set(wave.target.tolist())) == len(wave.target)
        for source, target in zip(wave.source.tolist(), wave.target.tolist(), strict=True):
            assert targets[source] == target
            seen.setdefault(target, []).append(source)
    assert seen == positions_by_row(targets)


@settings(max_examples=200)
@given(ROWS)
def test_segments_list_every_row_s_partials_in_order(targets: list[int]) -> None:
    segments = Segments.build(np.array(targets, dtype=np.int64), 11, CPU)
    assert segments.sources.dtype == segments.offsets.dtype == torch.int32
    bounds = segments.offsets.tolist()
    assert len(bounds) == 12
    seen = {row: segments.sources[bounds[row] : bounds[row + 1]].tolist() for row in range(11)}
    assert {row: sources for row, sources in seen.items() if sources} == positions_by_row(targets)


def test_torch_combines_on_the_cpu() -> None:
    assert isinstance(build_combination(np.array([0, 0]), 2, CPU), Waves)


CASES = [
    # dtype of the partials, heads, head dim, rows of the accumulators, rows of each call
    (torch.bfloat16, 8, 64, 7, (9, 8)),
    (torch.float16, 3, 128, 5, (4, 6)),
    (torch.float32, 2, 16, 6, (11,)),
    (torch.float64, 2, 20, 4, (5, 5)),
    (torch.bfloat16, 40, 128, 3, (3, 2)),
    (torch.bfloat16, 2, 64, 5, (0, 3)),
    (torch.bfloat16, 2, 64, 4, (0,)),
    (torch.bfloat16, 2, 64, 4, ()),
    (torch.bfloat16, 2, 64, 0, ()),
]


def make_case(rng: np.random.Generator, case: tuple, device: torch.device) -> tuple:
    """Rows of the partials; their outs and lses as strided views of messages, some empty with poisoned outs."""
    dtype, heads, dim, num_rows, sizes = case
    targets = rng.integers(0, max(num_rows - 1, 1), sum(sizes))  # the last row has none
    outs, lses = [], []
    for size in sizes:
        message = torch.randn(size, heads * dim + 24).to(device, dtype)
        out = message[:, 8 : 8 + heads * dim].view(size, heads, dim)
        lse = (8 * torch.randn(size, heads + 3, dtype=compute_dtype(dtype)))[:, :heads]
        lse[torch.rand(size, heads) < 0.3] = -torch.inf
        lse = lse.to(device)
        out[lse == -torch.inf] = torch.nan
        outs.append(out)
        lses.append(lse)
    return targets, outs, lses


def interpret_and_compare(group, seed: int) -> None:
    assert "triton" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"
    compare_orders(seed, CPU)


def compare_orders(seed: int, device: torch.device) -> None:
    """Waves and segments give the same sums, and merged rows as exact."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    for case in CASES:
        dtype, heads, dim, num_rows, _ = case
        targets, outs, lses = make_case(rng, case, device)
        waves, segments = Waves.build(targets, device), Segments.build(targets, num_rows, device)
        exact = compute_dtype(dtype)
        for fresh in (True, False):
            start = [torch.randn(num_rows, *tail, dtype=exact).to(device) for tail in ((heads, dim), (heads,))]
            if fresh:
                start = [torch.full_like(x, torch.nan) for x in start]
            elif num_rows:
                start[0][0], start[1][0] = 0, -torch.inf
            want, got = [x.clone() for x in start], [x.clone() for x in start]
            waves.merge(*want, outs, lses, fresh=fresh)
            segments.merge(*got, outs, lses, fresh=fresh)
            assert not torch.isnan(want[0]).any()
            in_fp64 = [x.double() for x in start]
            waves.merge(*in_fp64, [x.double() for x in outs], [x.double() for x in lses], fresh=fresh)
            for mine, theirs, reference in zip(got, want, in_fp64, strict=True):
                assert_as_exact(mine, theirs, reference)
            once = torch.from_numpy(np.bincount(targets, minlength=num_rows) == 1).to(device)
            if fresh:  # a row with one partial keeps its bits
                assert torch.equal(got[0][once], want[0][once])
                assert torch.equal(got[1][once], want[1][once])
            parts = [out.nan_to_num(0.5) for out in outs]
            want, got = start[0].clone(), start[0].clone()
            waves.add(want, parts, fresh=fresh)
            segments.add(got, parts, fresh=fresh)
            assert torch.equal(got, want), (case, fresh)


@needs_triton
@pytest.mark.parametrize("seed", range(2))
def test_triton_kernels_combine_as_torch_does(seed: int) -> None:
    values(run_processes(1, interpret_and_compare, seed))


def compile_for(group, capability: int, folder: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = folder
    from tests.runtime.triton_code import ptx
    from torchtitan_cad.runtime.triton import merge, reduce

    table = {"sources": "*i32", "offsets": "*i32", "num_a": "i32"}
    parts = {"out_acc": "*fp32", "lse_acc": "*fp32", "out_a": "*bf16", "lse_a": "*fp32", "out_b": "*bf16"}
    strides = {f"{name}_stride_{part}": "i32" for part in "ab" for name in ("out", "lse")}
    for fresh in (True, False):
        shape = {"HEADS": 32, "DIM": 128, "BLOCK_HEADS": 32, "BLOCK_DIM": 128, "FRESH": fresh}
        types = {**parts, "lse_b": "*fp32", **table, **strides}
        aligned = ["out_acc", "out_a", "out_b", "out_stride_a", "out_stride_b"]
        code = ptx(merge._merge_rows, capability, types, shape, aligned)
        assert "ld.global.v4" in code
        assert "st.global.v4" in code
        types = {"acc": "*fp32", "part_a": "*bf16", "part_b": "*bf16", **table, "stride_a": "i32", "stride_b": "i32"}
        shape = {"ROW_SIZE": 1024, "BLOCK": 1024, "FRESH": fresh}
        code = ptx(reduce._sum_rows, capability, types, shape, ["acc", "part_a", "part_b", "stride_a", "stride_b"])
        assert "st.global.v4" in code


@needs_triton
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile_without_a_gpu(capability: int, tmp_path) -> None:
    """Accesses are as wide as the device can make them."""
    values(run_processes(1, compile_for, capability, str(tmp_path), timeout_s=240))
