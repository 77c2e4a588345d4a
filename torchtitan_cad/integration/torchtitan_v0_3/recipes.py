# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan 0.3.0's recipes with CAD."""

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from importlib import import_module
from typing import Any

from torchtitan_cad.integration.config import Cad
from torchtitan_cad.integration.torchtitan_v0_3.derived import derived
from torchtitan_cad.integration.torchtitan_v0_3.trainer import CadTrainer


def with_cad(config: Any, table: dict[str, Any]) -> Any:
    """Return a recipe's config that trains with CAD, set as ``table`` says; see ``torchtitan_cad.recipes.cad``."""
    known = {one.name for one in fields(Cad)}
    for key in table.keys() - known:
        raise ValueError(
            f"cad({key}=...): no such key; set one of: {', '.join(sorted(known))}"
        )
    if isinstance(getattr(config, "cad", None), Cad):
        return replace(config, cad=replace(config.cad, **table))
    return derived(config, CadTrainer, cad=Cad(**{"documents": "positions", **table}))


def upstream_recipe(model: str, name: str) -> Callable[[], Any]:
    """Return torchtitan's recipe ``name`` of ``model``. Raises AttributeError if there is none."""
    return getattr(import_module(f"torchtitan.models.{model}.config_registry"), name)


def upstream_names(model: str) -> list[str]:
    """Name all recipes of ``model``."""
    registry = import_module(f"torchtitan.models.{model}.config_registry")
    return [
        name
        for name, value in vars(registry).items()
        if inspect.isfunction(value)
        and value.__module__ == registry.__name__
        and not name.startswith("_")
    ]
