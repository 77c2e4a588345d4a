# SPDX-License-Identifier: BSD-3-Clause
"""Start torchtitan 0.3.0 as `python -m torchtitan_cad.train` does; import it after ``enable_cpu``."""

import contextlib
import io
import logging
from types import SimpleNamespace
from typing import Any

import torchtitan.train as titan_train
from torchtitan.config import ConfigManager

from torchtitan_cad.integration.choices import DEMO_TEXTS
from torchtitan_cad.integration.errors import TRACEBACK_OPTION, is_first_of_node
from torchtitan_cad.integration.torchtitan_v0_3.derived import derived
from torchtitan_cad.tyro_errors import say_error


def run_recipe(arguments: list[str], progress: SimpleNamespace) -> None:
    """Run torchtitan's own ``main`` on ``arguments``; its trainer, once built, ends ``progress.building``."""
    init_logger = titan_train.init_logger

    def init_quietly() -> None:
        """Keep back what all ranks of a node say alike, below which an error's one line would be lost."""
        init_logger()
        if not is_first_of_node():
            logging.getLogger().setLevel(logging.WARNING)

    class Announced:
        """Methods of a trainer that says when it has been built."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)  # type: ignore[call-arg]
            logging.getLogger().setLevel(logging.INFO)
            progress.building = False

    class Manager(ConfigManager):
        """Parses what ``ConfigManager`` does; what is wrong is a ValueError of one line."""

        def parse_args(self, args: list[str] | None = None) -> Any:
            given = [argument for argument in arguments if argument != TRACEBACK_OPTION]
            return derived(parse(given), Announced)

    if any(argument.split("=")[-1] in DEMO_TEXTS for argument in arguments):
        from torchtitan_cad.demo.datasets import register_datasets

        register_datasets()
    titan_train.init_logger = init_quietly
    titan_train.ConfigManager = Manager
    titan_train.main()


def parse(arguments: list[str]) -> Any:
    """Return the config of a recipe and its options. Raises ValueError that names what cannot be read."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return ConfigManager().parse_args(arguments)
    except SystemExit as end:  # tyro has printed a panel
        if not end.code:
            raise
        raise ValueError(
            f"{say_error(printed.getvalue())}; --help lists every option and what it takes"
        ) from None
