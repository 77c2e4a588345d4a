"""Writes the keys of ``[cad]`` into docs/settings.md, between two comments: ``make docs``."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIG, PAGE = ROOT / "torchtitan_cad/integration/config.py", ROOT / "docs/settings.md"


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


def up_to_date() -> str:
    """Return the page with its generated part as the code has it."""
    part = re.compile(r"(<!-- generated: options -->\n).*?(<!-- end -->)", re.DOTALL)
    page, count = part.subn(lambda match: f"{match[1]}\n{options()}\n{match[2]}", PAGE.read_text())
    assert count == 1, f"{PAGE} has no generated part"
    return page


if __name__ == "__main__":
    PAGE.write_text(up_to_date())
