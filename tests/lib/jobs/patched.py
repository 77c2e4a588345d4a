# SPDX-License-Identifier: BSD-3-Clause
"""Copies of the installed torchtitan with files of patches/ applied."""

import functools
from pathlib import Path

from tests.lib.jobs.harness import REPOSITORY, scratch_folder
from tests.lib.patched_torchtitan import copy_torchtitan

PATCHES = sorted((REPOSITORY / "patches").glob("*.patch"))


@functools.cache
def torchtitan_with(*names: str) -> Path:
    """Return the folder of a torchtitan with these patches, such as "tied_embeddings", and nothing else changed."""
    patches = [REPOSITORY / "patches" / f"{name}.patch" for name in names]
    return copy_torchtitan(scratch_folder() / f"with_{'_'.join(names)}", *patches)
