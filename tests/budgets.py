# SPDX-License-Identifier: BSD-3-Clause
"""Budgets of what the code costs to read, which `make lint` checks against tests/budgets.toml.

    python -m tests.budgets                     # what exceeds its budget
    python -m tests.budgets --rule splats       # every place that breaks a rule

A token is one of Python's; docstrings, comments, line ends and indentation do not count, so that no layout of lines
changes the figures but tokens a line.
"""

import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tyro

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torchtitan_cad"
BUDGETS = Path(__file__).with_suffix(".toml")
LICENCE = "# SPDX-License-Identifier: BSD-3-Clause\n"
COMPILED = {"jit", "jit_inner", "triton.jit"}
"""Decorators of functions that numba and Triton compile."""
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
PRONOUNS = {"each", "given", "mine", "now", "ours", "theirs", "these", "those"}
MOST_POSITIONAL = 3
LIBRARIES = ("np", "torch", "tl", "math", "print", "max", "min")
"""What calls begin with whose arguments are named by a library."""


class Source:
    """A file's syntax tree, and the tokens of code that begin on each of its lines."""

    def __init__(self, path: Path, folder: Path) -> None:
        text = path.read_text()
        self.place = path.relative_to(folder).as_posix()
        self.tree = ast.parse(text)
        self.tokens = Counter()
        docstrings = {
            node.lineno
            for node in self.nodes(ast.Expr)
            if isinstance(node.value, ast.Constant)
        }
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            line = token.start[0]
            is_docstring = token.type == tokenize.STRING and line in docstrings
            if token.type not in LAYOUT and not is_docstring:
                self.tokens[line] += 1

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[Any]:
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds))

    def functions(self) -> Iterator[tuple[str, bool, int]]:
        """Yield the place of every function, whether it is compiled, and its tokens."""
        for node in self.nodes(ast.FunctionDef, ast.AsyncFunctionDef):
            names = {
                ast.unparse(x.func if isinstance(x, ast.Call) else x)
                for x in node.decorator_list
            }
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            count = sum(self.tokens[line] for line in lines)
            yield f"{self.place}:{node.name}", bool(names & COMPILED), count


def sources(folder: Path) -> list[Source]:
    return [Source(path, folder) for path in sorted(folder.rglob("*.py"))]


# Rules ----------------------------------------------------------------------------------------------------------------


def splats(source: Source) -> Iterator[ast.AST]:
    """Arguments that are unpacked from a tuple which the same file puts together."""
    tuples = set()
    for node in source.nodes(ast.Assign):
        if isinstance(node.value, ast.Tuple):
            tuples |= {ast.unparse(target) for target in node.targets}
    for node in source.nodes(ast.Call):
        starred = (x.value for x in node.args if isinstance(x, ast.Starred))
        yield from (x for x in starred if getattr(x, "id", None) in tuples)


def walruses_in_and(source: Source) -> Iterator[ast.AST]:
    """Assignments inside of a condition with "and"."""
    for node in source.nodes(ast.BoolOp):
        if isinstance(node.op, ast.And):
            yield from (x for x in ast.walk(node) if isinstance(x, ast.NamedExpr))


def tuple_assignments(source: Source) -> Iterator[ast.AST]:
    """Several assignments in one."""
    for node in source.nodes(ast.Assign):
        sides = (node.value, node.targets[0])
        if all(isinstance(side, ast.Tuple) for side in sides):
            yield node


def nested_comprehensions(source: Source) -> Iterator[ast.AST]:
    """Comprehensions with more than one "for"."""
    for node in source.nodes(ast.AST):
        if len(getattr(node, "generators", ())) > 1:
            yield node


def long_calls(source: Source) -> Iterator[ast.AST]:
    """Calls with more than ``MOST_POSITIONAL`` arguments without a name."""
    for node in source.nodes(ast.Call):
        function = ast.unparse(node.func).split(".")[0]
        if len(node.args) > MOST_POSITIONAL and function not in LIBRARIES:
            yield node


