# SPDX-License-Identifier: BSD-3-Clause
"""Triton compiles few variants for a job, all of them before the first step, with wide accesses.

The real planner, engine and symmetric transport run with the kernels for devices, in processes of their own where
launches are compiled but launch nothing.
"""

import os
import re
import subprocess
import warnings
from collections import Counter

import pytest
import torch

from tests.lib.hollow import hollow_engine, passes_of_a_layer
from tests.lib.processes import run_processes, values
from tests.lib.rows import CPU
from tests.lib.sets import matrix, needs_triton, params
from tests.lib.workloads import workload_layout
from torchtitan_cad.planning import AttentionShape, PlannerConfig, make_plan
from torchtitan_cad.planning.exchange.messages import buffer_bytes
from torchtitan_cad.runtime import triton

pytestmark = needs_triton

MOST_VARIANTS = 16
SHAPE = AttentionShape(32, 8, 128, 2)
SIX_HEADS = AttentionShape(6, 2, 128, 2)
"""whose rows of log-sum-exps have no multiple of 16 bytes"""
LATENT = AttentionShape(16, 16, 192, 2, value_dim=128, shared_dim=64)
WORKLOADS = ("lognormal", "one big", "uniform")
REGISTERS = 65536
"""of a multiprocessor"""
WIDE = (
    "_put_rows",
    "_gather_rows",
    "_merge_rows",
    "_sum_rows",
    "_prepare_statistics",
    "_row_delta",
)


def run_plans(group, shape, num_ranks, num_plans, folder) -> tuple[list[str], int]:
    """Layers of rank 0 by many plans. Returns the variants in their order, and how many a warm-up has compiled."""
    os.environ["TRITON_CACHE_DIR"] = folder
    engine = hollow_engine(num_ranks, buffer_bytes=buffer_bytes())
    from tests.lib import mock_driver
    from torchtitan_cad.runtime.triton.warm_up import warm_up

    warm_up(shape, torch.bfloat16, CPU)
    warmed = len(mock_driver.compiled)
    for number in range(num_plans):
        layout = workload_layout(WORKLOADS[number % 3], num_ranks, 100 + number)
        plan = make_plan(layout, shape, PlannerConfig())
        forward, backward = passes_of_a_layer(engine, plan, number)
        backward(forward())
        engine.drop_plan(number)
    assert mock_driver.launches["_put_rows"] > num_plans
    return [name for name, _ in mock_driver.compiled], warmed


def registers(code, capability) -> int:
    """Registers of a thread of a kernel, as the assembler says that Triton uses."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    arch = sm_arch_from_capability(capability)
    options = f"-v -arch={arch} -o {os.devnull} -".split()
    said = subprocess.run(
        [get_ptxas(capability).path, *options],
        input=code,
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    return int(re.search(r"Used (\d+) registers", said)[1])


def compile_for(group, capability, folder):
    warnings.simplefilter("error")  # Triton warns where it chooses options by itself
    os.environ["TRITON_CACHE_DIR"] = folder
    triton.runs_on = lambda device: True
    from tests.lib import mock_driver
    from torchtitan_cad.runtime.triton import put
    from torchtitan_cad.runtime.triton.warm_up import warm_up

    mock_driver.CAPABILITY = capability
    warm_up(SHAPE, torch.bfloat16, CPU)
    code = {name: kernel.asm["ptx"] for name, kernel in mock_driver.compiled}
    for name in WIDE:
        assert any(
            load in code[name] for load in ("ld.global.v4.b32", "ld.global.v2.b64")
        ), name
        assert "st.local" not in code[name], f"registers of {name} spill"
    assert put.WARPS * 32 * registers(code["_put_rows"], capability) > REGISTERS // 2, (
        "two puts share a multiprocessor"
    )
    for name in WIDE[:-1]:
        assert any(
            store in code[name] for store in ("st.global.v4.b32", "st.global.v2.b64")
        ), name
    assert "st.release.sys.global.b64" in code["_post"]
    assert "sys.acquire" in code["_wait"]
    assert "globaltimer" in code["_wait"]


@pytest.mark.parametrize("capability", params([80, 90, 100], [90]))
def test_code_for_a_device(capability, tmp_path):
    """Accesses of 16 bytes, and the memory order that the protocol relies on."""
    values(run_processes(1, compile_for, capability, str(tmp_path), timeout_s=300))


@matrix
@pytest.mark.parametrize(
    ("shape", "num_ranks", "num_plans"),
    [
        (LATENT, 8, 2),
        (SIX_HEADS, 8, 2),
        (SHAPE, 64, 60),
    ],
)
def test_nothing_is_compiled_after_the_start(shape, num_ranks, num_plans, tmp_path):
    """The plans differ as much as they can: 1 to 14 kernel calls, returns in 1 to 5 chunks."""
    arguments = shape, num_ranks, num_plans, str(tmp_path)
    results = run_processes(1, run_plans, *arguments, timeout_s=500)
    ((variants, warmed),) = values(results)
    # sums of two more sizes, statistics of padded rows
    more_sizes = 5 if shape is LATENT else 0
    assert len(variants) <= MOST_VARIANTS + more_sizes, Counter(variants)
    assert variants[warmed:] == []
