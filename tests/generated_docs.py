# SPDX-License-Identifier: BSD-3-Clause
"""Writes what docs/ repeat of the code, between two comments: the keys of ``[cad]`` and the API. ``make docs``."""

import ast
import inspect
import re
from itertools import pairwise
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ROOT / "docs/settings.md"
API = ROOT / "docs/api.md"


def options() -> str:
    """The keys of ``[cad]``: type, default, and what the dataclass says of each."""
    from torchtitan_cad.integration.config import Cad

    (cad,) = ast.parse(inspect.getsource(Cad)).body
    lines = []
    for field, text in pairwise(cad.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            name = ast.unparse(field.target)
            kind = ast.unparse(field.annotation)
            words = inspect.cleandoc(ast.literal_eval(text.value))
            default = _default(field.value)
            lines += [f"**`{name}`** ({kind}, default {default})", "", words, ""]
    return "\n".join(lines)


def _default(value: ast.expr) -> str:
    """A default as TOML has it; a name stands for its value in the planner's config."""
    if isinstance(value, ast.Attribute | ast.Name):
        from torchtitan_cad.integration import config

        text = repr(eval(ast.unparse(value), vars(config)))
    else:
        text = ast.unparse(value)
    return {"None": "none", "True": "`true`", "False": "`false`"}.get(
        text, f"`{text}`".replace("'", '"')
    )


def api() -> str:
    """Names, parameters and first paragraphs of what can be imported."""
    from torchtitan_cad import planning
    from torchtitan_cad.runtime import engine, ops
    from torchtitan_cad.runtime.transport import base, build

    parts = (
        (planning, planning.__all__),
        (ops, ["core_attention"]),
        (engine, ["register_engine", "CoreAttentionEngine"]),
        (base, ["Transport", "Route", "Pending"]),
        (build, ["build_transport"]),
    )
    return "\n".join(_module(module, names) for module, names in parts)


def _module(module: ModuleType, names: list[str]) -> str:
    lines = [f"## {module.__name__}", ""]
    for name in names:
        value = getattr(module, name)
        if not callable(value):
            continue
        lines += [f"**`{name}`** `({_parameters(value)})`", "", _summary(value), ""]
    return "\n".join(lines)


def _parameters(value) -> str:
    """Names of parameters and their defaults; none of protocols."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return ""
    if getattr(value, "_is_protocol", False):
        return "protocol"
    named = [
        parameter
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    return ", ".join(
        parameter.name
        if parameter.default is parameter.empty
        else f"{parameter.name}={_value(parameter.default)}"
        for parameter in named
    )


def _value(default) -> str:
    is_plain = isinstance(default, int | float | str | tuple | None)
    return repr(default) if is_plain else "..."


def _summary(value) -> str:
    """The first paragraph of the docstring, as Markdown."""
    text = (
        (inspect.getdoc(value) or "")
        .split("\n\n")[0]
        .replace("``", "`")
        .replace("\n", " ")
    )
    return re.sub(r":\w+:`", "`", text)


def up_to_date(page: Path) -> str:
    """Return the page with its generated part as the code has it."""
    make = {SETTINGS: options, API: api}[page]
    part = re.compile(r"(<!-- generated -->\n).*?(<!-- end -->)", re.DOTALL)
    text, count = part.subn(
        lambda match: f"{match[1]}\n{make()}\n{match[2]}", page.read_text()
    )
    assert count == 1, f"{page} has no generated part"
    return text


if __name__ == "__main__":
    for page in (SETTINGS, API):
        page.write_text(up_to_date(page))
