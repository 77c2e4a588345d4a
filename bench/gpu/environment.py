# SPDX-License-Identifier: BSD-3-Clause
"""Describes the machine."""

import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu.parts import Emit
from bench.record import installed_version

PACKAGES = (
    *(
        "torch",
        "triton",
        "numpy",
        "numba",
        "pytest",
        "pytest-timeout",
        "hypothesis",
        "tyro",
        "tqdm",
    ),
    *("torchtitan", "flash-attn", "flash-attn-4", "nvidia-nvshmem-cu13"),
)
QUERIES = (
    *(
        "driver_version",
        "clocks.sm",
        "clocks.max.sm",
        "clocks.mem",
        "power.draw",
        "power.limit",
        "temperature.gpu",
    ),
    *("memory.used", "utilization.gpu", "mig.mode.current", "compute_mode"),
)


def describe(device: str, emit: Emit) -> None:
    """Raises RuntimeError if the device cannot compute."""
    emit("gpu", "none: CPU stand-ins" if device == "cpu" else _usable_gpu())
    emit("torch", torch.__version__)
    emit("python", platform.python_version())
    emit("packages", {name: installed_version(name) for name in PACKAGES})
    parts: dict[str, Callable[[], object]] = {
        "host": _host,
        "triton": lambda: _launch(device),
    }
    if device == "cuda":
        parts |= {"device": _device, "nvidia-smi": _nvidia_smi, "links": _links}
    for name, describe_part in parts.items():
        try:
            emit(name, describe_part())
        except Exception as error:
            # what cannot be found out here keeps nothing from being measured
            emit(name, f"{type(error).__name__}: {error}")


def _usable_gpu() -> str:
    """Name of the GPU, once it has computed something."""
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU here; --dry-run runs CPU stand-ins")
    if int(torch.ones(8, device="cuda").sum()) != 8:
        raise RuntimeError("this GPU cannot add")
    return torch.cuda.get_device_name()


def _host() -> dict[str, Any]:
    """gVisor, a kernel in user space, reports Linux 4.4.0."""
    return {
        "system": platform.platform(),
        "gVisor": platform.release() == "4.4.0",
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gigabytes": round(
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1
        ),
        "compilers": [name for name in ("gcc", "g++", "nvcc") if shutil.which(name)],
        "torchtitan": importlib.util.find_spec("torchtitan") is not None,
    }


def _device() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    return {
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gigabytes": round(total / 1e9, 1),
        "free_gigabytes": round(free / 1e9, 1),
        "l2_megabytes": round(getattr(properties, "L2_cache_size", 0) / 1e6, 1),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def _launch(device: str) -> str:
    """Whether Triton compiles and launches here, which takes a C compiler and Python's headers."""
    from torchtitan_cad.runtime.triton.delta import row_delta

    rows = torch.ones(1, 2, 64, device=device)
    delta = row_delta(rows, rows, torch.float32).tolist()
    return (
        "compiles and launches"
        if delta == [[64, 64]]
        else f"gives {delta} for [[64, 64]]"
    )


def _nvidia_smi() -> dict[str, str]:
    line = _output(
        "nvidia-smi",
        f"--query-gpu={','.join(QUERIES)}",
        "--format=csv,noheader",
        "--id=0",
    )
    values = [value.strip() for value in line.split(",")]
    return (
        dict(zip(QUERIES, values, strict=True))
        if len(values) == len(QUERIES)
        else {"answer": line}
    )


def _links() -> dict[str, Any]:
    count = torch.cuda.device_count()
    peers = [
        (a, b)
        for a in range(count)
        for b in range(count)
        if a != b and torch.cuda.can_device_access_peer(a, b)
    ]
    return {
        "gpus": count,
        "peer_to_peer": peers,
        "nvlink": _output("nvidia-smi", "nvlink", "--status")[:500],
    }


def _output(*command: str) -> str:
    """A command's output, or the reason why there is none."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return (result.stdout or result.stderr).strip()
