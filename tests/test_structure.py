"""Rules of form that the package keeps: parameters of a function, lines of a file, who fills an attribute."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("torchtitan_cad", "bench", "examples", "tests")
MOST_PARAMETERS, MOST_LINES = 8, 450
COMPILED = ("jit", "jit_inner", "jit_inner", "jit_literal", "triton.jit")
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


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Targets, those of tuples one by one, and what they are set to, if that can be told apart."""
    if isinstance(node, ast.AnnAssign | ast.AugAssign):
        yield node.target, node.value
    for target in node.targets if isinstance(node, ast.Assign) else ():
        parts, value = getattr(target, "elts", None), node.value
        if parts is None:
            yield target, value
        else:
            values = value.elts if isinstance(value, ast.Tuple) else [None] * len(parts)
            yield from zip(parts, values, strict=True)


def test_only_its_own_methods_fill_what_an_object_begins_without() -> None:
    """What is None in a new object is set by no one else; titan022 completes objects of torchtitan's."""
    paths = [path for path in (ROOT / "torchtitan_cad").rglob("*.py") if "titan022" not in path.parts]
    nodes = [(path, node) for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    classes = [node for _, node in nodes if isinstance(node, ast.ClassDef)]
    builders = [f for each in classes for f in each.body if getattr(f, "name", None) in ("__init__", "__post_init__")]
    fields = [statement for each in classes for statement in each.body]
    empty = {
        ast.unparse(target).removeprefix("self.")
        for statement in (*fields, *(node for builder in builders for node in ast.walk(builder)))
        for target, value in _assignments(statement)
        if value is not None and re.fullmatch(r"None|field\(.*default=None.*\)", ast.unparse(value))
    }
    assert {"_flight", "incoming"} <= empty
    for path, node in nodes:
        for target, _ in _assignments(node):
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) not in ("self", "ctx"):
                assert target.attr not in empty, f"{path}:{node.lineno}: {ast.unparse(node)}"
