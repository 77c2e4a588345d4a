# SPDX-License-Identifier: BSD-3-Clause
"""NVSHMEM's device library: its path, and constants of its interface. This module can be imported without NVSHMEM.

The constants are from NVSHMEM's headers (nvshmem_common_transport.h, nvshmem_constants.h); the docstrings of torch's
wrappers have other numbers.
"""

import importlib.util
import os
import re
from pathlib import Path

SIGNAL_SET = 9
"""``nvshmemx_signal_op``: replace the signal word."""
CMP_GE = 5
"""``nvshmem_signal_wait_until``: until the word is at least the value."""


def find_device_library(capability: tuple[int, int] | None) -> Path:
    """Find the library for linking kernels with NVSHMEM, and set its path for torch's wrappers.

    Torch looks for libnvshmem_device.bc, one file for all devices. From version 3.7 on (torch 2.15) NVSHMEM has a file
    for each compute capability instead; this takes the newest that the device can run.

    Args:
        capability: compute capability of the device; None if it is unknown, so that any file is taken.

    Raises:
        RuntimeError: no library was found; names the folders and the package to install.
    """
    from torch.distributed._symmetric_memory._nvshmem_triton import NvshmemLibFinder

    folders = _folders()
    most = float("inf") if capability is None else 10 * capability[0] + capability[1]
    fitting: dict[int, Path] = {}
    for folder in folders:
        if (plain := folder / "libnvshmem_device.bc").exists():
            fitting[-1] = plain
        for file in folder.glob("libnvshmem_device_sm_*.bc"):
            made_for = int(re.findall(r"\d+", file.stem)[-1])
            if made_for <= most:
                fitting[made_for] = file
    if not fitting:
        device = "this device" if capability is None else f"compute capability {capability[0]}.{capability[1]}"
        raise RuntimeError(
            f"NVSHMEM's device library for {device} is not in {', '.join(map(str, folders)) or 'any package'}: install "
            "the package nvidia-nvshmem of your CUDA version, or set NVSHMEM_LIB_DIR to the folder of its .bc files"
        )
    library = fitting.get(-1, fitting[max(fitting)])
    NvshmemLibFinder.found_device_lib_path = str(library)
    return library


def _folders() -> list[Path]:
    """Return the folders that may have the library, as torch searches them."""
    if "NVSHMEM_LIB_DIR" in os.environ:
        return [Path(os.environ["NVSHMEM_LIB_DIR"])]
    spec = importlib.util.find_spec("nvidia.nvshmem") if importlib.util.find_spec("nvidia") else None
    wheels = [Path(folder) / "lib" for folder in (spec.submodule_search_locations or ())] if spec else []
    return [*wheels, *map(Path, ("/usr/local/lib", "/usr/lib", "/opt/nvidia/nvshmem/lib"))]
