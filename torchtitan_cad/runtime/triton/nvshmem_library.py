# SPDX-License-Identifier: BSD-3-Clause
"""NVSHMEM's libraries and memory: what must be right before it starts, as it ends a process in which it cannot.

This module can be imported without NVSHMEM.

The constants are from NVSHMEM's headers (nvshmem_common_transport.h, nvshmem_constants.h); the docstrings of torch's
wrappers have other numbers.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import resource
from pathlib import Path

SIGNAL_SET = 9
"""``nvshmemx_signal_op``: replace the signal word."""
CMP_GE = 5
"""``nvshmem_signal_wait_until``: until the word is at least the value."""
_HOST_LIBRARY = "libnvshmem_host.so.3"
_HEAP = "NVSHMEM_SYMMETRIC_SIZE"
_HEAP_MARGIN = 1.25
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


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
        device = (
            "this device"
            if capability is None
            else f"compute capability {capability[0]}.{capability[1]}"
        )
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
    spec = (
        importlib.util.find_spec("nvidia.nvshmem")
        if importlib.util.find_spec("nvidia")
        else None
    )
    wheels = (
        [Path(folder) / "lib" for folder in (spec.submodule_search_locations or ())]
        if spec
        else []
    )
    return [
        *wheels,
        *map(Path, ("/usr/local/lib", "/usr/lib", "/opt/nvidia/nvshmem/lib")),
    ]


def check_host_library(device_library: Path) -> None:
    """Check that the host library of this process has the version of the device library, if that is of a package.

    Kernels linked with another version read the host library's state wrongly, or end the process.

    Raises:
        RuntimeError: there is no host library, or its version is another; names both paths and versions.
    """
    try:
        library = ctypes.CDLL(_HOST_LIBRARY)
    except OSError as error:
        raise RuntimeError(
            f"NVSHMEM's host library cannot be loaded: {error}"
        ) from None
    numbers = [ctypes.c_int() for _ in range(3)]
    library.nvshmemx_vendor_get_version_info(*map(ctypes.byref, numbers))
    loaded = ".".join(str(number.value) for number in numbers)
    packaged = _packaged_version(device_library)
    if packaged is not None and packaged != loaded:
        raise RuntimeError(
            f"NVSHMEM's host library {_path_of(_HOST_LIBRARY)} is version {loaded}, and its device library "
            f"{device_library} is version {packaged}: take the host library's folder out of LD_LIBRARY_PATH, or set "
            "NVSHMEM_LIB_DIR to the folder of the .bc files of its version"
        )


def _packaged_version(device_library: Path) -> str | None:
    """Return the version of the package that has installed the device library; None if no package has."""
    for package in importlib.metadata.distributions():
        if package.name.startswith("nvidia-nvshmem"):
            folder = Path(str(package.locate_file("nvidia/nvshmem/lib")))
            if folder.resolve() == device_library.parent.resolve():
                return package.version
    return None


def _path_of(library: str) -> str:
    """Return the file of a library that this process has loaded."""
    paths = (
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()
    )
    return next((path for path in paths if library in path), library)


def lacks_between_hosts(system: Path = Path("/sys")) -> list[str]:
    """Return what this machine lacks of what NVSHMEM usually needs to reach other hosts; without it it may not start.

    Args:
        system: folder with what the kernel tells of devices and modules.
    """
    lacks = list[str]()
    devices = system / "class/infiniband"
    if not (devices.is_dir() and any(devices.iterdir())):
        lacks.append(f"InfiniBand or RoCE devices in {devices}")
    if not (system / "module/nvidia_peermem").is_dir():
        lacks.append(
            "the kernel module nvidia_peermem, unless its devices register memory by dmabuf"
        )
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY:
        lacks.append("unlimited locked memory (`ulimit -l unlimited`)")
    return lacks


def reserve_heap(num_bytes: int) -> None:
    """Make room for ``num_bytes`` in NVSHMEM's heap, whose size is fixed on some systems when NVSHMEM starts.

    Raises:
        RuntimeError: the user has set a size that is too small.
    """
    value = os.environ.setdefault(_HEAP, str(int(_HEAP_MARGIN * num_bytes)))
    size = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)B?\s*", value, re.IGNORECASE)
    room = 0.0 if size is None else float(size[1]) * (1 << _UNITS[size[2].upper()])
    if room < num_bytes:
        raise RuntimeError(
            f"the environment variable {_HEAP} = {value!r} is not a size of at least the {num_bytes} bytes of receive "
            "buffers: leave it out, or set a smaller cad.receive_buffer_gb"
        )
