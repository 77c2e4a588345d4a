# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan's config manager as `torchtitan_cad.train` uses it: it knows ``[cad]`` by itself, and says in one sentence
what is wrong with a file or an option.
"""

import contextlib
import difflib
import inspect
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from torchtitan.config import ConfigManager, JobConfig
from typeguard import CollectionCheckStrategy, TypeCheckError, check_type

from torchtitan_cad.integration.errors import TRACEBACK_OPTION
from torchtitan_cad.integration.torchtitan_v0_2 import plugin
from torchtitan_cad.integration.torchtitan_v0_2.rules import has_cad
from torchtitan_cad.tyro_errors import one_line_instead


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence log lines and warnings."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


class CadConfigManager(ConfigManager):
    """Parses what ``ConfigManager`` does, with this package's keys next to those of ``job.custom_config_module``."""

    def parse_args(self, args: list[str] = sys.argv[1:]) -> JobConfig:
        """Return the parsed config. Raises ValueError that names what cannot be read, and the nearest right one."""
        with one_line_instead():
            config = super().parse_args(
                [arg for arg in args if arg != TRACEBACK_OPTION]
            )
        # those with CAD have been checked by the plugin, under torchtitan's manager too
        if not has_cad(config):
            plugin.check_start(config)
        return config

    def _maybe_load_toml(self, args: list[str]) -> dict[str, Any] | None:
        try:
            with quiet():  # torchtitan logs a traceback, and raises as well
                return super()._maybe_load_toml(args)
        except OSError as error:
            raise ValueError(
                f"job.config_file = {error.filename!r}: {error.strerror}; set it to a TOML file that can be read"
            ) from error
        except ValueError as error:
            raise ValueError(
                f"job.config_file: {error}; correct that line; every [table] may appear once, with all of its keys"
            ) from error

    def _maybe_add_custom_config(
        self, args: list[str], toml_values: dict[str, Any] | None
    ) -> type[JobConfig]:
        try:
            config_cls = super()._maybe_add_custom_config(args, toml_values)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"job.custom_config_module: {error}; leave it out for torchtitan_cad's own keys, or make it importable"
            ) from error
        if "cad" not in {field.name for field in fields(config_cls)}:
            # Importing the module lets the plugin see the parsed config.
            from torchtitan_cad import job_config

            config_cls = self._merge_configs(config_cls, job_config.JobConfig)
        check_table(toml_values or {}, config_cls)
        return config_cls


def read_config(args: Sequence[str]) -> JobConfig:
    """Return the config, valid or not, and leave torchtitan as it is.

    Raises ValueError for a file or option that cannot be read.
    """
    manager = CadConfigManager()
    try:
        manager.parse_args(list(args))
    except Exception:
        if manager.config.job.config_file is None:  # not yet replaced by what was read
            raise
    finally:
        plugin.restore()
    return manager.config


def check_table(table: dict[str, Any], config_cls: Any, prefix: str = "") -> None:
    """Check the keys of a TOML table, and the types of values that TOML can have.

    Raises ValueError that names the key and the nearest right one, or its value and what to set.
    """
    kinds = {field.name: field.type for field in fields(config_cls)}
    for key, value in table.items():
        name = prefix + key
        if key not in kinds:
            close = difflib.get_close_matches(key, kinds, 1)
            listed = f"set one of {', '.join(kinds)}"
            remedy = f"did you mean {prefix}{close[0]}?" if close else listed
            raise ValueError(f"{name}: no such key or table; {remedy}")
        kind = kinds[key]
        if is_dataclass(kind):
            if not isinstance(value, dict):
                raise ValueError(f"{name} = {value!r}: write a table [{name}]")
            check_table(value, kind, f"{name}.")
        elif _is_of_toml(kind):
            items = CollectionCheckStrategy.ALL_ITEMS
            try:
                check_type(value, kind, collection_check_strategy=items)
            except TypeCheckError:
                wanted = inspect.formatannotation(kind)
                raise ValueError(
                    f"{name} = {value!r}: set a value of type {wanted}"
                ) from None


def _is_of_toml(kind: Any) -> bool:
    """Tell whether TOML has all values of a type; it lacks those of a user's own keys, such as Path or tuple."""
    origin = get_origin(kind)
    if origin in (list, Union, UnionType):
        return all(map(_is_of_toml, get_args(kind)))
    return origin is Literal or kind in (bool, int, float, str, NoneType)
