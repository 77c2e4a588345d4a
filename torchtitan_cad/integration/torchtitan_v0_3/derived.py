# SPDX-License-Identifier: BSD-3-Clause
"""Classes between a recipe's and CAD's: whatever class a recipe names, CAD's methods come before its own."""

from dataclasses import field, fields, make_dataclass
from typing import Any


def derived(config: Any, methods: type, **added: Any) -> Any:
    """Return a config with the values of ``config`` that builds a subclass of what ``config`` builds.

    Args:
        config: a torchtitan ``Configurable.Config``.
        methods: class whose methods come before those of the class that ``config`` builds.
        added: further fields of the config, by name, with their values, whose classes have defaults.
    """
    base = type(config)
    owner = base._owner
    new_fields = []
    for name, value in added.items():
        value_cls = type(value)
        new_fields.append((name, value_cls, field(default_factory=value_cls)))
    config_cls = make_dataclass(
        "Config", new_fields, bases=(base,), kw_only=True, slots=True
    )
    body = {"Config": config_cls, "__module__": methods.__module__}
    # torchtitan notes the new class as what the new config builds.
    type(owner)(f"{methods.__name__}Of{owner.__name__}", (methods, owner), body)
    for one in fields(base):
        if one.init:
            added[one.name] = getattr(config, one.name)
    return config_cls(**added)
