# SPDX-License-Identifier: BSD-3-Clause
"""Start torchtitan 0.3.0 as `python -m torchtitan_cad.train` does; import it after ``enable_cpu``."""

import argparse
import contextlib
import io
import logging
import pkgutil
from types import SimpleNamespace
from typing import Any

import torchtitan.train as titan_train
from torchtitan.config import ConfigManager

from torchtitan_cad import recipes
from torchtitan_cad.integration.errors import TRACEBACK_OPTION, is_first_of_node
from torchtitan_cad.integration.torchtitan_v0_3.checks import check_gradients
from torchtitan_cad.integration.torchtitan_v0_3.derived import derived
from torchtitan_cad.integration.torchtitan_v0_3.parts import add_demo_texts
from torchtitan_cad.tyro_errors import say_error

KNOWN_MODELS = sorted(module.name for module in pkgutil.iter_modules(recipes.__path__))


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
            config = parse(given)
            add_demo_texts(config)
            if not hasattr(config, "cad"):
                check_gradients(config)
            return derived(config, Announced)

    titan_train.init_logger = init_quietly
    titan_train.ConfigManager = Manager
    titan_train.main()


def parse(arguments: list[str]) -> Any:
    """Return the config of a recipe and its options. Raises ValueError that names what cannot be read."""
    module = _check_names(arguments)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return ConfigManager().parse_args(arguments)
    except SystemExit as end:  # tyro has printed a panel
        if not end.code:
            raise
        what = say_error(printed.getvalue())
        model = module.removeprefix("torchtitan.models.")
        remedy = "--help lists every option and what it takes"
        if "--cad." in what and model in KNOWN_MODELS:
            remedy = f"options of CAD need --module {recipes.__name__}.{model}"
        raise ValueError(f"{what}; {remedy}") from None


def _check_names(arguments: list[str]) -> str:
    """Return the module among ``arguments``. Raises ValueError without it or a config, or for a model without CAD."""
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    names = ("module", "config")
    for name in names:
        options.add_argument(f"--{name}", nargs="?")
    given, _ = options.parse_known_args(arguments)
    for name in names:
        if getattr(given, name) is None:
            raise ValueError(
                f"--{name} is missing: a job is --module {recipes.__name__}.<model> --config <recipe>, such as "
                "llama3 and llama3_8b; without CAD --module <model>"
            )
    known = [f"{recipes.__name__}.{model}" for model in KNOWN_MODELS]
    if given.module.startswith(recipes.__name__) and given.module not in known:
        raise ValueError(
            f"--module {given.module}: set it to one of: {', '.join(known)}"
        )
    return given.module