def pronouns(source: Source) -> Iterator[ast.AST]:
    """Variables and parameters that are called by a pronoun."""
    for node in source.nodes(ast.arg):
        if node.arg in PRONOUNS:
            yield node
    for node in source.nodes(ast.Name):
        if isinstance(node.ctx, ast.Store) and node.id in PRONOUNS:
            yield node


RULES = {
    "splats": splats,
    "walruses_in_and": walruses_in_and,
    "tuple_assignments": tuple_assignments,
    "nested_comprehensions": nested_comprehensions,
    "long_calls": long_calls,
    "pronouns": pronouns,
}


def places(rule: str, package: Path) -> list[str]:
    """Return the places in a package that break a rule."""
    if rule == "repeated_names":
        return repeated_names(package)
    return [
        f"{source.place}:{node.lineno}"
        for source in sources(package)
        for node in RULES[rule](source)
    ]


def repeated_names(package: Path) -> list[str]:
    """Return names that several files define at their top, without an underscore."""
    files = defaultdict(list)
    for source in sources(package):
        for node in source.tree.body:
            for target in getattr(node, "targets", [node]):
                name = getattr(target, "name", getattr(target, "id", "_"))
                if not name.startswith("_"):
                    files[name].append(source.place)
    return [
        f"{name}: {', '.join(found)}"
        for name, found in sorted(files.items())
        if len(found) > 1
    ]


# Budgets --------------------------------------------------------------------------------------------------------------


def problems(package: Path = PACKAGE, budgets: Path = BUDGETS) -> Iterator[str]:
    """Yield a line for everything that exceeds its budget, and for every room without one."""
    limits = tomllib.loads(budgets.read_text())
    yield from room_problems(package, limits)
    yield from function_problems(package, limits["function"])
    for rule, most in limits["rules"].items():
        found = places(rule, package)
        if len(found) > most:
            yield f"{rule}: {len(found)} places, {most} are allowed: python -m tests.budgets --rule {rule}"


def room_problems(package: Path, limits: dict) -> Iterator[str]:
    """Check the tokens of rooms and folders, and the tokens in a line of code of the package and of every file."""
    tokens = Counter()
    lines = 0
    for source in sources(package):
        of_file = source.tokens.total()
        tokens[source.place.split("/")[0] if "/" in source.place else "top"] += of_file
        lines += len(source.tokens)
        most = limits["line"]["heavier"].get(source.place, limits["line"]["file"])
        if source.tokens and of_file / len(source.tokens) > most:
            yield f"{source.place} has {of_file / len(source.tokens):.1f} tokens in a line of code, {most} are allowed"
    overall = tokens.total() / lines
    if overall > limits["line"]["overall"]:
        yield f"a line of code has {overall:.2f} tokens, {limits['line']['overall']} are allowed"
    for folder in limits["beside"]:
        tokens[folder] = sum(
            source.tokens.total() for source in sources(package.parent / folder)
        )
    budgets = {**limits["rooms"], **limits["beside"]}
    for room, count in tokens.items():
        if count > budgets.get(room, 0):
            yield f"{room} has {count:,} tokens, {budgets.get(room, 0):,} are its budget"


def function_problems(package: Path, limits: dict) -> Iterator[str]:
    """Check the tokens of functions."""
    for source in sources(package):
        for place, is_compiled, count in source.functions():
            most = limits["heavier"].get(
                place, limits["compiled" if is_compiled else "most"]
            )
            if count > most:
                yield f"{place} has {count} tokens, {most} are allowed"


def main(rule: str = "") -> int:
    """Print what exceeds its budget, or the places that break a rule."""
    found = places(rule, PACKAGE) if rule else list(problems())
    print("\n".join(found) or "all budgets are kept")
    return 0 if rule else int(bool(found))


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
