# SPDX-License-Identifier: BSD-3-Clause
"""NVSHMEM: names of kernels, by which torch initialises them, signals that leave a node, and its device library."""

import os
import pkgutil
import re
from pathlib import Path

import pytest
import torch
import torch.utils._triton as torch_triton

import torchtitan_cad.runtime.triton
from tests.lib.processes import run_processes, values
from tests.lib.rows import CPU
from tests.lib.sets import needs_triton
from torchtitan_cad.runtime.triton import nvshmem_library
from torchtitan_cad.runtime.triton.nvshmem_library import find_device_library


def test_no_other_kernel_has_the_name_of_one_that_nvshmem_initialises():
    folder = Path(torchtitan_cad.runtime.triton.__file__).parent
    text = "".join(file.read_text() for file in folder.glob("*.py"))
    names = re.findall(r"@triton\.jit.*\ndef (\w+)", text)
    assert len(names) > text.count("@nvshmem.requires_nvshmem") == 3
    assert len(names) == len(set(names))


def compile_kernels(group, folder) -> tuple[list[str], list[str], int]:
    """Names of what a warm-up compiles, of what later launches do, and how many torch initialises for NVSHMEM."""
    os.environ["TRITON_CACHE_DIR"] = folder
    from tests.lib import mock_driver
    from torchtitan_cad.runtime.triton.nvshmem_library import find_device_library

    initialised = []
    torch_triton.has_triton = lambda *_: True
    torch._C._distributed_c10d._nvshmemx_cumodule_init = initialised.append
    find_device_library((9, 0))
    from torchtitan_cad.runtime.triton import nvshmem, signals

    nvshmem.warm_up(CPU)
    num_warmed = len(mock_driver.compiled)
    peers = torch.zeros(40, dtype=torch.int32)
    word = torch.zeros(1, dtype=torch.int64)
    messages = torch.zeros(7, 4, dtype=torch.int32)
    signals.post(peers, word, 3, 1, word)
    nvshmem.put_messages(messages, peers, 1 << 40, 1 << 41, 16640, word)
    nvshmem.post(peers, peers, 1 << 40, 1 << 39, 70_000, word)
    nvshmem.confirm(peers, 1 << 40, 16, word)
    names = [name for name, _ in mock_driver.compiled]
    return names[:num_warmed], names[num_warmed:], len(initialised)


@needs_triton
def test_nvshmem_kernels_are_compiled_before_they_are_needed(tmp_path):
    """Linked with the device library of the installed package, for compute capability 9.0."""
    try:
        find_device_library((9, 0))
    except RuntimeError as error:
        pytest.skip(str(error))
    ((warmed, later, initialised),) = values(
        run_processes(1, compile_kernels, str(tmp_path), timeout_s=200)
    )
    assert warmed == ["_nvshmem_put_messages", "_nvshmem_post", "_nvshmem_confirm"]
    assert later == ["_post"]
    assert initialised == 3


FINDER = "torch.distributed._symmetric_memory._nvshmem_triton.NvshmemLibFinder"
"""Of a module that must not be imported before ``compile_kernels`` says that there is Triton."""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The only folder that is looked into."""
    monkeypatch.setenv("NVSHMEM_LIB_DIR", str(tmp_path))
    monkeypatch.setattr(f"{FINDER}.found_device_lib_path", None)
    return tmp_path


@pytest.mark.parametrize(
    ("capability", "found"),
    [((8, 0), "80"), ((9, 0), "90"), ((10, 0), "90"), ((8, 6), "80"), (None, "90")],
)
def test_the_newest_file_that_the_device_can_run(folder, capability, found):
    """These files are NVSHMEM 3.7.2's, which comes with torch 2.15.0; torch's wrappers then take the same."""
    for made_for in (75, 80, 89, 90):
        (folder / f"libnvshmem_device_sm_{made_for}.bc").touch()
    library = find_device_library(capability)
    assert Path(library).name == f"libnvshmem_device_sm_{found}.bc"
    assert pkgutil.resolve_name(FINDER).find_device_library() == library


@pytest.mark.parametrize("capability", [(7, 0), None])
def test_no_file_is_said(folder, capability):
    if capability is not None:
        (folder / "libnvshmem_device_sm_80.bc").touch()
    with pytest.raises(RuntimeError, match="not found"):
        find_device_library(capability)


def test_the_heap_has_room(monkeypatch):
    """Unless the user has set its size."""
    monkeypatch.delenv("NVSHMEM_SYMMETRIC_SIZE", raising=False)
    nvshmem_library.reserve_heap(1_500_000_000)
    nvshmem_library.reserve_heap(2_000_000_000)
    assert os.environ["NVSHMEM_SYMMETRIC_SIZE"] == "1875000000"
