# SPDX-License-Identifier: BSD-3-Clause
"""Copies of the installed torchtitan with files of patches/ applied."""

import functools
import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

from tests.integration.harness import REPOSITORY, scratch_folder

PATCHES = sorted((REPOSITORY / "patches").glob("*.patch"))


def copy_torchtitan(destination: Path, *patches: Path) -> Path:
    """Copy the installed torchtitan below `destination`, apply patches there, and return the folder to import from."""
    spec = find_spec("torchtitan")
    assert spec is not None
    assert spec.submodule_search_locations
    installed = Path(spec.submodule_search_locations[0])
    shutil.copytree(installed, destination / "torchtitan", ignore=shutil.ignore_patterns("__pycache__"))
    for patch in patches:
        apply_patch(destination, patch)
    return destination


def apply_patch(folder: Path, patch: Path, *options: str) -> None:
    # Inside a repository git would resolve the paths against its root, and skip what it does not find.
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(["git", "apply", "-p1", *options, str(patch)], cwd=folder, env=env, check=True)


@functools.cache
def with_cache_keys() -> Path:
    """torchtitan whose ranks do not take each other's compiled graphs; nothing else is changed."""
    return copy_torchtitan(scratch_folder() / "with_cache_keys", REPOSITORY / "patches" / "compile_caches.patch")
