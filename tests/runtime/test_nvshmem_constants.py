"""The numbers passed to NVSHMEM are those of its headers, where a package with the headers is installed."""

import importlib.util
import re
from pathlib import Path

import pytest

from torchtitan_cad.runtime.triton.nvshmem_library import CMP_GE, SIGNAL_SET


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
