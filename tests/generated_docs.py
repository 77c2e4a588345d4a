"""Writes the parts of docs/ that repeat the code: ``make docs``.

A page has a part that begins with a line ``<!-- generated: NAME -->`` and ends with ``<!-- end -->``.
"""

import ast
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "torchtitan_cad" / "integration" / "config.py"


def options() -> str:
    """The keys of ``[cad]``: type, default, and what the dataclass says of each."""
    tree = ast.parse(CONFIG.read_text())
    cad = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Cad")
    lines: list[str] = []
    for field, text in zip(cad.body, cad.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(text, ast.Expr):
            continue
        assert isinstance(text.value, ast.Constant)
        assert field.value is not None
        name, kind = ast.unparse(field.target), ast.unparse(field.annotation)
        lines += [f"**`{name}`** ({kind}, default {_default(field.value)})", ""]
        lines += [*(line.strip() for line in str(text.value.value).strip().splitlines()), ""]
    return "\n".join(lines)


def _default(value: ast.expr) -> str:
    """A default as TOML has it; a name stands for its value in the planner's config."""
    if isinstance(value, ast.Attribute | ast.Name):
        from torchtitan_cad.integration import config

        text = repr(eval(ast.unparse(value), vars(config)))
    else:
        text = ast.unparse(value)
    return {"None": "none", "True": "`true`", "False": "`false`"}.get(text, f"`{text}`".replace("'", '"'))


PARTS: dict[str, tuple[Path, Callable[[], str]]] = {"options": (ROOT / "docs" / "configuration.md", options)}


def with_part(page: str, name: str, text: str) -> str:
    """``page`` with its generated part ``name`` replaced.

    Raises:
        ValueError: the page has no such part.
    """
    pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"there is no part '{name}'")
    return pattern.sub(lambda match: f"{match[1]}\n{text}\n{match[2]}", page)


if __name__ == "__main__":
    for part, (path, generate) in PARTS.items():
        path.write_text(with_part(path.read_text(), part, generate()))
