# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan's config manager as `torchtitan_cad.train` uses it: it knows ``[cad]`` by itself, and says in one sentence
what is wrong with a file or an option.
"""

import contextlib
import difflib
import inspect
import itertools
import logging
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any
from unittest import mock

from torchtitan.config import ConfigManager, JobConfig
from torchtitan.config import job_config as titan_config
from typeguard import CollectionCheckStrategy, TypeCheckError, check_type

from torchtitan_cad.integration.errors import TRACEBACK_OPTION
from torchtitan_cad.integration.torchtitan_v0_2 import plugin
from torchtitan_cad.integration.torchtitan_v0_2.rules import has_cad
from torchtitan_cad.tyro_errors import one_line_instead

_LISTED_KEYS = 12


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
        with one_line_instead(), _left_to_rules():
            config = super().parse_args(
                [arg for arg in args if arg != TRACEBACK_OPTION]
            )
        # those with CAD have been checked by the plugin, under torchtitan's manager too
        if not has_cad(config):
            plugin.check_start(config)
        return config

    def _maybe_load_toml(self, args: list[str]) -> dict[str, Any] | None:
        files = _config_files(args)
        if len(files) > 1:  # torchtitan reads the first and does not say so
            listed = " and ".join(map(repr, files))
            raise ValueError(
                f"job.config_file is given {len(files)} times, as {listed}; give it once"
            )
        try:
            with quiet():  # torchtitan logs a traceback, and raises as well
                return super()._maybe_load_toml(args)
        except (OSError, ValueError) as error:
            path = getattr(error, "filename", None) or files[0]
            if isinstance(error, OSError):
                reason = error.strerror
                remedy = "set it to a TOML file that can be read"
            else:
                reason = str(error)
                remedy = "correct that line; every [table] may appear once, with all of its keys"
            raise ValueError(
                f"job.config_file = {path!r}: {reason}; {remedy}"
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
        check_keys(config_cls, toml_values or {}, args)
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


def check_keys(config_cls: Any, table: dict[str, Any], args: list[str]) -> None:
    """Check the keys of a TOML file and their types, and the names of options, whose values are tyro's to check.

    Raises ValueError that names the key and the nearest right one, or its value and what to set.
    """
    kinds = dict(job_keys(config_cls))
    entries = list(_entries(table, kinds))
    for name in [*(name for name, _ in entries), *_option_keys(args, kinds)]:
        if name not in kinds:
            raise ValueError(f"{name}: no such key; {_nearest(name, kinds)}")
    for name, value in entries:
        kind = kinds[name]
        try:
            check_type(
                value,
                kind,
                collection_check_strategy=CollectionCheckStrategy.ALL_ITEMS,
            )
        except TypeCheckError:
            wanted = inspect.formatannotation(kind)
            raise ValueError(
                f"{name} = {value!r}: set a value of type {wanted}"
            ) from None


def job_keys(config_cls: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key with its type."""
    for field in fields(config_cls):
        if is_dataclass(field.type):
            yield from job_keys(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field.type


def _entries(
    table: dict[str, Any], kinds: Collection[str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield every key of a TOML file with its value."""
    for key, value in table.items():
        name = prefix + key
        if isinstance(value, dict) and any(
            kind.startswith(f"{name}.") for kind in kinds
        ):
            yield from _entries(value, kinds, f"{name}.")
        else:
            yield name, value


def _option_keys(args: list[str], known: Collection[str]) -> Iterator[str]:
    for arg in args:
        name = arg.removeprefix("--").split("=")[0].replace("-", "_")
        # a value, or an option of tyro's own
        if not arg.startswith("--") or "." not in name:
            continue
        table, _, key = name.rpartition(".")
        positive = f"{table}.{key.removeprefix('no_')}"
        yield positive if positive in known else name


def _nearest(name: str, known: Collection[str]) -> str:
    table, _, key = name.rpartition(".")
    siblings = sorted(
        other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == table
    )
    if close := difflib.get_close_matches(key, siblings, 1):
        return f"did you mean {table}.{close[0]}?"
    if elsewhere := sorted(other for other in known if other.rpartition(".")[2] == key):
        return f"did you mean {' or '.join(elsewhere)}?"
    tables = sorted({other.rpartition(".")[0] for other in known})
    if name in tables:
        return f"it is a table: write its keys below [{name}]"
    close = difflib.get_close_matches(table or key, tables, 1)
    if close and not siblings:
        return f"did you mean the table [{close[0]}]?"
    if not table or not siblings:
        return f"the tables are {', '.join(tables)}"
    listed = ", ".join(siblings[:_LISTED_KEYS]) + (
        ", ..." if len(siblings) > _LISTED_KEYS else ""
    )
    return f"set one of [{table}]: {listed}"


def _config_files(args: list[str]) -> list[str]:
    """Return all values of ``--job.config_file``, in either form."""
    options = (
        arg.split("=", 1) if "=" in arg else (arg, after)
        for arg, after in itertools.pairwise([*args, ""])
    )
    return [
        value
        for name, value in options
        if name.replace("-", "_") == "__job.config_file"
    ]


@contextlib.contextmanager
def _left_to_rules() -> Iterator[None]:
    """Keep torchtitan from asserting what values are while it makes its tables: ``rules`` names the key as well."""
    with (
        mock.patch.object(titan_config.Validation, "__post_init__", return_value=None),
        mock.patch.object(titan_config.Parallelism, "__post_init__", return_value=None),
    ):
        yield
