# SPDX-License-Identifier: BSD-3-Clause
"""Leaves these tests out where another torchtitan is installed; else lets it train on CPU ranks."""

from torchtitan_cad.titan import has_recipes

collect_ignore_glob = [] if has_recipes() else ["test_*.py"]
if has_recipes():
    from torchtitan_cad.integration.cpu import enable_cpu

    enable_cpu()
