# SPDX-License-Identifier: BSD-3-Clause
"""Budgets of lines for the package's rooms, files and functions, and for folders beside it, which make lint checks.

The licence's line at the beginning of a file does not count.
"""

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, BUDGETS = ROOT / "torchtitan_cad", Path(__file__).with_suffix(".toml")
LICENCE = "# SPDX-License-Identifier: BSD-3-Clause\n"
COMPILED = {"jit", "jit_inner", "triton.jit"}
"""Decorators of functions that numba and Triton compile, which may be longer."""


def lines_of(path: Path) -> int:
    return len(path.read_text().removeprefix(LICENCE).splitlines())


def sizes(package: Path) -> Iterator[tuple[str, str, int]]:
    """Kind ("file" or "function"), place in the package and lines of every file, and of functions not compiled."""
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package).as_posix()
        yield "file", place, lines_of(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                names = {ast.unparse(x.func if isinstance(x, ast.Call) else x) for x in node.decorator_list}
                if not names & COMPILED:
                    yield "function", f"{place}:{node.name}", node.end_lineno - node.lineno + 1


def problems(package: Path = PACKAGE, budgets: Path = BUDGETS) -> Iterator[str]:
    """A line for everything that exceeds its budget, and for every room without one."""
    limits = tomllib.loads(budgets.read_text())
    rooms = {folder.name for folder in package.iterdir() if (folder / "__init__.py").exists()}
    for room in sorted(rooms | set(limits["rooms"])):
        count = sum(map(lines_of, (package / room).rglob("*.py")))
        most = limits["rooms"].get(room, 0)
        if count > most:
            yield f"{room} has {count} lines, {most} are its budget: take lines out of this room"
    for folder, most in limits.get("folders", {}).items():
        counts = {path: lines_of(path) for path in sorted((package.parent / folder).rglob("*.py"))}
        if (count := sum(counts.values())) > most:
            yield f"{folder} has {count} lines, {most} are its budget: take lines out of this folder"
        for path, count in counts.items():
            if count > limits["most"]["beside"]:
                yield f"{folder}/{path.name} has {count} lines, at most {limits['most']['beside']} are allowed"
    for kind, place, count in sizes(package):
        most = limits.get("larger", {}).get(place, limits["most"][kind])
        if count > most:
            yield f"{place} has {count} lines, at most {most} are allowed"


if __name__ == "__main__":
    found = list(problems())
    print("\n".join(found) or "all rooms are within their budgets")
    sys.exit(bool(found))
