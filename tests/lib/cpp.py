# SPDX-License-Identifier: BSD-3-Clause
"""Compiles C++ files of tests against torch, once per torch version (10 s of CPU time), in the user's cache folder."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def find_compiler() -> str | None:
    """Return the C++ compiler's path, or None: CXX as everywhere, else g++, c++ or clang++."""
    names = (os.environ.get("CXX"), "g++", "c++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


needs_compiler = pytest.mark.skipif(
    find_compiler() is None, reason="needs a C++ compiler"
)


def build(source: Path) -> Path:
    """Return the library of a C++ file; compiles it if it is not in the cache.

    Raises:
        RuntimeError: no C++ compiler, or it fails; says which.
    """
    version = f"{torch.__version__} {torch.version.git_version} {sys.version_info[:2]}"
    digest = hashlib.sha256(source.read_bytes() + version.encode()).hexdigest()[:16]
    cache = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "torchtitan_cad"
    )
    library = cache / f"{source.stem}-{digest}.so"
    if library.exists():
        return library
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError(
            f"{source.name} needs a C++ compiler such as g++, and none is on the path"
        )
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{source.stem}.lock").open("w") as lock:
        # which the kernel releases however its holder ends
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(compiler, source, library)
    return library


def _compile(compiler: str, source: Path, library: Path) -> None:
    installed = Path(torch.__file__).parent
    unfinished = library.with_suffix(f".{os.getpid()}.tmp")
    command = [
        *(
            compiler,
            "-std=c++20",
            "-O2",
            "-fPIC",
            "-shared",
            str(source),
            "-o",
            str(unfinished),
        ),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-isystem{installed / 'include'}",
        f"-isystem{installed / 'include/torch/csrc/api/include'}",
        *(f"-L{installed / 'lib'}", "-ltorch_cpu", "-lc10"),
    ]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(
                f"{compiler} cannot compile {source.name}: {result.stderr[-2000:]}"
            )
        unfinished.replace(library)
    finally:
        unfinished.unlink(missing_ok=True)
