"""Budgets of lines for the rooms, files and functions of the package: ``python -m tests.budgets``, in make lint."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, BUDGETS = ROOT / "torchtitan_cad", Path(__file__).with_suffix(".toml")
COMPILED = {"jit", "jit_inner", "jit_leaf", "jit_literal", "triton.jit"}
"""Decorators of functions that numba and Triton compile, which may be longer."""


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def long_functions(path: Path, most: int) -> Iterator[str]:
    """Functions of more than ``most`` lines, with their places."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        names = {ast.unparse(each.func if isinstance(each, ast.Call) else each) for each in node.decorator_list}
        count = node.end_lineno - node.lineno + 1
        if count > most and not names & COMPILED:
            yield f"{path}:{node.lineno}: {node.name} has {count} lines, at most {most} are allowed"


def problems(package: Path = PACKAGE, budgets: Path = BUDGETS) -> Iterator[str]:
    """What exceeds its budget, one line each; and rooms without one."""
    limits = tomllib.loads(budgets.read_text())
    rooms = {folder.name for folder in package.iterdir() if (folder / "__init__.py").exists()}
    for room in sorted(rooms | set(limits["rooms"])):
        count = sum(map(lines_of, (package / room).rglob("*.py")))
        most = limits["rooms"].get(room, 0)
        if count > most:
            yield f"{room} has {count} lines, {most} are its budget: take lines out of this room"
    for path in sorted(package.rglob("*.py")):
        if (count := lines_of(path)) > limits["most"]["file"]:
            yield f"{path} has {count} lines, at most {limits['most']['file']} are allowed"
        yield from long_functions(path, limits["most"]["function"])


if __name__ == "__main__":
    found = list(problems())
    print("\n".join(found) or "all rooms are within their budgets")
    sys.exit(bool(found))
