# SPDX-License-Identifier: BSD-3-Clause
"""A copy of the installed torchtitan with files of patches/ applied."""

import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path


def copy_torchtitan(destination: Path, *patches: Path) -> Path:
    """Copy the installed torchtitan below `destination`, apply patches there, and return the folder to import from."""
    (installed,) = find_spec("torchtitan").submodule_search_locations
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(installed, destination / "torchtitan", ignore=ignored)
    for patch in patches:
        apply_patch(destination, patch)
    return destination


def apply_patch(folder: Path, patch: Path, *options: str) -> None:
    # Inside a repository git would resolve the paths against its root, and skip what it does not find.
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(
        ["git", "apply", "-p1", *options, str(patch)], cwd=folder, env=env, check=True
    )
