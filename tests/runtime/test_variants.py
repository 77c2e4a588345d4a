"""Triton compiles few variants for a job, all of them before the first step, with wide accesses.

The real planner, engine and symmetric transport run with the kernels for devices, in processes of their own where
launches are compiled but launch nothing.
"""

import os
import re
import subprocess
import tempfile
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.memory import make_layout
from tests.runtime.processes import run_processes, values
from tests.sets import matrix, needs_triton, params
from torchtitan_cad.planning import AttentionShape, PlannerConfig, make_plan
from torchtitan_cad.planning.exchange.messages import buffer_bytes
from torchtitan_cad.runtime import triton
from torchtitan_cad.runtime.call import Saved
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.kernels import varlen
from torchtitan_cad.runtime.transport import SymmetricTransport

pytestmark = needs_triton

MOST_VARIANTS = 16
SHAPE = AttentionShape(32, 8, 128, 2)
WORKLOADS = ("lognormal", "one big", "uniform", "whole documents")
H100_BYTES_IN_FLIGHT = 3.35e12 * 1e-6 / 132
"""bytes of an SM: bandwidth times a latency of a microsecond under load, over the SMs"""
REGISTERS, THREADS, PROGRAMS = 65536, 2048, 32
"""the most that an SM of compute capability 9.0 has"""
WIDE = ("_put_rows", "_gather_rows", "_merge_rows", "_sum_rows", "_prepare_statistics", "_row_delta")


def run_plans(group: object, num_ranks: int, num_plans: int, folder: str) -> tuple[list[str], int]:
    """Layers of rank 0 by many plans. Returns the variants in their order, and how many a warm-up has compiled."""
    os.environ["TRITON_CACHE_DIR"] = folder
    triton.runs_on = lambda device: True
    torch.set_num_threads(1)
    from tests.runtime import mock_driver
    from torchtitan_cad.runtime.transport.cuda_memory import DeviceMemory
    from torchtitan_cad.runtime.triton.warm_up import warm_up

    warm_up(SHAPE, torch.bfloat16, torch.device("cpu"))
    warmed = len(mock_driver.compiled)

    def flash_forward(q, k, v, *args, **kwargs):
        return torch.empty_like(q), torch.empty(q.shape[1], q.shape[0]), None

    def flash_backward(dout, q, k, v, *args, **kwargs):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    varlen._forward_op, varlen._backward_op = flash_forward, flash_backward
    varlen._takes = lambda *_: False

    def allocate(num_bytes: int) -> DeviceMemory:
        memory = torch.empty(num_bytes + 512, dtype=torch.uint8)
        begin = -memory.data_ptr() % 512
        own = memory[begin : begin + num_bytes]
        device = DeviceMemory(own, [own.data_ptr()] * num_ranks, None, 1e6)
        return device

    transport = SymmetricTransport(range(num_ranks), 0, allocate, lambda: 600.0, buffer_bytes())
    engine = CoreAttentionEngine(varlen.VarlenKernel(), transport, rank=0, device=torch.device("cpu"), scale=0.1)
    for number in range(num_plans):
        plan = make_plan(make_layout(WORKLOADS[number % 4], num_ranks, 100 + number), SHAPE, PlannerConfig())
        engine.add_plan(number, plan)
        tokens = int(plan.layout.tokens_per_rank[0])
        heads = (SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.num_kv_heads, SHAPE.num_heads)
        q, k, v, dout = (torch.empty(tokens, count, SHAPE.head_dim, dtype=torch.bfloat16) for count in heads)
        engine.backward(dout, Saved(q, k, v, *engine.forward(q, k, v, number)), number)
        engine.drop_plan(number)
    assert mock_driver.launches["_put_rows"] > num_plans
    return [name for name, _ in mock_driver.compiled], warmed


def compile_for(group: object, capability: int, folder: str) -> None:
    warnings.simplefilter("error")  # Triton warns where it chooses options by itself
    os.environ["TRITON_CACHE_DIR"] = folder
    triton.runs_on = lambda device: True
    from tests.runtime import mock_driver
    from torchtitan_cad.runtime.triton.warm_up import warm_up

    mock_driver.CAPABILITY = capability
    warm_up(SHAPE, torch.bfloat16, torch.device("cpu"))
    code = {name: kernel.asm["ptx"] for name, kernel in mock_driver.compiled}
    for name in WIDE:
        assert any(load in code[name] for load in ("ld.global.v4.b32", "ld.global.v2.b64")), name
        assert "st.local" not in code[name], f"registers of {name} spill"
    if capability == 90:
        read = bytes_read_at_a_time()
        for name, kernel in mock_driver.compiled:
            if name in read:
                in_flight = programs_per_multiprocessor(kernel) * read[name]
                assert in_flight >= H100_BYTES_IN_FLIGHT, (name, in_flight)
    for name in WIDE[:-1]:
        assert any(store in code[name] for store in ("st.global.v4.b32", "st.global.v2.b64")), name
    assert "sys.release" in code["_post"]
    assert "sys.acquire" in code["_wait"]


def bytes_read_at_a_time() -> dict[str, int]:
    """Bytes that a program of each memory-bound kernel reads at a time, in bf16."""
    from torchtitan_cad.runtime.triton import combine, delta, gather, rows

    return {
        "_gather_rows": 8 * gather.HEIGHT.value * rows.WIDTH.value,
        "_merge_rows": 2 * min(combine.MERGE_TILE, SHAPE.num_heads * SHAPE.head_dim),
        "_sum_rows": 2 * combine.SUM_TILE,
        "_row_delta": 2 * 2 * delta.TILE,
        "_prepare_statistics": 2 * delta.TILE,
    }


def programs_per_multiprocessor(kernel: Any) -> int:
    """How many programs run at a time, by their registers and threads."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    threads = 32 * kernel.metadata.num_warps
    registers = -(-int(re.search(r"REG:(\d+)", usage)[1]) // 8) * 8
    return min(REGISTERS // (registers * threads), THREADS // threads, PROGRAMS)


@pytest.mark.parametrize("capability", params([80, 90, 100], [90]))
def test_code_for_a_device(capability: int, tmp_path) -> None:
    """Accesses of 16 bytes, enough of them at a time for an H100, and the memory order that the protocol relies on."""
    values(run_processes(1, compile_for, capability, str(tmp_path), timeout_s=300))


@pytest.mark.parametrize(
    ("num_ranks", "num_plans"), [(8, 6), pytest.param(64, 60, marks=matrix), pytest.param(8, 60, marks=matrix)]
)
def test_nothing_is_compiled_after_the_start(num_ranks: int, num_plans: int, tmp_path) -> None:
    """The plans differ as much as they can: 1 to 14 kernel calls, returns in 1 to 5 trips."""
    run = partial(run_processes, 1, run_plans, num_ranks, num_plans, str(tmp_path), timeout_s=500)
    ((variants, warmed),) = values(run())
    assert len(variants) <= MOST_VARIANTS, Counter(variants)
    assert variants[warmed:] == []
