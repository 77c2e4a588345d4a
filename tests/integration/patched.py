# SPDX-License-Identifier: BSD-3-Clause
"""Copies of the installed torchtitan with files of patches/ applied."""

import functools
from pathlib import Path

from tests.integration.harness import REPOSITORY, scratch_folder
from tests.support.patched import copy_torchtitan

PATCHES = sorted((REPOSITORY / "patches").glob("*.patch"))


@functools.cache
def with_cache_keys() -> Path:
    """torchtitan whose ranks do not take each other's compiled graphs; nothing else is changed."""
    return copy_torchtitan(scratch_folder() / "with_cache_keys", REPOSITORY / "patches" / "compile_caches.patch")
