"""Rules of form: parameters of a function, lines of a file outside of the package (tests/budgets.py has the others)."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("torchtitan_cad", "bench", "examples", "tests")
MOST_PARAMETERS, MOST_LINES = 8, 450
COMPILED = ("jit", "jit_inner", "jit_literal", "triton.jit")
"""Decorators of functions that numba and Triton compile."""


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """All that are not compiled, nor registered as a torch operator's kernel, whose schema is flat."""
    registered = {
        argument.id
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ".register_" in ast.unparse(call.func)
        for argument in call.args
        if isinstance(argument, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name not in registered:
            names = {ast.unparse(each.func if isinstance(each, ast.Call) else each) for each in node.decorator_list}
            if not names & set(COMPILED):
                yield node


@pytest.mark.parametrize("folder", FOLDERS[:3])
def test_no_function_has_many_parameters(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        for function in _functions(ast.parse(path.read_text())):
            each = function.args
            names = [
                one.arg for one in (*each.posonlyargs, *each.args, *each.kwonlyargs, each.vararg, each.kwarg) if one
            ]
            count = len([name for name in names if name not in ("self", "cls")])
            assert count <= MOST_PARAMETERS, f"{path}:{function.lineno}: {function.name} has {count} parameters"


@pytest.mark.parametrize("folder", FOLDERS[1:])
def test_no_file_is_long(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        count = len(path.read_text().splitlines())
        assert count <= MOST_LINES, f"{path} has {count} lines"
