"""NVSHMEM's device library: the file that is taken, the message where there is none, and numbers of the headers."""

import importlib.util
import re
from pathlib import Path

import pytest
from torch.distributed._symmetric_memory._nvshmem_triton import NvshmemLibFinder

from torchtitan_cad.runtime.triton.nvshmem_library import CMP_GE, SIGNAL_SET, find_device_library


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
    """These files are NVSHMEM 3.7.2's, which comes with torch 2.15.0; torch's wrappers then take the same."""
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


def headers() -> str:
    """The text of all NVSHMEM headers of the installed wheel."""
    spec = importlib.util.find_spec("nvidia.nvshmem") if importlib.util.find_spec("nvidia") else None
    folders = [Path(path) / "include" for path in (spec.submodule_search_locations or ())] if spec else []
    files = [file for folder in folders for file in sorted(folder.rglob("*.h"))]
    if not files:
        pytest.skip("no package nvidia-nvshmem is installed")
    return "\n".join(file.read_text(errors="replace") for file in files)


def enumerators(text: str, prefix: str) -> dict[str, int]:
    """The enumerators of the first C enum with one that begins with ``prefix``, counted on where no value is given."""
    body = next(body for body in re.findall(r"enum\s*\w*\s*\{([^}]*)\}", text) if prefix in body)
    values, following = {}, 0
    for entry in re.sub(r"/\*.*?\*/|//[^\n]*", "", body, flags=re.DOTALL).split(","):
        name, _, value = (word.strip() for word in entry.partition("="))
        if not name or (value and not value.isdigit()):
            continue
        following = int(value) if value else following
        values[name] = following
        following += 1
    return values


def test_numbers_are_the_headers() -> None:
    text = headers()
    assert enumerators(text, "NVSHMEM_SIGNAL_SET")["NVSHMEM_SIGNAL_SET"] == SIGNAL_SET
    assert enumerators(text, "NVSHMEM_CMP_GE")["NVSHMEM_CMP_GE"] == CMP_GE
