# SPDX-License-Identifier: BSD-3-Clause
"""NVSHMEM's device library and memory: what must be set before it starts.

This module can be imported without NVSHMEM.

The constants are from NVSHMEM's headers (nvshmem_common_transport.h, nvshmem_constants.h); the docstrings of torch's
wrappers have other numbers.
"""

import importlib
import os
import re
from pathlib import Path

SIGNAL_SET = 9
"""``nvshmemx_signal_op``: replace the signal word."""
CMP_GE = 5
"""``nvshmem_signal_wait_until``: until the word is at least the value."""
_HEAP = "NVSHMEM_SYMMETRIC_SIZE"
_HEAP_MARGIN = 1.25


def find_device_library(capability: tuple[int, int] | None) -> str:
    """Find the library for linking kernels with NVSHMEM, and set its path for torch's wrappers.

    Torch looks for libnvshmem_device.bc, one file for all devices. From version 3.7 on (torch 2.15) NVSHMEM has a file
    for each compute capability instead; this takes the newest that the device can run.

    Args:
        capability: compute capability of the device; None if it is unknown, so that any file is taken.

    Raises:
        RuntimeError: torch found no library; names the folders.
    """
    from torch.distributed._symmetric_memory._nvshmem_triton import NvshmemLibFinder

    most = float("inf") if capability is None else 10 * capability[0] + capability[1]
    fitting: dict[int, Path] = {}
    for folder in _folders():
        for file in folder.glob("libnvshmem_device_sm_*.bc"):
            made_for = int(re.findall(r"\d+", file.stem)[-1])
            if made_for <= most:
                fitting[made_for] = file
    if fitting:
        NvshmemLibFinder.found_device_lib_path = str(fitting[max(fitting)])
    return NvshmemLibFinder.find_device_library()


def _folders() -> list[Path]:
    """Return the folders that may have a device's file: the user's, or those of the package and the system."""
    if "NVSHMEM_LIB_DIR" in os.environ:
        return [Path(os.environ["NVSHMEM_LIB_DIR"])]
    system = ["/usr/local/lib", "/usr/lib", "/opt/nvidia/nvshmem/lib"]
    try:
        package = importlib.import_module("nvidia.nvshmem")
    except ImportError:
        return [*map(Path, system)]
    wheels = [Path(folder) / "lib" for folder in package.__path__]
    return [*wheels, *map(Path, system)]


def reserve_heap(num_bytes: int) -> None:
    """Make room for ``num_bytes`` in NVSHMEM's heap, whose size is fixed on some systems when NVSHMEM starts."""
    os.environ.setdefault(_HEAP, str(int(_HEAP_MARGIN * num_bytes)))
