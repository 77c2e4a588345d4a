# SPDX-License-Identifier: BSD-3-Clause
"""Start torchtitan 0.3.0 as `python -m torchtitan_cad.train` does; import it after ``enable_cpu``."""

import argparse
import logging
import pkgutil
from types import SimpleNamespace
from typing import Any

import torchtitan.train as titan_train
from torchtitan.config import ConfigManager

from torchtitan_cad import recipes
from torchtitan_cad.integration.errors import first_of_node_logs
from torchtitan_cad.integration.torchtitan_v0_3.checks import check_gradients
from torchtitan_cad.integration.torchtitan_v0_3.derived import derived
from torchtitan_cad.integration.torchtitan_v0_3.parts import add_demo_texts
from torchtitan_cad.tyro_errors import one_line_instead

MODELS_WITH_CAD = sorted(
    module.name for module in pkgutil.iter_modules(recipes.__path__)
)


def run_recipe(arguments: list[str], progress: SimpleNamespace) -> None:
    """Run torchtitan's own ``main`` on ``arguments``; its trainer, once built, ends ``progress.building``."""

    class Announced:
        """Methods of a trainer that says when it has been built."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)  # type: ignore[call-arg]
            logging.getLogger().setLevel(logging.INFO)
            progress.building = False

    class Manager(ConfigManager):
        """Parses what ``ConfigManager`` does; what is wrong is a ValueError of one line."""

        def parse_args(self, args: list[str] | None = None) -> Any:
            config = parse(arguments)
            if not hasattr(config, "cad"):
                add_demo_texts(config)
                check_gradients(config)
            return derived(config, Announced)

    titan_train.init_logger = first_of_node_logs(titan_train.init_logger)
    titan_train.ConfigManager = Manager
    titan_train.main()


def parse(arguments: list[str]) -> Any:
    """Return the config of a recipe and its options. Raises ValueError that names what cannot be read."""
    _check_names(arguments)
    with one_line_instead():
        return ConfigManager().parse_args(arguments)


def _check_names(arguments: list[str]) -> None:
    """Raise ValueError for a job without a module or a config, or whose module has no CAD where it should."""
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    names = ("module", "config")
    for name in names:
        options.add_argument(f"--{name}", nargs="?")
    parsed, others = options.parse_known_args(arguments)
    for name in names:
        if getattr(parsed, name) is None:
            raise ValueError(
                f"--{name} is missing: a job is --module {recipes.__name__}.<model> --config <recipe>, such as "
                "llama3 and llama3_8b; without CAD --module <model>"
            )
    known = [f"{recipes.__name__}.{model}" for model in MODELS_WITH_CAD]
    if parsed.module.startswith(recipes.__name__) and parsed.module not in known:
        raise ValueError(
            f"--module {parsed.module}: set it to one of: {', '.join(known)}"
        )
    model = parsed.module.removeprefix("torchtitan.models.")
    for option in others:
        if model in MODELS_WITH_CAD and option.startswith("--cad."):
            raise ValueError(
                f"{option} needs a module with CAD: set --module to {recipes.__name__}.{model}"
            )
