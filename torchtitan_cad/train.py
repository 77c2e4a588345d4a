# SPDX-License-Identifier: BSD-3-Clause
"""Start torchtitan: on accelerators as it is, on CPU ranks when there are none.

    torchrun --nproc_per_node=2 -m torchtitan_cad.train --job.config_file train.toml                  (torchtitan 0.2.2)
    torchrun ... -m torchtitan_cad.train --module torchtitan_cad.recipes.llama3 --config llama3_8b    (torchtitan 0.3.0)

takes the same arguments as `-m torchtitan.train` and runs the same `Trainer`. Whether core attention is disaggregated
is decided by the configuration (`parallelism.cad`, or the recipe), not by this entry point. It knows the keys of
`torchtitan_cad.job_config` without `job.custom_config_module`, and says what is wrong with a job in one line.
"""

import logging
import sys
from types import SimpleNamespace
from typing import Any

from torchtitan_cad.integration.errors import (
    TRACEBACK_OPTION,
    first_of_node_logs,
    one_line_errors,
)
from torchtitan_cad.runtime.signals import end_at_once
from torchtitan_cad.titan import check_has_recipes, check_has_toml, has_recipes


def main() -> None:
    """Run torchtitan's own `main` on `sys.argv`."""
    arguments = sys.argv[1:]
    with one_line_errors(arguments) as progress:
        if any(argument.split("=")[0] == "--module" for argument in arguments):
            check_has_recipes()
        if any(
            argument.split("=")[0] in ("--job.config_file", "--job.config-file")
            for argument in arguments
        ):
            check_has_toml()
        if has_recipes():
            of_job = [option for option in arguments if option != TRACEBACK_OPTION]
            _run_recipe(of_job, progress)
        else:
            _run_toml(progress)


def _run_recipe(arguments: list[str], progress: SimpleNamespace) -> None:
    from torchtitan_cad.integration.cpu import enable_cpu

    enable_cpu()
    # torchtitan must not be imported before enable_cpu().
    from torchtitan_cad.integration.torchtitan_v0_3 import entry

    entry.run_recipe(arguments, progress)


def _run_toml(progress: SimpleNamespace) -> None:
    from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu

    enable_cpu()
    # torchtitan must not be imported before enable_cpu().
    import torchtitan.train as titan_train

    from torchtitan_cad.integration.torchtitan_v0_2.manager import CadConfigManager

    def build(config: Any) -> Any:
        trainer = titan_train.Trainer(config)
        logging.getLogger().setLevel(logging.INFO)
        progress.building = False
        return trainer

    titan_train.init_logger = first_of_node_logs(titan_train.init_logger)
    titan_train.ConfigManager = CadConfigManager
    titan_train.main(build)


def start() -> None:
    """Run `main` as the process's own, and end it at once.

    If it has failed, the launcher and the other ranks wait for its end. If not, nothing is left to do, and process
    groups of gloo that something still refers to may abort the interpreter's own end ("terminate called without an
    active exception", seen with torch 2.13): the finished job would count as failed.
    """
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    end_at_once(code)


if __name__ == "__main__":
    start()
