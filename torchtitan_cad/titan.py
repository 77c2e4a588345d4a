# SPDX-License-Identifier: BSD-3-Clause
"""Which torchtitan is installed: one whose jobs are TOML files (0.2.2), or recipes (0.3.0)."""

from importlib.metadata import PackageNotFoundError, version

FIRST_WITH_RECIPES = (0, 3)


def has_recipes() -> bool:
    """Tell whether jobs are recipes."""
    try:
        numbers = version("torchtitan").split(".")
    except PackageNotFoundError:
        return False
    return tuple(map(int, numbers[:2])) >= FIRST_WITH_RECIPES


def check_has_recipes() -> None:
    """Raise ValueError if jobs are TOML files."""
    if not has_recipes():
        raise ValueError(
            f"torchtitan {version('torchtitan')} is installed, whose jobs are TOML files: use --job.config_file with "
            "--parallelism.cad, or install torchtitan 0.3.0"
        )


def check_has_toml() -> None:
    """Raise ValueError if jobs are recipes."""
    if has_recipes():
        raise ValueError(
            f"torchtitan {version('torchtitan')} is installed, whose jobs are recipes: use --module "
            "torchtitan_cad.recipes.<model> --config <recipe>, or install torchtitan 0.2.2 for TOML files"
        )
