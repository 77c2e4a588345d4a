"""Reads a job's config for commands that do not train."""

from collections.abc import Sequence

from torchtitan.config import JobConfig

from torchtitan_cad.integration.titan022 import plugin
from torchtitan_cad.integration.titan022.manager import CadConfigManager

_MODULE_KEYS = ("job.custom_config_module", "job.custom-config-module")


def read_config(args: Sequence[str]) -> tuple[JobConfig, bool]:
    """Return the config, valid or not, and whether the job names a ``custom_config_module``.

    Leaves torchtitan as it is. Raises ValueError for a file or option that cannot be read.
    """
    manager = CadConfigManager()
    toml = manager._maybe_load_toml(list(args)) or {}
    on_command_line = any(arg.removeprefix("--").split("=")[0] in _MODULE_KEYS for arg in args)
    try:
        manager.parse_args(list(args))
    except Exception:
        if manager.config.job.config_file is None:  # not yet replaced by what was read
            raise
    finally:
        plugin.restore()
    return manager.config, on_command_line or bool(toml.get("job", {}).get("custom_config_module"))
