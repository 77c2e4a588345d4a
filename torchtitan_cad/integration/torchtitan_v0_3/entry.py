# SPDX-License-Identifier: BSD-3-Clause
"""Start torchtitan 0.3.0 as `python -m torchtitan_cad.train` does; import it after ``enable_cpu``."""

import logging
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
    try:
        with one_line_instead():
            return ConfigManager().parse_args(arguments)
    except ValueError as error:
        if "--cad." in str(error) and recipes.__name__ not in " ".join(arguments):
            raise ValueError(
                f"{error}; --cad options need a module with CAD: set --module to {recipes.__name__}.<model>"
            ) from None
        raise
