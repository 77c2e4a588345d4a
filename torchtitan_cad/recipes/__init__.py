# SPDX-License-Identifier: BSD-3-Clause
"""Recipes of torchtitan 0.3.0 with core attention disaggregated.

    torchrun ... -m torchtitan.train --module torchtitan_cad.recipes.llama3 --config llama3_8b --cad.tolerance 0.02

trains torchtitan's own recipe ``llama3_8b`` with CAD; ``torchtitan_cad.recipes`` has a module for every model. In a
registry of one's own:

    from torchtitan_cad.recipes import cad

    def my_recipe():
        return cad(llama3_8b(), tolerance=0.02)
"""

from collections.abc import Callable
from typing import Any

from torchtitan_cad.titan import check_has_recipes


def cad(config: Any, **table: Any) -> Any:
    """Return a recipe that trains as ``config`` does, with core attention disaggregated.

    Args:
        config: torchtitan's ``Trainer.Config``, or that of a subclass.
        table: keys of CAD (docs/settings.md), which ``--cad.<key>`` on the command line replaces.

    Raises:
        ValueError: torchtitan has no recipes, or a key does not exist; names the remedy.
    """
    check_has_recipes()
    from torchtitan_cad.integration.torchtitan_v0_3.recipes import with_cad

    return with_cad(config, table)


def registry_of(
    model: str,
) -> tuple[Callable[[str], Callable[[], Any]], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a module with torchtitan's recipes of ``model``, each with CAD."""

    def get(name: str) -> Callable[[], Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        check_has_recipes()
        from torchtitan_cad.integration.torchtitan_v0_3.recipes import upstream_recipe

        recipe = upstream_recipe(model, name)
        return lambda: cad(recipe())

    def names() -> list[str]:
        from torchtitan_cad.integration.torchtitan_v0_3.recipes import upstream_names

        return upstream_names(model)

    return get, names
