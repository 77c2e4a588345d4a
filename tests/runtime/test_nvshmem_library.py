"""NVSHMEM's device library: which file is taken, and what is said where there is none."""

from pathlib import Path

import pytest
from torch.distributed._symmetric_memory._nvshmem_triton import NvshmemLibFinder

from torchtitan_cad.runtime.triton.nvshmem_library import find_device_library


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder that is looked into."""
    monkeypatch.setenv("NVSHMEM_LIB_DIR", str(tmp_path))
    monkeypatch.setattr(NvshmemLibFinder, "found_device_lib_path", None)
    return tmp_path


@pytest.mark.parametrize(
    ("capability", "found"), [((8, 0), "80"), ((9, 0), "90"), ((10, 0), "90"), ((8, 6), "80"), (None, "90")]
)
def test_the_newest_file_that_the_device_can_run(folder: Path, capability: tuple[int, int], found: str) -> None:
    """As NVSHMEM 3.7.2, which comes with torch 2.15.0, has them; torch's wrappers then take the same."""
    for made_for in (75, 80, 89, 90):
        (folder / f"libnvshmem_device_sm_{made_for}.bc").touch()
    assert find_device_library(capability).name == f"libnvshmem_device_sm_{found}.bc"
    assert NvshmemLibFinder.find_device_library() == str(find_device_library(capability))


def test_one_file_for_all_devices_comes_first(folder: Path) -> None:
    for name in ("libnvshmem_device.bc", "libnvshmem_device_sm_90.bc"):
        (folder / name).touch()
    assert find_device_library((9, 0)).name == "libnvshmem_device.bc"


@pytest.mark.parametrize("capability", [(7, 0), None])
def test_no_file_is_said(folder: Path, capability: tuple[int, int] | None) -> None:
    if capability is not None:
        (folder / "libnvshmem_device_sm_80.bc").touch()
    with pytest.raises(RuntimeError, match=r"NVSHMEM's device library for .* is not in .*: install the package"):
        find_device_library(capability)
