"""Rules of form: parameters of a function, lines of a file outside of the package (tests/budgets.py has the others)."""

import ast
from collections.abc import Iterator

import pytest

from tests.budgets import COMPILED, ROOT, lines_of

FOLDERS = ("torchtitan_cad", "bench", "examples", "tests")
MOST_PARAMETERS, MOST_LINES = 8, 450


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
            if not names & COMPILED:
                yield node


@pytest.mark.parametrize("folder", FOLDERS[:3])
def test_no_function_has_many_parameters(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        for function in _functions(ast.parse(path.read_text())):
            names = [each.arg for each in ast.iter_child_nodes(function.args) if isinstance(each, ast.arg)]
            count = len(set(names) - {"self", "cls"})
            assert count <= MOST_PARAMETERS, f"{path}:{function.lineno}: {function.name} has {count} parameters"


@pytest.mark.parametrize("folder", FOLDERS[1:])
def test_no_file_is_long(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        assert lines_of(path) <= MOST_LINES, f"{path} has {lines_of(path)} lines"
